// Chooses how many CTAs copy pages between a GPU and the host's memory, from measurements. Pure function.
#pragma once

#include <cstdint>
#include <span>

#include "gpu/copy_way.h"

namespace kvxfer::gpu {

// Used if nothing was measured. By arithmetic, 4 CTAs feed a NIC of 400 Gb/s (gpu/DESIGN.md).
inline constexpr std::uint32_t kUnmeasuredCtas = 4;
// A CTA of either copying kernel takes 64 KiB of aligned runs at a time, so a stream's piece of half a MiB
// has work for 8 CTAs.
inline constexpr std::uint32_t kMostStagingCtas = 8;

// The time that kernels of `num_ctas` CTAs took to copy `nbytes` in one direction.
struct CtaSample {
  Direction direction;
  std::uint32_t num_ctas;
  std::uint64_t nbytes, ns;
};

// Returns the fewest CTAs that are within a sixteenth of the best in both directions, which leaves the other
// CTAs to the model. If no number is that near in both, returns the one whose worse direction is best. A
// direction without samples is ignored. If a direction has samples, a number without a sample there is not
// chosen. Samples may come in any order, more than once, and from any source: impossible ones are skipped.
// kUnmeasuredCtas if none is left.
std::uint32_t staging_ctas_of(std::span<const CtaSample> samples) noexcept;

}  // namespace kvxfer::gpu
