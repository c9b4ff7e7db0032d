// Which transfers of an agent wait for a trigger, and how far each has come.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>

#include "core/commands/trigger.h"
#include "core/engine.h"
#include "core/system/nvtx.h"

namespace kvxfer {

class TriggerWatch {
 public:
  // `bell` wakes whoever drives the agent: a word may say more than it did.
  explicit TriggerWatch(Trigger::Bell bell) : bell_(std::move(bell)) {}
  ~TriggerWatch() { clear(); }

  // Keeps the trigger until the transfer has ended. `ready` of its layers were posted as released.
  void add(const std::shared_ptr<Handle>& handle, After after, std::uint32_t num_layers, std::uint32_t ready);
  // Tells the engine what was released since; true where anything was. Under the progress gate.
  bool look(Engine& engine, Time now);
  // Whether look() would find something. From any thread, as what follows.
  bool has_news() const;
  // Whether a word is among them that others than fire() store to: nobody says when they do.
  bool unannounced() const noexcept { return unannounced_.load(std::memory_order_relaxed); }
  bool empty() const noexcept { return empty_.load(std::memory_order_relaxed); }
  // Lets go of what transfers that ended had kept: memory of callers, for which they may want locks of their
  // own. Without the gate.
  void let_go();
  void clear();

 private:
  struct Waiting {
    std::shared_ptr<Handle> handle;
    After after;
    std::uint32_t num_layers, ready;
    nvtx::Range range;  // until all of its layers may go
  };
  void retire(std::list<Waiting>::iterator waiting);
  void count();

  const Trigger::Bell bell_;
  mutable std::mutex mutex_;
  std::list<Waiting> waiting_;
  std::list<Waiting> over_;  // that let_go() is to end
  std::atomic<bool> empty_{true}, unannounced_{false};
};

}  // namespace kvxfer
