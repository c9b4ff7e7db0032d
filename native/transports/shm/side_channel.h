// The rail's unix socket: whole fixed-size messages, each with at most one descriptor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "kvxfer/transport.h"

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

using SharedFd = std::shared_ptr<const UniqueFd>;

class SideChannel {
 public:
  explicit SideChannel(UniqueFd socket) : socket_(std::move(socket)) {}
  int fd() const noexcept { return socket_.get(); }

  void queue(const Message& message, SharedFd attached = nullptr) {
    outbox_.push_back({message, std::move(attached)});
  }
  // Writes what the socket takes. Not ok: the channel is dead.
  Status flush();
  bool wants_write() const noexcept { return !outbox_.empty(); }

  // The next whole message, or nothing yet. Not ok: closed, or not what a peer may say.
  Result<std::optional<Received>> receive();

 private:
  struct Outgoing {
    Message message;
    SharedFd attached;  // held until it is on its way
  };
  UniqueFd socket_;
  std::deque<Outgoing> outbox_;
  std::size_t sent_nbytes_ = 0;  // of outbox_.front()
  Message incoming_;
  std::size_t incoming_nbytes_ = 0;
  UniqueFd incoming_fd_;
};

}  // namespace kvxfer::shm
