// Command rings: transfers that kernels start.
#include <utility>

#include "core/runtime.h"

namespace kvxfer {

Result<std::shared_ptr<CommandReader>> Runtime::open_command_ring(std::uint32_t num_commands) {
  if (Status status = check_alive(); !status.ok()) return status;
  Result<CommandMemory> memory =
      !options_.gpus.empty() ? CommandMemory::create_pinned(*options_.gpus.front().driver,
                                                            options_.gpus.front().device, num_commands)
                             : CommandMemory::create(num_commands);
  if (!memory.ok()) return memory.status();
  auto reader = std::make_shared<CommandReader>(
      next_command_ring_.fetch_add(1), memory.value(),
      [this](std::uint64_t id) { emit({.kind = EventKind::kCommands, .handle = id}); });
  with_engine([&](Engine&, Time) { commands_.add(reader); });
  if (closed()) commands_.close_all();  // closing was under way, and did not see this ring
  wake();  // a sleeping thread does not look at rings yet
  return reader;
}

void Runtime::close_command_ring(CommandReader& reader) {
  if (!check_alive().ok()) return;
  // When this returns, no more commands are taken out.
  with_engine([&](Engine&, Time) { commands_.close(reader); });
}

}  // namespace kvxfer
