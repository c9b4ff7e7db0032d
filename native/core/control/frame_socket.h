// A stream socket that carries frames: bytes come in and whole frames come out, and the reverse. Between two
// processes of one host, most frames then go through a pair of rings in shared memory (frame_ring.h). The
// socket stays in use for frames that are too large, to wake a reader that sleeps, and to show when the peer
// is gone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/control/frame_ring.h"
#include "core/control/wire.h"
#include "core/tls/channel.h"
#include "kvxfer/transport.h"

namespace kvxfer {

class FrameSocket final : public Reactor::Handler {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual std::uint32_t max_body() = 0;              // of the frame that comes next
    virtual void on_frame(wire::ByteSpan frame) = 0;   // header, body, mac
    // Its turn is over and more is left: call read_more() when others have had their turn.
    virtual void on_more() {}
    virtual void on_secure() {}  // the handshake of its channel is done; no frame has come or gone yet
    // From now on the owner must look at the ring: its writer has announced, once, that something is in
    // it.
    virtual void on_announced() {}
    virtual void on_closed(const std::string& why) = 0;  // at most once; not after close()
    // A buffer shared by all sockets that are read one after the other, so that only a socket that waits
    // for the rest of a frame holds memory for it.
    virtual std::vector<std::byte>& read_buffer() = 0;
  };

  // `connecting`: the socket's connect() is under way. `exact`: never reads past the frame that comes
  // next, for a socket that will be handed on. `channel`: encrypts everything on the socket; its handshake
  // comes first, and takes one step a turn.
  FrameSocket(Reactor& reactor, UniqueFd fd, Owner& owner, bool connecting, bool exact,
              std::unique_ptr<tls::Channel> channel = nullptr);
  ~FrameSocket() override;

  Status start();  // adds it to the reactor
  void send(wire::Bytes&& frame);  // leaves it as it is if memory is lacking
  void flush();
  std::size_t num_unsent() const noexcept { return out_.size() - out_begin_; }
  bool is_full() const noexcept { return writing_; }  // the reactor announces when it takes more
  void close() noexcept;  // after one last flush
  // While connecting(), or in on_closed after connecting failed: goes on over another TCP socket, and
  // sends everything that waits there.
  Status redial(UniqueFd fd, bool connecting);
  UniqueFd release() noexcept;  // the socket, for another owner; that owner takes the channel as well
  std::unique_ptr<tls::Channel> release_channel() noexcept { return std::move(channel_); }
  // From now on charges this budget for frames that the peer does not read and for frames that have come
  // in part.
  void charge(std::shared_ptr<Budget> budget);

  int fd() const noexcept { return fd_.get(); }
  bool open() const noexcept { return static_cast<bool>(fd_); }
  // Still true in on_closed if connecting failed.
  bool connecting() const noexcept { return connecting_; }
  const tls::Channel* channel() const noexcept { return channel_.get(); }  // null: it is plain
  bool is_securing() const noexcept { return channel_ != nullptr && !channel_->is_secure(); }
  bool hung_up() const noexcept;  // true if the peer has hung up, even if bytes that it sent are unread

  // Call it when the peer is known: offers it a ring to write to, and uses the ring that it offers. False
  // if the socket is not between processes of one host. A peer that does not know rings goes on as before.
  bool share_memory();
  void read_more();
  bool read_ring();  // delivers the frames that the ring holds; true if there were any
  // From this call until wake_up() the peer announces over the socket that it has written to the ring.
  // False if something is in the ring already: look again.
  bool fall_asleep() noexcept;
  void wake_up() noexcept;

  void on_ready(std::uint32_t events) override;

 private:
  // What a peer may leave unread before it is given up: four of the largest frames.
  static constexpr std::size_t kMaxUnsent = 4 * (wire::kMaxBody + 64);

  void read();
  void read_all();
  void borrow_buffer();
  void return_buffer();  // unless bytes in it wait for more
  void transmit_all();
  bool make_room(std::size_t nbytes);  // for bytes that come; false: it failed
  void take_turn();  // delivers whole frames, up to a bound
  void wait_for_turn();
  void secure();  // one step of the handshake
  std::string reason(int error) const;
  ssize_t receive(std::byte* into, std::size_t nbytes);
  ssize_t transmit();
  void use_ring(UniqueFd fd);
  bool deliver();  // the next frame, if it is there and whole
  void fail(const std::string& why);
  template <class Work>
  bool attempt(Work&& work);  // Runs `work`; if there is no memory for it, the socket fails.
  void want(bool write);

  Reactor& reactor_;
  UniqueFd fd_;
  Owner& owner_;
  bool connecting_, exact_, writing_ = false;
  const bool local_;
  std::unique_ptr<tls::Channel> channel_;
  std::vector<std::byte> in_;  // it is the owner's buffer while the socket is read
  std::size_t in_begin_ = 0, in_end_ = 0;
  std::vector<std::byte> out_;
  std::size_t out_begin_ = 0;
  std::shared_ptr<Budget> budget_;
  Charge unread_;  // what was left when the socket took no more
  Charge room_;  // for in_, if it is not the owner's

  std::uint64_t num_delivered_ = 0;  // the number of the frame that comes next
  std::unique_ptr<RingReader> inbox_;
  std::unique_ptr<RingWriter> outbox_;
  UniqueFd offered_;  // the inbox's descriptor, until it has gone out
  UniqueFd arrived_;  // the peer's offer, until the peer is known
  wire::Bytes from_ring_;
  bool has_more_ = false;  // was read, and waits for the next turn
  bool pushed_ = false;  // since the last flush
};

}  // namespace kvxfer
