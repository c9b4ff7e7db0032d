// The memory of a command ring, which its host and its kernels share.
#pragma once

#include <cstdint>

#include "gpu/driver.h"
#include "kvxfer/command.h"
#include "kvxfer/status.h"

namespace kvxfer {

// Kept until the process ends: a kernel may post to a ring that its host let go long ago.
struct CommandMemory {
  Command* commands = nullptr;
  CommandCounts* counts = nullptr;
  std::uint32_t num_commands = 0;
  std::uint64_t ring = 0;  // the address of the CommandRing, for kernels
  bool on_device = false;

  static constexpr std::uint32_t kMost = 1u << 20;

  // Makes all of it in this process's own memory: threads of the process post as kernels do.
  // `num_commands` is a power of two, kMost at most.
  static Result<CommandMemory> create(std::uint32_t num_commands);
  // Makes commands and counts in pinned memory, and the CommandRing on the device. So a kernel that posts
  // crosses the bus only to store its command, unless the ring looks full.
  static Result<CommandMemory> create_pinned(const gpu::Driver& driver, int device,
                                             std::uint32_t num_commands);
};

}  // namespace kvxfer
