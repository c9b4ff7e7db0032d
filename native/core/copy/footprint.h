// Where copy programs may reach: which bytes are a block's, and whether a peer's program keeps to them.
//
// A peer writes the programs, so a check costs what was sent and never what it expands to: a loop is held against
// whole intervals, and is split only where it spans several.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvxfer/copy_program.h"
#include "kvxfer/half_loop.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Structure alone: sizes within bounds, no loop beyond num_layers, no index beyond its table.
Status check_program(const CopyProgram& program);

// The bytes of block 0 over all layers, as disjoint ascending intervals; block b owns the same,
// b * block_stride further.
class Footprint {
 public:
  struct Interval {
    std::uint64_t first, last;  // [first, last)
    std::uint64_t block_stride;
  };

  // Runs of one pair over all layers: what a program expands to where it runs.
  static constexpr std::uint64_t kMaxRuns = 1 << 20;

  // Of what our own `program` touches of block 0 of each layer on one side: a step for each of its runs. Refused
  // (kOutOfRange) where block 0 or block num_blocks - 1, or what lies between, leaves the spans.
  static Result<Footprint> create(const CopyProgram& program, Side side, std::uint32_t num_blocks,
                                  std::span<const MemorySpan> spans);

  // Does `program`, on this side, touch only bytes of the blocks that it is given, and each of them once? Its
  // structure has been checked. Costs a search for each of its loops and each interval that a loop spans.
  Status contains(const CopyProgram& program, Side side) const;

 private:
  std::vector<Interval> intervals_;
  std::uint64_t nbytes_ = 0;  // of them all
};

// Does what `program` touches of `num_blocks` blocks on this side lie inside the spans? Costs the same.
Status check_inside(const CopyProgram& program, Side side, std::uint32_t num_blocks,
                    std::span<const MemorySpan> spans);

}  // namespace kvxfer
