// The transfers of an agent that wait for a trigger, and how far each has come.
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
  // `bell` wakes the thread that drives the agent: the word may have grown.
  explicit TriggerWatch(Trigger::Bell bell) : bell_(std::move(bell)) {}
  ~TriggerWatch() { clear(); }

  // Keeps the trigger until the transfer has ended. `ready` of its layers were released when it was
  // posted.
  void add(const std::shared_ptr<Handle>& handle, After after, std::uint32_t num_layers, std::uint32_t ready);
  // Tells the engine which layers were released since; true if there were any. Under the progress gate.
  bool look(Engine& engine, Time now);
  // True if look() would find something. From any thread, like all calls below.
  bool has_news() const;
  // True if others than fire() may store to one of the words: such stores are not announced.
  bool unannounced() const noexcept { return unannounced_.load(std::memory_order_relaxed); }
  bool empty() const noexcept { return empty_.load(std::memory_order_relaxed); }
  // Drops what ended transfers had kept. That is memory of callers, who may take locks of their own when
  // it is dropped. Without the gate.
  void free_ended();
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
  std::list<Waiting> over_;  // ended ones, for free_ended() to drop
  std::atomic<bool> empty_{true}, unannounced_{false};
};

}  // namespace kvxfer
