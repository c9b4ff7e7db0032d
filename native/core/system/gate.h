// The progress gate: whoever holds it drives sockets, transports and the engine.
//
// A mutex that lets others in: the progress thread would otherwise take it again before a caller
// who waits for it has woken up. It counts how long it is held.
#pragma once

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>

#include "core/system/ticks.h"

namespace kvxfer {

class Gate {
 public:
  // Holds by their processor time: up to an eighth of a millisecond, up to twice as much, and so on; the last are
  // longer than all.
  static constexpr std::size_t kNumBuckets = 9;
  static constexpr std::int64_t kFirstBucketNs = 125'000;
  using Histogram = std::array<std::uint64_t, kNumBuckets>;

  // What is counted is the holder's processor time. `exact`: at two system calls for each holding. Else the
  // processor's clock is read at both ends, and only of a holding that took long by that the processor time is asked
  // for: what the thread has used since it was last asked is all that the holding can have used. So it is never too
  // little, and too much where a thread that had not held the gate for long before is kept from its processor.
  explicit Gate(bool exact) noexcept : exact_(exact) {}

  void lock() {
    if (!mutex_.try_lock()) {
      waiting_.fetch_add(1, std::memory_order_relaxed);
      mutex_.lock();
      waiting_.fetch_sub(1, std::memory_order_relaxed);
    }
    begin();
  }
  bool try_lock() {
    if (!mutex_.try_lock()) return false;
    begin();
    return true;
  }
  void unlock() {
    if (exact_)
      count(clock_ns(CLOCK_THREAD_CPUTIME_ID) - held_since_);
    else if (const std::int64_t held = ticks() - held_since_; held >= slow_ticks_)
      count_slow(held);
    else
      add(0);
    mutex_.unlock();
  }
  // Called without the gate by who would take it again at once: lets those who wait go first.
  void yield() const {
    while (waiting_.load(std::memory_order_relaxed) != 0) ::sched_yield();
  }

  // All since the last forget_holds(), at any time and from any thread.
  std::int64_t longest_hold_ns() const noexcept { return longest_ns_.load(std::memory_order_relaxed); }
  Histogram holds() const noexcept {
    Histogram counted;
    for (std::size_t i = 0; i < kNumBuckets; ++i) counted[i] = holds_[i].load(std::memory_order_relaxed);
    return counted;
  }
  void forget_holds() noexcept {
    const std::lock_guard lock(mutex_);
    longest_ns_.store(0, std::memory_order_relaxed);
    for (std::atomic<std::uint64_t>& each : holds_) each.store(0, std::memory_order_relaxed);
  }

 private:
  // Of a holding that took less by the clock nothing more is asked.
  static constexpr std::int64_t kSlowNs = 100'000;

  void begin() noexcept { held_since_ = exact_ ? clock_ns(CLOCK_THREAD_CPUTIME_ID) : ticks(); }

  void count_slow(std::int64_t held) noexcept {
    // No processor's clock ticks more slowly than once in a nanosecond and a half; measured, that is longer.
    const double ns_per_tick = rate_.ns_per_tick();
    slow_ticks_ = static_cast<std::int64_t>(static_cast<double>(kSlowNs) / ns_per_tick);
    const std::int64_t held_ns = static_cast<std::int64_t>(static_cast<double>(held) * ns_per_tick);
    static thread_local std::int64_t asked_ns = std::numeric_limits<std::int64_t>::min() / 2;
    const std::int64_t used_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    count(std::min(held_ns, used_ns - asked_ns));
    asked_ns = used_ns;
  }

  void count(std::int64_t held_ns) noexcept {
    if (held_ns > longest_ns_.load(std::memory_order_relaxed))
      longest_ns_.store(held_ns, std::memory_order_relaxed);
    std::size_t bucket = 0;
    for (std::int64_t most = kFirstBucketNs; held_ns > most && bucket + 1 < kNumBuckets; most *= 2) ++bucket;
    add(bucket);
  }
  // The holder alone writes.
  void add(std::size_t bucket) noexcept {
    holds_[bucket].store(holds_[bucket].load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  const bool exact_;
  std::atomic<int> waiting_{0};
  std::mutex mutex_;
  const TickRate rate_;
  std::int64_t slow_ticks_ = kSlowNs * 2 / 3;
  std::int64_t held_since_ = 0;  // by whoever holds it: its processor time, or ticks
  std::atomic<std::int64_t> longest_ns_{0};
  std::array<std::atomic<std::uint64_t>, kNumBuckets> holds_{};
};

}  // namespace kvxfer
