#include "gpu/copy_way.h"

#include <algorithm>

namespace kvxfer::gpu {
namespace {

std::size_t looseness(std::uint32_t alignment) noexcept { return alignment % kKernelAlignment == 0 ? 0 : 1; }

// Engines win even if they are a thirty-second slower: rounds of one way differ by as much, and engines do
// not slow the model's kernels.
bool engines_win(const WaySample& sample) noexcept {
  return sample.engine_ns <= sample.kernel_ns + sample.kernel_ns / 32;
}

}  // namespace

bool Calibration::uses_engines() const noexcept {
  for (const auto& forms : least_run_nbytes)
    for (const auto& alignments : forms)
      for (const std::uint64_t nbytes : alignments)
        if (nbytes != kNever) return true;
  return false;
}

Way way_of(Direction direction, const Runs& runs, const Calibration& calibration) noexcept {
  if (direction == Direction::kOnDevice || runs.num == 0) return Way::kKernel;
  // The order of the tests matters: the product can exceed 2^64 only if one run is long enough alone.
  if (runs.run_nbytes < calibration.least_copy_nbytes &&
      runs.run_nbytes * runs.num < calibration.least_copy_nbytes)
    return Way::kKernel;
  const std::uint64_t least =
      calibration.least_run_nbytes[static_cast<std::size_t>(direction)][static_cast<std::size_t>(runs.form)]
                                  [looseness(runs.alignment)];
  return least != Calibration::kNever && runs.run_nbytes >= least ? Way::kCopyEngine : Way::kKernel;
}

Calibration calibration_of(std::span<const WaySample> samples) noexcept {
  Calibration out;
  for (const WaySample& sample : samples) {
    if (sample.direction == Direction::kOnDevice || !engines_win(sample)) continue;
    const auto contradicts = [&](const WaySample& other) {
      return other.direction == sample.direction && other.form == sample.form &&
             looseness(other.alignment) == looseness(sample.alignment) &&
             other.run_nbytes >= sample.run_nbytes && !engines_win(other);
    };
    if (std::any_of(samples.begin(), samples.end(), contradicts)) continue;
    std::uint64_t& least =
        out.least_run_nbytes[static_cast<std::size_t>(sample.direction)]
                            [static_cast<std::size_t>(sample.form)][looseness(sample.alignment)];
    least = std::min(least, sample.run_nbytes);
  }
  return out;
}

}  // namespace kvxfer::gpu
