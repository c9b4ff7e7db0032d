// Where a loop of a copy program lies in the memory of both ends.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/placement.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/half_loop.h"
#include "kvxfer/status.h"

namespace kvxfer::gpu {

// Some layers of a loop whose memory is as evenly apart as the loop says.
struct Layers {
  std::uint32_t first, num;  // counted from the loop's first
  // Where block 0 of the loop's first layer would lie if it were one of them, and its scales (0 where no
  // region has any).
  Address src, dst, src_scales, dst_scales;
};

// A loop's share of a part.
struct Placing {
  const CopyLoop& loop;
  const Conversion* conversion;  // null: none
  UnitsPerBlock units;
  std::uint32_t last_src_id, last_dst_id;  // of the tables
  const Placement& src;
  const Placement& dst;

  // Layers [first, last) in order, those together that lie alike. kOutOfRange where the blocks of one do
  // not lie in one piece.
  Result<std::vector<Layers>> find(std::uint32_t first, std::uint32_t last) const;
};

// Set bits are those that some address which the loop touches on one side has set, at least; `placed`: where the
// layers are there.
std::uint64_t bits_of(const HalfLoop& half, Address placed, const CopyLoop& loop,
                      const Layers& layers) noexcept;

}  // namespace kvxfer::gpu
