// A stream socket that carries frames: bytes in, whole frames out, and back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/wire.h"
#include "kvxfer/transport.h"

namespace kvxfer {

class FrameSocket final : public Reactor::Handler {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual std::uint32_t max_body() = 0;              // of the frame that comes next
    virtual void on_frame(wire::ByteSpan frame) = 0;   // header, body, mac
    virtual void on_closed(const std::string& why) = 0;  // at most once; not after close()
  };

  // `connecting`: the socket's connect() is under way. `exact`: never reads past the frame that
  // comes next, for a socket that will be handed on.
  FrameSocket(Reactor& reactor, UniqueFd fd, Owner& owner, bool connecting, bool exact);
  ~FrameSocket() override;

  Status start();  // adds it to the reactor
  void send(wire::Bytes frame);
  void flush();
  void close() noexcept;  // after one last flush
  UniqueFd release() noexcept;  // the socket, for another owner

  bool open() const noexcept { return static_cast<bool>(fd_); }
  void on_ready(std::uint32_t events) override;

 private:
  // What a peer may leave unread before it is given up: four of the largest frames.
  static constexpr std::size_t kMaxUnsent = 4 * (wire::kMaxBody + 64);

  void read();
  bool deliver();  // one buffered frame, if it is whole
  void fail(const std::string& why);
  void want(bool write);

  Reactor& reactor_;
  UniqueFd fd_;
  Owner& owner_;
  bool connecting_, exact_, writing_ = false;
  std::vector<std::byte> in_;
  std::size_t in_begin_ = 0, in_end_ = 0;
  std::vector<std::byte> out_;
  std::size_t out_begin_ = 0;
};

}  // namespace kvxfer
