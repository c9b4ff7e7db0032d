#include "core/commands/command_watch.h"

#include <algorithm>
#include <utility>

namespace kvxfer {

void CommandWatch::add(std::shared_ptr<CommandReader> reader) {
  const std::lock_guard lock(mutex_);
  readers_.push_back(std::move(reader));
  count();
}

void CommandWatch::close(CommandReader& reader) {
  reader.close();
  const std::lock_guard lock(mutex_);
  count();
}

void CommandWatch::close_all() {
  const std::lock_guard lock(mutex_);
  for (const auto& reader : readers_) reader->close();
  count();
}

bool CommandWatch::has_news() const {
  if (!any_open()) return false;
  const std::lock_guard lock(mutex_);
  return std::any_of(readers_.begin(), readers_.end(), [](const auto& reader) { return reader->has_news(); });
}

bool CommandWatch::look(Engine& engine, Time now) {
  bool found = false;
  // Not under the mutex: a posted transfer may end at once, and then call this object.
  for (const auto& reader : readers()) found = reader->look(engine, now) || found;
  const std::lock_guard lock(mutex_);
  std::erase_if(readers_, [](const auto& reader) { return reader->closed() && reader->idle(); });
  count();
  return found;
}

void CommandWatch::on_ended(std::uint64_t handle) {
  if (empty()) return;
  for (const auto& reader : readers())
    if (reader->on_ended(handle)) return;
}

std::vector<std::shared_ptr<CommandReader>> CommandWatch::readers() const {
  const std::lock_guard lock(mutex_);
  return readers_;
}

void CommandWatch::count() {
  any_open_.store(
      std::any_of(readers_.begin(), readers_.end(), [](const auto& reader) { return !reader->closed(); }),
      std::memory_order_relaxed);
  empty_.store(readers_.empty(), std::memory_order_relaxed);
}

}  // namespace kvxfer
