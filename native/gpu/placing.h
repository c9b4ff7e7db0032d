// Finds where a loop of a copy program lies in the memory of both ends.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/placement.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/half_loop.h"
#include "kvxfer/status.h"

namespace kvxfer::gpu {

// Consecutive layers of a loop whose addresses are as far apart as the loop says.
struct Layers {
  std::uint32_t first, num;  // counted from the loop's first
  // Where block 0 of the loop's first layer, and its scales, would lie if that layer were one of these. 0 for
  // scales that do not lie in a region.
  Address src, dst, src_scales, dst_scales;
};

// A loop, and the tables and placements of one part.
struct Placing {
  const CopyLoop& loop;
  const Conversion* conversion;  // null: none
  UnitsPerBlock units;
  std::uint32_t last_src_id, last_dst_id;  // the largest ids of the tables
  const Placement& src;
  const Placement& dst;

  // Returns layers [first, last) in order, with evenly placed layers together. kOutOfRange if the blocks of a
  // layer do not lie in one piece.
  Result<std::vector<Layers>> find(std::uint32_t first, std::uint32_t last) const;
};

// Returns at least the bits that are set in any address that the loop touches on one side, for alignment.
// `placed` is where the layers lie on that side.
std::uint64_t bits_of(const HalfLoop& half, Address placed, const CopyLoop& loop,
                      const Layers& layers) noexcept;

}  // namespace kvxfer::gpu
