#include "core/commands/command_memory.h"

#include <bit>
#include <cstddef>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvxfer {
namespace {

constexpr std::size_t kPageNbytes = 4096;

// The memory of the rings, kept for as long as the process lives.
struct Kept {
  std::mutex mutex;
  std::vector<void*> memory;
  std::vector<gpu::PrimaryContext> contexts;
};
Kept& kept() {
  static auto* all = new Kept;
  return *all;
}

Status check_size(std::uint32_t num_commands) {
  if (num_commands != 0 && num_commands <= CommandMemory::kMost && std::has_single_bit(num_commands))
    return {};
  return {Code::kInvalidArgument, "a command ring's number of commands must be a power of two from 1 to " +
                                      std::to_string(CommandMemory::kMost) + ", not " +
                                      std::to_string(num_commands)};
}

std::size_t nbytes_of(std::uint32_t num_commands) {
  return sizeof(CommandCounts) + num_commands * sizeof(Command);
}

// The counts come first, at the beginning of a cache line; the commands follow on another line.
CommandMemory lay_out(void* memory, std::uint32_t num_commands) {
  CommandMemory made;
  made.counts = new (memory) CommandCounts();
  made.commands = new (static_cast<std::byte*>(memory) + sizeof(CommandCounts)) Command[num_commands]();
  made.num_commands = num_commands;
  return made;
}

CommandRing ring_of(const CommandMemory& memory) {
  return {memory.commands, memory.counts, memory.num_commands, 0, 0};
}

// Makes the device's part and copies its contents from `pinned`.
Status put_on_device(const gpu::Driver& driver, const void* pinned, gpu::Address& address) {
  if (const int error = driver.memory_allocate(&address, sizeof(CommandRing)); error != 0)
    return driver.status(error, "cuMemAlloc of a command ring");
  int least = 0, greatest = 0;
  gpu::Stream stream = nullptr;
  int error = driver.priority_range(&least, &greatest);
  if (error == 0) error = driver.stream_create(&stream, gpu::kNonBlocking, greatest);
  if (error == 0) {
    error = driver.host_to_device(address, pinned, sizeof(CommandRing), stream);
    if (const int ended = driver.stream_synchronize(stream); error == 0) error = ended;
    driver.stream_destroy(stream);
  }
  if (error == 0) return {};
  driver.memory_free(address);
  return driver.status(error, "copying a command ring to the GPU");
}

}  // namespace

Result<CommandMemory> CommandMemory::create(std::uint32_t num_commands) {
  if (Status status = check_size(num_commands); !status.ok()) return status;
  const std::size_t ring_at = nbytes_of(num_commands);
  void* memory = operator new(ring_at + sizeof(CommandRing), std::align_val_t{kPageNbytes});
  CommandMemory made = lay_out(memory, num_commands);
  made.ring = reinterpret_cast<std::uint64_t>(new (static_cast<std::byte*>(memory) + ring_at)
                                                  CommandRing(ring_of(made)));
  const std::lock_guard lock(kept().mutex);
  kept().memory.push_back(memory);
  return made;
}

Result<CommandMemory> CommandMemory::create_pinned(const gpu::Driver& driver, int device,
                                                   std::uint32_t num_commands) {
  if (Status status = check_size(num_commands); !status.ok()) return status;
  Result<gpu::PrimaryContext> context = gpu::PrimaryContext::retain(driver, device);
  if (!context.ok()) return context.status();
  const gpu::ContextScope scope(driver, context.value().get());
  void* memory = nullptr;
  const std::size_t ring_at = nbytes_of(num_commands);
  if (const int error =
          driver.host_allocate(&memory, ring_at + sizeof(CommandRing), gpu::kPortable | gpu::kDeviceMap);
      error != 0)
    return driver.status(error, "cuMemHostAlloc of a command ring for " + std::to_string(num_commands));
  CommandMemory made = lay_out(memory, num_commands);
  // Copied from pinned memory, as every copy of a stream's is.
  const auto* image = new (static_cast<std::byte*>(memory) + ring_at) CommandRing(ring_of(made));
  gpu::Address address = 0;
  if (Status status = put_on_device(driver, image, address); !status.ok()) {
    driver.host_free(memory);  // no kernel knows its address yet
    return status;
  }
  made.ring = address;
  made.on_device = true;
  const std::lock_guard lock(kept().mutex);
  kept().memory.push_back(memory);
  kept().contexts.push_back(std::move(context).value());
  return made;
}

}  // namespace kvxfer
