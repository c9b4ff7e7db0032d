// Where copy programs may reach: which bytes belong to a block, and whether a peer's program keeps to them.
//
// Peers write programs, so a check costs what was sent, and never what the program expands to: a loop is
// checked against whole intervals, and is split only if it spans several.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvxfer/copy_program.h"
#include "kvxfer/half_loop.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Checks the structure alone: sizes within bounds, no loop beyond num_layers, no index beyond its table.
Status check_program(const CopyProgram& program);

// The bytes of block 0 over all layers, as disjoint ascending intervals; block b owns the same,
// b * block_stride further.
class Footprint {
 public:
  struct Interval {
    std::uint64_t first, last;  // [first, last)
    std::uint64_t block_stride;
  };

  // Most runs of one pair over all layers: what a program expands to when it runs.
  static constexpr std::uint64_t kMaxRuns = 1 << 20;

  // The footprint of what our own `program` touches of block 0 of each layer on one side. Takes a step for
  // each of its runs. kOutOfRange if block 0, block num_blocks - 1, or anything between them leaves the
  // spans.
  static Result<Footprint> create(const CopyProgram& program, Side side, std::uint32_t num_blocks,
                                  std::span<const MemorySpan> spans);

  // Does `program`, on this side, touch only bytes of the blocks that it is given, and each of them once?
  // At the source, units of a block may read the same bytes. The caller has checked its structure. Costs a
  // search for each of its loops and for each interval that a loop spans.
  Status contains(const CopyProgram& program, Side side) const;

 private:
  std::vector<Interval> intervals_;
  std::uint64_t nbytes_ = 0;  // of all intervals together
};

// Do all bytes that `program` touches of `num_blocks` blocks on this side lie inside the spans? Costs the
// same.
Status check_inside(const CopyProgram& program, Side side, std::uint32_t num_blocks,
                    std::span<const MemorySpan> spans);

}  // namespace kvxfer
