// A rate limit: a bucket of tokens. It never looks at a clock, and bytes that were let go are not taken
// back.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/lease.h"

namespace kvxfer {

class Pace {
 public:
  // How much may go at once after a rest, as time at the rate. It is more than a timer is late, so that
  // late timers cost no rate.
  static constexpr Time kBurst = 10'000'000;

  // Forgets what is owed at the former rate. Setting the same rate again changes nothing.
  void set(Time now, std::uint64_t bytes_per_s) noexcept {
    if (bytes_per_s == bytes_per_s_) return;
    bytes_per_s_ = bytes_per_s;
    free_at_ = std::min(free_at_, now);
  }
  std::uint64_t bytes_per_s() const noexcept { return bytes_per_s_; }

  // True if a piece of any size may go: it may overdraw the bucket once.
  bool is_free(Time now) const noexcept { return free_at_ <= now; }
  Time free_at() const noexcept { return free_at_; }
  void spend(Time now, std::uint64_t nbytes) noexcept {
    const double takes_ns = static_cast<double>(nbytes) * 1e9 / static_cast<double>(bytes_per_s_);
    free_at_ = time_after(std::max(free_at_, now - kBurst), static_cast<Time>(std::min(takes_ns, kLongest)));
  }

 private:
  static constexpr double kLongest = 1e18;  // thirty years; a double beyond 2^63 is no time
  std::uint64_t bytes_per_s_ = 0;
  Time free_at_ = 0;
};

}  // namespace kvxfer
