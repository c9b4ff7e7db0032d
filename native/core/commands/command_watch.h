// The command rings of an agent, and the check of whether the agent must look at them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/commands/command_reader.h"

namespace kvxfer {

class CommandWatch {
 public:
  // From any thread, like the calls up to empty().
  void add(std::shared_ptr<CommandReader> reader);
  void close(CommandReader& reader);
  void close_all();
  // True while a ring is open: then the agent must look, since a kernel that posts announces nothing.
  bool any_open() const noexcept { return any_open_.load(std::memory_order_relaxed); }
  bool has_news() const;
  bool empty() const noexcept { return empty_.load(std::memory_order_relaxed); }

  // Under the progress gate.
  bool look(Engine& engine, Time now);
  void on_ended(std::uint64_t handle);

 private:
  // Rings are kept as long as transfers of theirs are open, even when they are closed.
  std::vector<std::shared_ptr<CommandReader>> readers() const;
  void count();  // under the mutex

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<CommandReader>> readers_;
  std::atomic<bool> any_open_{false}, empty_{true};
};

}  // namespace kvxfer
