#include "gpu/cta_choice.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>

namespace kvxfer::gpu {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// Rounds of one number differ by less than this, and a smaller gain is not worth twice the CTAs.
constexpr double kNearBest = 17.0 / 16.0;

bool is_sound(const CtaSample& sample) noexcept {
  return sample.direction != Direction::kOnDevice && sample.num_ctas >= 1 &&
         sample.num_ctas <= kMostStagingCtas && sample.nbytes != 0 && sample.ns != 0;
}

// ns per byte, by number of CTAs.
using Times = std::array<double, kMostStagingCtas + 1>;

}  // namespace

std::uint32_t staging_ctas_of(std::span<const CtaSample> samples) noexcept {
  std::array<Times, kNumHostDirections> directions;
  for (Times& times : directions) times.fill(kNever);
  for (const CtaSample& sample : samples) {
    if (!is_sound(sample)) continue;
    double& time = directions[static_cast<std::size_t>(sample.direction)][sample.num_ctas];
    time = std::min(time, static_cast<double>(sample.ns) / static_cast<double>(sample.nbytes));
  }
  // For each number, its time divided by the best number's, in the worse of the two directions.
  Times worse{};
  bool is_measured = false;
  for (const Times& times : directions) {
    const double best = *std::min_element(times.begin(), times.end());
    if (best == kNever) continue;
    is_measured = true;
    for (std::uint32_t num = 1; num <= kMostStagingCtas; ++num)
      worse[num] = std::max(worse[num], times[num] / best);
  }
  if (!is_measured) return kUnmeasuredCtas;
  std::uint32_t chosen = 1;
  for (std::uint32_t num = 1; num <= kMostStagingCtas; ++num) {
    if (worse[num] <= kNearBest) return num;
    if (worse[num] < worse[chosen]) chosen = num;
  }
  // calibrate() measures the same numbers in both directions, so samples without a common number are not its
  // own.
  return worse[chosen] == kNever ? kUnmeasuredCtas : chosen;
}

}  // namespace kvxfer::gpu
