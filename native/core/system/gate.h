// The progress gate: the thread that holds it drives sockets, transports and the engine.
//
// A mutex that lets waiting threads in: otherwise the progress thread would take it again before a waiting
// caller has woken up. It measures how long it is held.
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
  // Counts holds by their processor time: up to an eighth of a millisecond, up to twice that, and so on;
  // the last bucket takes all longer ones.
  static constexpr std::size_t kNumBuckets = 9;
  static constexpr std::int64_t kFirstBucketNs = 125'000;
  using Histogram = std::array<std::uint64_t, kNumBuckets>;

  // Counts the holder's processor time. `exact`: with two system calls for each hold. Else it reads the
  // processor's clock at both ends of a hold, and asks for the processor time only if the hold took long
  // by that clock. The answer is what the thread has used since it was last asked, which bounds what the
  // hold can have used. So the count is never too small. It is too large if a thread is kept from its
  // processor that had not held the gate for a long time before.
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
  // A thread that would take the gate again at once calls this without the gate: waiting threads go first.
  void yield() const {
    while (waiting_.load(std::memory_order_relaxed) != 0) ::sched_yield();
  }

  // Since the last forget_holds(); may be called at any time and from any thread.
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
  // A hold that took less than this by the clock is not examined further.
  static constexpr std::int64_t kSlowNs = 100'000;

  void begin() noexcept { held_since_ = exact_ ? clock_ns(CLOCK_THREAD_CPUTIME_ID) : ticks(); }

  void count_slow(std::int64_t held) noexcept {
    // The initial slow_ticks_ assumes a tick of a nanosecond and a half; no processor's clock ticks more
    // slowly. Once the rate is measured, the threshold in ticks is longer.
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
  // Only the holder writes.
  void add(std::size_t bucket) noexcept {
    holds_[bucket].store(holds_[bucket].load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  const bool exact_;
  std::atomic<int> waiting_{0};
  std::mutex mutex_;
  const TickRate rate_;
  std::int64_t slow_ticks_ = kSlowNs * 2 / 3;
  std::int64_t held_since_ = 0;  // set by the holder: its processor time, or ticks
  std::atomic<std::int64_t> longest_ns_{0};
  std::array<std::atomic<std::uint64_t>, kNumBuckets> holds_{};
};

}  // namespace kvxfer
