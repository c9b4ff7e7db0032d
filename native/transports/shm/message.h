// What the ends of an shm rail say to each other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kvxfer/status.h"
#include "transports/common/side_channel.h"

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

  bool is_of_this_version() const noexcept {
    return magic == Message().magic && reserved == Message().reserved;
  }
  bool is_hello() const noexcept { return kind == MessageKind::kHello; }
  Status check(bool has_fd) const;
};
static_assert(sizeof(Message) == 64);

using SideChannel = kvxfer::SideChannel<Message>;

}  // namespace kvxfer::shm
