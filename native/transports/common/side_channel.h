// What the ends of one rail say to each other over its socket, beside the pages: messages of one kind of
// transport, of which the first is a hello. Whoever ends the rail says why, in words, before it closes its end.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "kvxfer/transport.h"
#include "transports/common/message_channel.h"

namespace kvxfer {

// A peer's words as far as they are printable, in ASCII; the rest is shown as "?".
inline std::string printable(std::string_view words) {
  std::string shown(words);
  for (char& each : shown)
    if (each < ' ' || each > '~') each = '?';
  return shown;
}

// Message: what goes over the wire as it lies in memory. It says itself what of it a peer may say:
// `bool is_of_this_version() const`, `bool is_hello() const`, and of the rest `Status check(bool has_fd) const`.
template <class Message>
class SideChannel {
  static_assert(std::is_trivially_copyable_v<Message>);

  // As large as a message, so that it goes where those do; words that are longer take several.
  struct Words {
    std::array<char, 4> magic{'k', 'v', 'w', '1'};
    std::array<char, sizeof(Message) - 4> text{};  // ends with zeros
  };
  static_assert(sizeof(Words) == sizeof(Message));

 public:
  // Of a peer's words.
  static constexpr std::size_t kMostWords = 512;

  struct Received {
    Message message;
    UniqueFd fd;
  };

  explicit SideChannel(UniqueFd socket, std::shared_ptr<Cipher> cipher = nullptr)
      : channel_(std::move(socket), sizeof(Message), std::move(cipher)) {}
  int fd() const noexcept { return channel_.fd(); }
  GuardedFd release() noexcept { return channel_.release(); }
  void close() noexcept { channel_.close(); }
  std::size_t num_queued() const noexcept { return channel_.num_queued(); }
  bool is_read() const noexcept { return channel_.is_read(); }

  void queue(const Message& message, SharedFd attached = nullptr) {
    channel_.queue(std::as_bytes(std::span(&message, 1)), std::move(attached));
  }
  // Why this end is about to close, as far as the socket takes it at once.
  void say_why(std::string_view why) {
    for (why = why.substr(0, kMostWords); !why.empty();) {
      Words words;
      why.remove_prefix(why.copy(words.text.data(), words.text.size()));
      channel_.queue(std::as_bytes(std::span(&words, 1)));
    }
    static_cast<void>(channel_.flush());
  }
  // As MessageChannel's. Not ok: with what the peer said of it, likewise.
  Status flush() { return explained(channel_.flush()); }
  Status flush(Reactor& reactor) { return explained(channel_.flush(reactor)); }

  // The next whole message, or nothing yet. Not ok: closed, with what the peer said of it, or not what a peer may say
  // here and now.
  Result<std::optional<Received>> receive() {
    Result<MessageChannel::Received> next = channel_.receive();
    if (!next.ok()) return explained(next.status());
    if (next.value().message.empty() || hear_why(next.value().message)) return std::optional<Received>();
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
  // Messages that are read for words alone, once there is nothing more to say.
  static constexpr int kMostUnread = 64;

  // False: it is no such message.
  bool hear_why(std::span<const std::byte> message) {
    Words words;
    std::memcpy(&words, message.data(), sizeof words);
    if (words.magic != Words().magic) return false;
    const auto end = std::find(words.text.begin(), words.text.end(), '\0');
    const auto nbytes = static_cast<std::size_t>(end - words.text.begin());
    why_.append(words.text.data(), std::min(nbytes, kMostWords - why_.size()));
    return true;
  }
  // Of a channel that is dead. What could not be sent is seen before what the peer sent, at times.
  Status explained(Status status) {
    for (int i = 0; !status.ok() && i < kMostUnread; ++i) {
      const auto next = channel_.receive();
      if (!next.ok() || next.value().message.empty()) break;
      hear_why(next.value().message);
    }
    if (status.ok() || why_.empty()) return status;
    return {Code::kRailFailed, "it closed its end: " + printable(why_)};
  }

  MessageChannel channel_;
  bool greeted_ = false;
  std::string why_;  // the peer's, of its end
};

}  // namespace kvxfer
