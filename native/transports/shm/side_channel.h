// What a rail's unix socket carries for shm.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "kvxfer/transport.h"
#include "transports/common/message_channel.h"

namespace kvxfer::shm {

enum class MessageKind : std::uint32_t {
  kHello = 1,      // first, once; with the fence table's memfd
  kMemfd = 2,      // memory in which some region lies; with its memfd
  kMemfdGone = 3,  // no region lies there any longer
};

struct Message {
  std::array<char, 4> magic{'k', 'v', 's', '1'};
  MessageKind kind = MessageKind::kHello;
  std::uint64_t memfd_id = 0;
  std::uint64_t nbytes = 0;             // of the descriptor's memory
  std::uint64_t probe_address = 0;      // hello: where the sender keeps the bytes below, so that the
  std::array<std::byte, 16> probe{};    //        receiver finds out whether it may read its memory
  std::array<std::byte, 16> reserved{};
};
static_assert(sizeof(Message) == 64);

struct Received {
  Message message;
  UniqueFd fd;  // of kHello and kMemfd
};

class SideChannel {
 public:
  explicit SideChannel(UniqueFd socket) : channel_(std::move(socket), sizeof(Message)) {}
  int fd() const noexcept { return channel_.fd(); }

  void queue(const Message& message, SharedFd attached = nullptr) {
    channel_.queue(std::as_bytes(std::span(&message, 1)), std::move(attached));
  }
  // Writes what the socket takes. Not ok: the channel is dead.
  Status flush() { return channel_.flush(); }
  bool wants_write() const noexcept { return channel_.wants_write(); }

  // The next whole message, or nothing yet. Not ok: closed, or not what a peer may say.
  Result<std::optional<Received>> receive();

 private:
  MessageChannel channel_;
};

}  // namespace kvxfer::shm
