// The progress gate: whoever holds it drives sockets, transports and the engine.
//
// A mutex that lets others in: the progress thread would otherwise take it again before a caller
// who waits for it has woken up.
#pragma once

#include <sched.h>

#include <atomic>
#include <mutex>

namespace kvxfer {

class Gate {
 public:
  void lock() {
    if (mutex_.try_lock()) return;
    waiting_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    waiting_.fetch_sub(1, std::memory_order_relaxed);
  }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }
  // Called without the gate by who would take it again at once: lets those who wait go first.
  void yield() const {
    while (waiting_.load(std::memory_order_relaxed) != 0) ::sched_yield();
  }

 private:
  std::atomic<int> waiting_{0};
  std::mutex mutex_;
};

}  // namespace kvxfer
