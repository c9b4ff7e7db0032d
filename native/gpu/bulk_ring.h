// What the bulk kernel needs of shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvxfer/bulk_ring.h"

namespace kvxfer::gpu {

inline constexpr std::uint32_t kStageNbytes = 16 * 1024;

// A warp's: while one slice is stored, the next two are on their way here. Several warps hide from each
// other the time in which they look for their next places.
inline constexpr std::uint32_t kRingStages = 3;
using Ring = bulk::Ring<kRingStages, kStageNbytes>;

// 4 warps x 2 slices on their way = 128 KiB, a microsecond of 128 GB/s. All of it fits into the 227 KiB that
// a CTA of sm_90 has, once.
inline constexpr std::uint32_t kRings = 4;
static_assert(kRings * sizeof(Ring) <= 227 * 1024);

}  // namespace kvxfer::gpu
