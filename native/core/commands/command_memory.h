// The memory of a command ring: what its host and its kernels share.
#pragma once

#include <cstdint>

#include "gpu/driver.h"
#include "kvxfer/command.h"
#include "kvxfer/status.h"

namespace kvxfer {

// A kernel may post to a ring that its host has let go long ago, so this is kept until the process ends.
struct CommandMemory {
  Command* commands = nullptr;
  CommandCounts* counts = nullptr;
  std::uint32_t num_commands = 0;
  std::uint64_t ring = 0;  // the address of the CommandRing, for kernels
  bool on_device = false;

  static constexpr std::uint32_t kMost = 1u << 20;

  // All of it in this process's own memory: its threads post as kernels do. `num_commands` is a power of two,
  // kMost at most.
  static Result<CommandMemory> create(std::uint32_t num_commands);
  // Commands and counts in pinned memory, the CommandRing on the device, so that a kernel that posts crosses the
  // bus to store its command and for nothing else, unless the ring looks full.
  static Result<CommandMemory> create_pinned(const gpu::Driver& driver, int device,
                                             std::uint32_t num_commands);
};

}  // namespace kvxfer
