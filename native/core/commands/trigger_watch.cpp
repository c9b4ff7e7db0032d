#include "core/commands/trigger_watch.h"

#include <utility>
#include <vector>

namespace kvxfer {

void TriggerWatch::add(const std::shared_ptr<Handle>& handle, After after, std::uint32_t num_layers,
                       std::uint32_t ready) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back(
      {handle, std::move(after), num_layers, ready, nvtx::Range("wait for trigger", handle->id())});
  Waiting& added = waiting_.back();
  // First the bell: if the word becomes shared afterwards, the bell rings; if before, count() sees it.
  added.after.trigger->add_bell(&added, bell_);
  count();
}

bool TriggerWatch::look(Engine& engine, Time now) {
  std::vector<std::pair<std::uint64_t, std::uint32_t>> released;
  {
    const std::lock_guard lock(mutex_);
    for (auto next = waiting_.begin(); next != waiting_.end();) {
      const auto waiting = next++;
      if (waiting->handle->outcome() != Outcome::kPending) {
        retire(waiting);
        continue;
      }
      const std::uint32_t ready = waiting->after.layers_ready(waiting->num_layers);
      if (ready <= waiting->ready) continue;
      waiting->ready = ready;
      if (ready == waiting->num_layers) waiting->range.end();
      released.emplace_back(waiting->handle->id(), ready);
    }
    count();
  }
  for (const auto& [handle, layers] : released) engine.layers_ready(now, handle, layers);
  return !released.empty();
}

bool TriggerWatch::has_news() const {
  if (empty()) return false;
  const std::lock_guard lock(mutex_);
  for (const Waiting& waiting : waiting_)
    if (waiting.after.layers_ready(waiting.num_layers) > waiting.ready) return true;
  return false;
}

void TriggerWatch::retire(std::list<Waiting>::iterator waiting) {
  waiting->after.trigger->forget_bell(&*waiting);
  waiting->range.end();
  over_.splice(over_.end(), waiting_, waiting);
}

// A word whose transfer has all of its layers is kept, but no longer looked at.
void TriggerWatch::count() {
  bool unannounced = false;
  for (const Waiting& waiting : waiting_)
    unannounced = unannounced || (waiting.ready < waiting.num_layers && waiting.after.trigger->shared());
  unannounced_.store(unannounced, std::memory_order_relaxed);
  empty_.store(waiting_.empty(), std::memory_order_relaxed);
}

void TriggerWatch::free_ended() {
  std::list<Waiting> over;
  const std::lock_guard lock(mutex_);
  over.swap(over_);
}

void TriggerWatch::clear() {
  std::list<Waiting> over;
  const std::lock_guard lock(mutex_);
  while (!waiting_.empty()) retire(waiting_.begin());
  count();
  over.swap(over_);
}

}  // namespace kvxfer
