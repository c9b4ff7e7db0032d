// The processor's own clock: reading it takes some ten nanoseconds; the kernel's takes twice as long, or a
// system call.
#pragma once

#include <cstdint>
#include <ctime>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace kvxfer {

inline std::int64_t clock_ns(clockid_t clock) noexcept {
  timespec time;
  ::clock_gettime(clock, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// Only differences have a meaning; in_ns says how long one is.
inline std::int64_t ticks() noexcept {
#if defined(__x86_64__)
  return static_cast<std::int64_t>(__rdtsc());
#else
  return clock_ns(CLOCK_MONOTONIC);
#endif
}

// The length of a tick, measured since this object was made: a few thousandths off after the first
// milliseconds.
class TickRate {
 public:
  double ns_per_tick() const noexcept {
#if defined(__x86_64__)
    const std::int64_t passed = ticks() - made_at_;
    return passed > 0
               ? static_cast<double>(clock_ns(CLOCK_MONOTONIC) - made_at_ns_) / static_cast<double>(passed)
               : 1;
#else
    return 1;
#endif
  }

 private:
  std::int64_t made_at_ = ticks(), made_at_ns_ = clock_ns(CLOCK_MONOTONIC);
};

}  // namespace kvxfer
