// The parts of a copy program that copy engines execute: layers of a loop, as runs or as rows. Pure
// functions.
#pragma once

#include <cstdint>
#include <span>

#include "gpu/copy_way.h"
#include "gpu/driver.h"
#include "gpu/placing.h"
#include "kvxfer/copy_program.h"

namespace kvxfer::gpu {

// Some layers of a loop without a conversion, and the loop's pairs in the tables.
struct EngineShare {
  const CopyLoop* loop;  // the program's
  UnitsPerBlock units;
  Layers layers;
  std::uint32_t first_pair, num_pairs;
};

// The runs of one pair. Runs that follow each other at both ends are merged into one.
struct PairRuns {
  std::uint64_t nbytes;
  std::uint32_t counts[2];
  std::uint64_t src_strides[2], dst_strides[2];
};
PairRuns runs_of_pair(const CopyLoop& loop) noexcept;

// Rows of a 2-D copy are shorter than this. For longer rows, one copy each costs nothing extra.
inline constexpr std::uint64_t kMostRowNbytes = 256 * 1024;
// CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device that kernels run on.
inline constexpr std::uint64_t kMostPitch = (std::uint64_t{1} << 31) - 1;
Form form_of(const PairRuns& runs) noexcept;

// Describes all runs of a share, for way_of(). Pairs that follow each other at both ends count as one run.
Runs runs_of(const EngineShare& share, std::span<const std::uint32_t> src_ids,
             std::span<const std::uint32_t> dst_ids) noexcept;

// Calls visit(src, dst) for every pair of every layer of a share, with the addresses of its first run.
template <class Visit>
void for_each_pair(const EngineShare& share, std::span<const std::uint32_t> src_ids,
                   std::span<const std::uint32_t> dst_ids, Visit&& visit) {
  // The layers' addresses already contain the loop's offsets.
  CopyLoop loop = *share.loop;
  loop.src_offset = loop.dst_offset = 0;
  for (std::uint32_t layer = share.layers.first; layer < share.layers.first + share.layers.num; ++layer)
    for (std::uint32_t pair = share.first_pair; pair < share.first_pair + share.num_pairs; ++pair) {
      const Cell cell = cell_of(loop, share.units, layer, src_ids[pair], dst_ids[pair]);
      visit(Address{share.layers.src + cell.src}, Address{share.layers.dst + cell.dst});
    }
}

}  // namespace kvxfer::gpu
