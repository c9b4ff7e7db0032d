// Messages between the two ends of a cuda_ipc rail, and what a region's keys contain.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "gpu/shared_memory.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"
#include "transports/common/side_channel.h"

namespace kvxfer::cuda_ipc {

// The number of an allocation, given by its owner. Numbers ascend, and each is used once.
using MemoryId = std::uint64_t;

enum class MessageKind : std::uint32_t {
  kHello = 1,           // first, once; with the fence table's memfd
  kMemory = 2,          // memory in which some region lies; with a descriptor if the handle is one
  kMemoryGone = 3,      // no region lies there any longer
  kMemoryUnmapped = 4,  // the answer to that: it is no longer mapped or read here
};

struct Message {
  std::array<char, 4> magic{'k', 'v', 'g', '2'};
  MessageKind kind = MessageKind::kHello;
  MemoryId memory_id = 0;
  std::uint64_t base = 0;    // in the sender's addresses
  std::uint64_t nbytes = 0;  // of the memory, or of the fence table
  gpu::HandleKind handle_kind = gpu::HandleKind::kIpc;
  std::uint32_t reserved = 0;
  std::array<std::byte, gpu::kHandleNbytes> handle{};

  static Message about(MessageKind kind, MemoryId memory) noexcept {
    Message message;
    message.kind = kind;
    message.memory_id = memory;
    return message;
  }

  bool is_of_this_version() const noexcept { return magic == Message().magic && reserved == 0; }
  bool is_hello() const noexcept { return kind == MessageKind::kHello; }
  Status check(bool has_fd) const;
};
static_assert(sizeof(Message) == 104);

using SideChannel = kvxfer::SideChannel<Message>;

// A region's keys: it lies in allocations that its owner has told of, and this is the last one.
struct Keys {
  std::array<char, 4> version{'c', 'i', 'p', '1'};
  std::uint32_t reserved = 0;
  MemoryId last_memory = 0;
};
static_assert(sizeof(Keys) == 16 && sizeof(Keys) <= kMaxKeyBytes);

inline constexpr std::size_t kMaxMemories = 8192;  // an agent's: layers, and segments of an allocator

}  // namespace kvxfer::cuda_ipc
