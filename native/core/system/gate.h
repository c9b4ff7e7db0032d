// The progress gate: whoever holds it drives sockets, transports and the engine.
//
// A mutex that lets others in: the progress thread would otherwise take it again before a caller
// who waits for it has woken up.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>
#include <mutex>

namespace kvxfer {

class Gate {
 public:
  // `metered`: measures how long it is held, in processor time of the holder. Off it costs a branch; on, two system
  // calls.
  explicit Gate(bool metered) noexcept : metered_(metered) {}

  void lock() {
    if (!mutex_.try_lock()) {
      waiting_.fetch_add(1, std::memory_order_relaxed);
      mutex_.lock();
      waiting_.fetch_sub(1, std::memory_order_relaxed);
    }
    if (metered_) held_since_ns_ = thread_time_ns();
  }
  bool try_lock() {
    if (!mutex_.try_lock()) return false;
    if (metered_) held_since_ns_ = thread_time_ns();
    return true;
  }
  void unlock() {
    if (metered_) {
      const std::int64_t held_ns = thread_time_ns() - held_since_ns_;
      longest_ns_.store(std::max(longest_ns_.load(std::memory_order_relaxed), held_ns),
                        std::memory_order_relaxed);
    }
    mutex_.unlock();
  }
  // Called without the gate by who would take it again at once: lets those who wait go first.
  void yield() const {
    while (waiting_.load(std::memory_order_relaxed) != 0) ::sched_yield();
  }

  std::int64_t longest_hold_ns() const noexcept { return longest_ns_.load(std::memory_order_relaxed); }
  void forget_longest_hold() noexcept {
    const std::lock_guard lock(mutex_);
    longest_ns_.store(0, std::memory_order_relaxed);
  }

 private:
  static std::int64_t thread_time_ns() noexcept {
    timespec time;
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  }

  const bool metered_;
  std::atomic<int> waiting_{0};
  std::mutex mutex_;
  std::int64_t held_since_ns_ = 0;  // by whoever holds it
  std::atomic<std::int64_t> longest_ns_{0};
};

}  // namespace kvxfer
