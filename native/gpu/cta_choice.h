// How many CTAs copy pages between a GPU and the host's memory, by what was measured. Pure.
#pragma once

#include <cstdint>
#include <span>

#include "gpu/copy_way.h"

namespace kvxfer::gpu {

// By arithmetic these feed a NIC of 400 Gb/s (gpu/DESIGN.md): where nothing was measured.
inline constexpr std::uint32_t kUnmeasuredCtas = 4;
// A CTA of either copying kernel takes 64 KiB of aligned runs at a time: a stream's piece of half a MiB has
// work for so many.
inline constexpr std::uint32_t kMostStagingCtas = 8;

// What so many bytes took in one direction by kernels of so many CTAs.
struct CtaSample {
  Direction direction;
  std::uint32_t num_ctas;
  std::uint64_t nbytes, ns;
};

// The fewest CTAs that are within a sixteenth of the best in both directions: the rest is the model's. Where
// no number is that near to both, the one whose worse direction is best. A direction without samples has no
// say, and a number without a sample in one that has some is not taken. Samples may come in any order, more
// than once, and from anywhere: what cannot have been measured is passed over. kUnmeasuredCtas where none is
// left.
std::uint32_t staging_ctas_of(std::span<const CtaSample> samples) noexcept;

}  // namespace kvxfer::gpu
