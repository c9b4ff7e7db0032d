// Messages that the two ends of a rail exchange over its socket, beside the pages. Each kind of transport has
// its own; the first one is a hello. An end that gives the rail up sends the reason in words before it closes
// its socket.
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

// A peer's words with everything but printable ASCII shown as "?".
inline std::string printable(std::string_view words) {
  std::string shown(words);
  for (char& each : shown)
    if (each < ' ' || each > '~') each = '?';
  return shown;
}

// Message: goes over the wire as it lies in memory. It decides what a peer may say: `bool
// is_of_this_version() const`, `bool is_hello() const`, and `Status check(bool has_fd) const` for all else.
template <class Message>
class SideChannel {
  static_assert(std::is_trivially_copyable_v<Message>);

  // As large as a message, so that it can be sent like one. Longer words take several.
  struct Words {
    std::array<char, 4> magic{'k', 'v', 'w', '1'};
    std::array<char, sizeof(Message) - 4> text{};  // ends with zeros
  };
  static_assert(sizeof(Words) == sizeof(Message));

 public:
  // The most that is kept of a peer's words, in bytes.
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
  std::size_t num_unread() const noexcept { return channel_.num_unread(); }

  void queue(const Message& message, SharedFd attached = nullptr) {
    channel_.queue(std::as_bytes(std::span(&message, 1)), std::move(attached));
  }
  // Says why this end is about to close. What the socket does not take at once is not sent.
  void say_why(std::string_view why) {
    for (why = why.substr(0, kMostWords); !why.empty();) {
      Words words;
      why.remove_prefix(why.copy(words.text.data(), words.text.size()));
      channel_.queue(std::as_bytes(std::span(&words, 1)));
    }
    static_cast<void>(channel_.flush());
  }
  // As MessageChannel's. An error also has the reason that the peer gave.
  Status flush() { return explained(channel_.flush()); }
  Status flush(Reactor& reactor) { return explained(channel_.flush(reactor)); }

  // The next whole message, or nothing yet. Not ok: the socket is closed, with the reason that the peer gave;
  // or the message is one that the peer may not send now.
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
  // How many messages are read from a dead channel, only to find the peer's reason.
  static constexpr int kMostUnread = 64;

  // False: the message holds no words.
  bool hear_why(std::span<const std::byte> message) {
    Words words;
    std::memcpy(&words, message.data(), sizeof words);
    if (words.magic != Words().magic) return false;
    const auto end = std::find(words.text.begin(), words.text.end(), '\0');
    const auto nbytes = static_cast<std::size_t>(end - words.text.begin());
    why_.append(words.text.data(), std::min(nbytes, kMostWords - why_.size()));
    return true;
  }
  // Adds the peer's reason to the error of a dead channel. A failed send can show before the peer's last
  // messages are read.
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
  std::string why_;  // why the peer closed its end
};

}  // namespace kvxfer
