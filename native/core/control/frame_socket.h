// A stream socket that carries frames: bytes in, whole frames out, and back. Between two processes of
// one host most of them then go through a pair of rings in shared memory (frame_ring.h). The socket
// stays: for what is too large, for whoever sleeps, and to tell when the peer is gone.
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
    virtual void on_more() {}  // it took its turn: read_more(), when others have had theirs
    virtual void on_secure() {}  // the handshake of its channel is done; no frame has come or gone yet
    // The ring is to be looked at from now on: its writer has said that something is in it, and says so once.
    virtual void on_announced() {}
    virtual void on_closed(const std::string& why) = 0;  // at most once; not after close()
    // What sockets that are read one after the other read into, so that only those which wait for the rest of a
    // frame hold memory for it.
    virtual std::vector<std::byte>& read_buffer() = 0;
  };

  // `connecting`: the socket's connect() is under way. `exact`: never reads past the frame that
  // comes next, for a socket that will be handed on. `channel`: encrypts all that goes over it; its handshake comes
  // first, each step of it in a turn.
  FrameSocket(Reactor& reactor, UniqueFd fd, Owner& owner, bool connecting, bool exact,
              std::unique_ptr<tls::Channel> channel = nullptr);
  ~FrameSocket() override;

  Status start();  // adds it to the reactor
  void send(wire::Bytes frame);
  void flush();
  void close() noexcept;  // after one last flush
  // While connecting() or where that failed, in on_closed: goes on over another TCP socket, to which
  // all that waits is sent.
  Status redial(UniqueFd fd, bool connecting);
  UniqueFd release() noexcept;  // the socket, for another owner, who takes the channel as well
  std::unique_ptr<tls::Channel> release_channel() noexcept { return std::move(channel_); }
  // Whom the peer's unread frames, and what has come of its own, are charged to from now on.
  void charge(std::shared_ptr<Budget> budget);

  int fd() const noexcept { return fd_.get(); }
  bool open() const noexcept { return static_cast<bool>(fd_); }
  bool connecting() const noexcept { return connecting_; }  // still true in on_closed where it failed
  const tls::Channel* channel() const noexcept { return channel_.get(); }  // null: it is plain
  bool is_securing() const noexcept { return channel_ != nullptr && !channel_->is_secure(); }
  bool hung_up() const noexcept;  // whether the peer has, however much of what it sent is unread

  // The peer is known: offers it a ring to write to, and uses the one that it offers. False where the
  // socket is not of one host. A peer that knows of no rings goes on as before.
  bool share_memory();
  void read_more();
  bool read_ring();  // delivers what the ring holds; true when that was anything
  // Until wake_up() the peer says over the socket when it has written to the ring. False where
  // something is in it already: look again.
  bool fall_asleep() noexcept;
  void wake_up() noexcept;

  void on_ready(std::uint32_t events) override;

 private:
  // What a peer may leave unread before it is given up: four of the largest frames.
  static constexpr std::size_t kMaxUnsent = 4 * (wire::kMaxBody + 64);

  void read();
  void read_all();
  void borrow_buffer();
  void return_buffer();  // unless something in it waits
  void transmit_all();
  bool make_room(std::size_t nbytes);  // for what comes; false: it failed
  void take_turn();  // delivers what is whole, up to a bound
  void wait_for_turn();
  void secure();  // one step
  std::string reason(int error) const;
  ssize_t receive(std::byte* into, std::size_t nbytes);
  ssize_t transmit();
  void use_ring(UniqueFd fd);
  bool deliver();  // the next frame, if it is there and whole
  void fail(const std::string& why);
  template <class Work>
  bool attempt(Work&& work);  // where there is no memory for it, it fails
  void want(bool write);

  Reactor& reactor_;
  UniqueFd fd_;
  Owner& owner_;
  bool connecting_, exact_, writing_ = false;
  const bool local_;
  std::unique_ptr<tls::Channel> channel_;
  std::vector<std::byte> in_;  // the owner's while it is read
  std::size_t in_begin_ = 0, in_end_ = 0;
  std::vector<std::byte> out_;
  std::size_t out_begin_ = 0;
  std::shared_ptr<Budget> budget_;
  Charge unread_;  // what was left when the socket took no more
  Charge room_;  // in_, where it is not the owner's

  std::uint64_t num_delivered_ = 0;  // which is the number of the frame that comes next
  std::unique_ptr<RingReader> inbox_;
  std::unique_ptr<RingWriter> outbox_;
  UniqueFd offered_;  // the inbox's, until it has gone out
  UniqueFd arrived_;  // the peer's offer, until it is known who sent it
  wire::Bytes from_ring_;
  bool has_more_ = false;  // was read, and waits for the next turn
  bool pushed_ = false;  // since the last flush
};

}  // namespace kvxfer
