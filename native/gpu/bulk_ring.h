// The shared memory that the bulk kernel needs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvxfer/bulk_ring.h"

namespace kvxfer::gpu {

inline constexpr std::uint32_t kStageNbytes = 16 * 1024;

// Each warp has one ring: while it stores one slice, the next two are being loaded. Several warps per CTA
// hide the time in which each computes its next places.
inline constexpr std::uint32_t kRingStages = 3;
using Ring = bulk::Ring<kRingStages, kStageNbytes>;

// 4 warps x 2 slices in flight = 128 KiB, a microsecond of 128 GB/s. The rings fit once into the 227 KiB that
// a CTA of sm_90 has.
inline constexpr std::uint32_t kRings = 4;
static_assert(kRings * sizeof(Ring) <= 227 * 1024);

}  // namespace kvxfer::gpu
