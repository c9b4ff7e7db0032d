// What the ends of one rail say to each other over its socket, beside the pages: messages of one kind of
// transport, of which the first is a hello.
#pragma once

#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "kvxfer/transport.h"
#include "transports/common/message_channel.h"

namespace kvxfer {

// Message: what goes over the wire as it lies in memory. It says itself what of it a peer may say:
// `bool is_of_this_version() const`, `bool is_hello() const`, and of the rest `Status check(bool has_fd) const`.
template <class Message>
class SideChannel {
  static_assert(std::is_trivially_copyable_v<Message>);

 public:
  struct Received {
    Message message;
    UniqueFd fd;
  };

  explicit SideChannel(UniqueFd socket) : channel_(std::move(socket), sizeof(Message)) {}
  int fd() const noexcept { return channel_.fd(); }
  GuardedFd release() noexcept { return channel_.release(); }
  void close() noexcept { channel_.close(); }
  std::size_t num_queued() const noexcept { return channel_.num_queued(); }
  bool is_read() const noexcept { return channel_.is_read(); }

  void queue(const Message& message, SharedFd attached = nullptr) {
    channel_.queue(std::as_bytes(std::span(&message, 1)), std::move(attached));
  }
  // As MessageChannel's.
  Status flush() { return channel_.flush(); }
  Status flush(Reactor& reactor) { return channel_.flush(reactor); }

  // The next whole message, or nothing yet. Not ok: closed, or not what a peer may say here and now.
  Result<std::optional<Received>> receive() {
    Result<MessageChannel::Received> next = channel_.receive();
    if (!next.ok()) return next.status();
    if (next.value().message.empty()) return std::optional<Received>();
    Received whole;
    std::memcpy(&whole.message, next.value().message.data(), sizeof whole.message);
    whole.fd = std::move(next.value().fd);
    if (!whole.message.is_of_this_version())
      return Status(Code::kRailFailed, "it sent a message that is not of this transport's version");
    if (whole.message.is_hello() == greeted_)
      return Status(Code::kRailFailed, greeted_ ? "it said hello twice" : "it did not begin with a hello");
    if (Status sound = whole.message.check(static_cast<bool>(whole.fd)); !sound.ok()) return sound;
    greeted_ = true;
    return std::optional<Received>(std::move(whole));
  }

 private:
  MessageChannel channel_;
  bool greeted_ = false;
};

}  // namespace kvxfer
