#include "core/copy/footprint.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>

#include "core/control/wire.h"
#include "core/copy/convert_cell.h"

namespace kvxfer {
namespace {

// The bound for one loop at the source. The bytes of a piece then fit 64 bits: conversion makes a run at
// most four times as long, a program has at most 2^13 loops (wire::kMaxLoops), a transfer 2^18 pairs
// (wire::kMaxBlocks). No real block is nearly as large.
constexpr std::uint64_t kMaxPairNbytes = std::uint64_t{1} << 30;

// a * b + c, or false if it does not fit: every number here may come from a peer.
bool mul_add(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t& out) {
  return !__builtin_mul_overflow(a, b, &out) && !__builtin_add_overflow(out, c, &out);
}

HalfLoop half_of(const CopyProgram& program, const CopyLoop& loop, Side side) {
  return half_of(loop, program.conversion_of(loop), program.units[loop.grain], side);
}

Status leaves_64_bits(std::size_t loop) {
  return {Code::kOutOfRange,
          "loop " + std::to_string(loop) + " of the copy program has an offset or size beyond 64 bits"};
}

// Refuses programs that would expand to too much. A transfer names pairs of units, so it counts one pair at
// a time; for a region's own program it counts all units of a block.
Status check_runs(const CopyProgram& program, std::optional<Side> own = std::nullopt) {
  std::uint64_t num_runs = 0;
  for (const CopyLoop& loop : program.loops) {
    const std::uint64_t units = own ? half_of(program, loop, *own).units : 1;
    std::uint64_t runs;
    if (__builtin_mul_overflow(std::uint64_t{loop.counts[0]} * loop.counts[1], loop.num_layers * units,
                               &runs) ||
        runs > Footprint::kMaxRuns || (num_runs += runs) > Footprint::kMaxRuns)
      return {Code::kLayoutMismatch, "the copy program has more than " + std::to_string(Footprint::kMaxRuns) +
                                         " runs for one block pair: the layouts differ too much"};
  }
  return {};
}

// Calls visit(loop, half loop) for every loop, and for its scales in the region; stops at an error.
template <class Visit>
Status for_each_half(const CopyProgram& program, Side side, Visit&& visit) {
  for (std::size_t k = 0; k < program.loops.size(); ++k) {
    const CopyLoop& loop = program.loops[k];
    if (Status status = visit(k, half_of(program, loop, side)); !status.ok()) return status;
    if (const auto scales = region_scales_of(program.conversion_of(loop), program.units[loop.grain], side))
      if (Status status = visit(k, *scales); !status.ok()) return status;
  }
  return {};
}

// Runs of equal length, at all sums of some multiples of a few strides.
struct Box {
  struct Axis { std::uint64_t count, stride; };
  std::uint64_t first, last;  // of all of them: [first, last)
  std::uint64_t run_nbytes;
  std::array<Axis, 5> axes;  // the longest stride first
  std::size_t num_axes = 0;

  // False if the box leaves 64 bits.
  bool add(std::uint64_t count, std::uint64_t stride) {
    if (count > 1 && stride != 0) {  // otherwise the runs are the same bytes again
      std::size_t at = num_axes++;
      for (; at > 0 && axes[at - 1].stride < stride; --at) axes[at] = axes[at - 1];
      axes[at] = {count, stride};
    }
    return mul_add(count - 1, stride, last, last);
  }
  // Keeps half of the longest axis, and returns the other half.
  Box split() {
    Axis& axis = axes[0];
    Box rest = *this;
    const std::uint64_t kept = axis.count / 2, distance = kept * axis.stride;
    rest.first += distance;
    last -= (axis.count - kept) * axis.stride;
    rest.axes[0].count = axis.count - kept;
    axis.count = kept;
    drop_single();
    rest.drop_single();
    return rest;
  }

 private:
  void drop_single() {
    if (axes[0].count != 1) return;
    std::copy(axes.begin() + 1, axes.begin() + num_axes, axes.begin());
    --num_axes;
  }
};

// All runs of a half loop in block 0; nothing if they leave 64 bits.
std::optional<Box> box_of(const CopyLoop& loop, const HalfLoop& own) {
  Box box{own.offset, 0, own.nbytes, {}, 0};
  if (__builtin_add_overflow(own.offset, own.nbytes, &box.last) ||
      !box.add(loop.num_layers, own.layer_stride) || !box.add(own.units, own.unit_stride) ||
      !box.add(loop.counts[0], own.strides[0]) || !box.add(loop.counts[1], own.strides[1]))
    return std::nullopt;
  return box;
}

// The most steps of a check. A program of ours spans each interval of its half a few times at most: by the
// loops of two grains, of keys and of values, of heads that are not side by side. 64 Ki steps take some
// milliseconds.
std::uint64_t max_steps(std::size_t num_intervals) { return (std::uint64_t{1} << 16) + 32 * num_intervals; }

// Is every run of the box inside some interval? `fits(first, last)`: one interval holds all of it. Null:
// yes; else the run that is not, or at which the steps ran out.
template <class Fits>
std::optional<Box> find_outside(const Box& all, std::uint64_t& steps_left, Fits&& fits) {
  std::vector<Box> boxes = {all};
  while (!boxes.empty()) {
    Box box = boxes.back();
    boxes.pop_back();
    if (steps_left == 0) return box;
    --steps_left;
    if (fits(box.first, box.last)) continue;
    if (box.num_axes == 0) return box;
    boxes.push_back(box.split());
    boxes.push_back(box);
  }
  return std::nullopt;
}

Status too_far_apart() {
  return {Code::kLayoutMismatch,
          "the copy program jumps between the parts of a block too often: the layouts differ too much"};
}

// The largest index of a conversion's scales in the program's table; false if it leaves 64 bits.
bool last_index(const CopyLoop& loop, std::uint64_t offset, std::uint64_t layer_stride,
                const std::uint64_t* strides, std::uint64_t& last) {
  return mul_add(loop.num_layers - 1, layer_stride, offset, last) &&
         mul_add(loop.counts[0] - 1, strides[0], last, last) &&
         mul_add(loop.counts[1] - 1, strides[1], last, last);
}

Status check_conversion(const CopyProgram& program, const CopyLoop& loop, const Conversion& conversion) {
  if (loop.nbytes % itemsize(conversion.src_dtype) != 0)
    return {Code::kInvalidArgument, "the copy program converts " + std::to_string(loop.nbytes) +
                                        " bytes, which is not a whole number of elements"};
  std::uint64_t last;
  if (conversion.src_scales == ScalePlace::kProgram &&
      (conversion.src_block_stride != 0 ||
       !last_index(loop, conversion.src_offset, conversion.src_layer_stride, conversion.src_strides, last) ||
       last >= program.scales.size()))
    return {Code::kInvalidArgument, "the copy program names a source scale beyond its table"};
  if (conversion.dst_scales == ScalePlace::kProgram &&
      (conversion.dst_block_stride != 0 ||
       !last_index(loop, conversion.dst_offset, conversion.dst_layer_stride, conversion.dst_strides, last) ||
       last >= program.scales.size()))
    return {Code::kInvalidArgument, "the copy program names a destination scale beyond its table"};
  // The scale of a page is found from the whole page at once.
  if (conversion.finds_scales() && (loop.grain != kCoarse || program.units[kCoarse].dst != 1))
    return {
        Code::kInvalidArgument,
        "the copy program computes scales of parts of a block, but a scale is computed from a whole block"};
  // Packing or summing a piece does that in one go; a run costs it a cache line at least.
  const std::uint64_t run = std::max({loop.nbytes, dst_run_nbytes(loop, &conversion), std::uint64_t{64}});
  if (conversion.finds_scales() && std::uint64_t{loop.counts[0]} * loop.counts[1] > kMostFoundNbytes / run)
    return {Code::kInvalidArgument, "the copy program computes scales of more than " +
                                        std::to_string(kMostFoundNbytes) +
                                        " bytes of a block at once: use smaller blocks"};
  return {};
}

}  // namespace

Result<Footprint> Footprint::create(const CopyProgram& program, Side side, std::uint32_t num_blocks,
                                    std::span<const MemorySpan> spans) {
  if (Status status = check_runs(program, side); !status.ok()) return status;
  if (Status status = check_inside(program, side, num_blocks, spans); !status.ok()) return status;
  Footprint footprint;
  std::vector<Interval>& intervals = footprint.intervals_;
  Status status = for_each_half(program, side, [&](std::size_t k, const HalfLoop& own) -> Status {
    const CopyLoop& loop = program.loops[k];
    // Everything is inside the spans, so no sum leaves 64 bits.
    for (std::uint32_t l = 0; l < loop.num_layers; ++l)
      for (std::uint32_t unit = 0; unit < own.units; ++unit)
        for (std::uint32_t i = 0; i < loop.counts[0]; ++i)
          for (std::uint32_t j = 0; j < loop.counts[1]; ++j) {
            const std::uint64_t first = own.offset + l * own.layer_stride + unit * own.unit_stride +
                                        i * own.strides[0] + j * own.strides[1];
            intervals.push_back({first, first + own.nbytes, own.block_stride});
          }
    return {};
  });
  if (!status.ok()) return status;
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.first < b.first; });
  // Neighbours of one stride are merged into one interval.
  std::vector<Interval> merged;
  for (const Interval& interval : intervals) {
    if (!merged.empty() && interval.first <= merged.back().last &&
        interval.block_stride == merged.back().block_stride)
      merged.back().last = std::max(merged.back().last, interval.last);
    else
      merged.push_back(interval);
  }
  intervals = std::move(merged);
  for (const Interval& interval : intervals) footprint.nbytes_ += interval.last - interval.first;
  return footprint;
}

Status Footprint::contains(const CopyProgram& program, Side side) const {
  if (Status status = check_runs(program); !status.ok()) return status;
  // Each grain moves a block's bytes once: the bytes that a program moves are bounded by those that its
  // blocks hold.
  std::uint64_t moved_nbytes[kNumGrains] = {0, 0};
  for (std::size_t k = 0; k < program.loops.size(); ++k) {
    const CopyLoop& loop = program.loops[k];
    const HalfLoop own = half_of(program, loop, side);
    // Units that share their bytes, such as the scale of a source's page, are read by each of them; only at
    // the destination would one overwrite what another wrote.
    const std::uint64_t units = side == Side::kSrc && own.unit_stride == 0 ? 1 : own.units;
    const std::uint64_t runs =  // at most kMaxRuns times wire::kMaxUnits
        std::uint64_t{loop.counts[0]} * loop.counts[1] * loop.num_layers * units;
    std::uint64_t& moved = moved_nbytes[loop.grain];
    if (!mul_add(runs, own.nbytes, moved, moved)) return leaves_64_bits(k);
    if (moved > nbytes_)
      return {Code::kLayoutMismatch,
              "the copy program moves bytes of a block more than once: " + std::to_string(moved) +
                  " of a block that has " + std::to_string(nbytes_)};
  }
  std::uint64_t steps_left = max_steps(intervals_.size());
  return for_each_half(program, side, [&](std::size_t k, const HalfLoop& own) -> Status {
    const std::optional<Box> box = box_of(program.loops[k], own);
    if (!box) return leaves_64_bits(k);
    const auto outside = find_outside(*box, steps_left, [&](std::uint64_t first, std::uint64_t last) {
      const auto after = std::upper_bound(
          intervals_.begin(), intervals_.end(), first,
          [](std::uint64_t value, const Interval& interval) { return value < interval.first; });
      return after != intervals_.begin() && last <= std::prev(after)->last &&
             own.block_stride == std::prev(after)->block_stride;
    });
    if (!outside) return {};
    if (steps_left == 0) return too_far_apart();
    return {Code::kLayoutMismatch, "loop " + std::to_string(k) + " of the copy program touches bytes " +
                                       std::to_string(outside->first) + " to " +
                                       std::to_string(outside->last) +
                                       ", which do not belong to block 0 in the region's layout"};
  });
}

Status check_inside(const CopyProgram& program, Side side, std::uint32_t num_blocks,
                    std::span<const MemorySpan> spans) {
  if (Status status = check_runs(program); !status.ok()) return status;
  std::uint64_t steps_left = max_steps(spans.size());
  return for_each_half(program, side, [&](std::size_t k, const HalfLoop& own) -> Status {
    // A run and its counterparts in all blocks lie in one span.
    const std::optional<Box> box = box_of(program.loops[k], own);
    std::uint64_t beyond = 0, end = 0;
    if (!box || !mul_add(num_blocks - 1, own.block_stride, 0, beyond) ||
        __builtin_add_overflow(box->last, beyond, &end))
      return leaves_64_bits(k);
    const auto outside = find_outside(*box, steps_left, [&](std::uint64_t first, std::uint64_t last) {
      // Spans ascend and do not overlap: only the last one that begins at or before `first` can hold
      // it.
      const auto after =
          std::upper_bound(spans.begin(), spans.end(), first,
                           [](std::uint64_t value, const MemorySpan& span) { return value < span.offset; });
      return after != spans.begin() && last + beyond <= std::prev(after)->offset + std::prev(after)->nbytes;
    });
    if (!outside) return {};
    if (steps_left == 0) return too_far_apart();
    return {Code::kOutOfRange, "the layout's bytes " + std::to_string(outside->first) + " to " +
                                   std::to_string(outside->last) +
                                   " of block 0, or the same bytes of block " +
                                   std::to_string(num_blocks - 1) + ", lie outside the registered memory"};
  });
}

Status check_program(const CopyProgram& program) {
  if (program.num_layers == 0 || program.num_layers > wire::kMaxLayers)
    return {Code::kInvalidArgument, "a copy program has 1 to " + std::to_string(wire::kMaxLayers) +
                                        " layers, not " + std::to_string(program.num_layers)};
  if (program.loops.empty() || program.loops.size() > wire::kMaxLoops)
    return {Code::kInvalidArgument, "a copy program has 1 to " + std::to_string(wire::kMaxLoops) +
                                        " loops, not " + std::to_string(program.loops.size())};
  const UnitsPerBlock &units = program.units[kCoarse], &tokens = program.units[kFine];
  if (units.src == 0 || units.dst == 0 || (tokens.src == 0) != (tokens.dst == 0))
    return {Code::kInvalidArgument, "the copy program's blocks have no units"};
  if (tokens.src != 0 && (tokens.src % units.src != 0 || tokens.dst % units.dst != 0 ||
                          tokens.src / units.src != tokens.dst / units.dst))
    return {Code::kInvalidArgument, "the copy program's units hold different numbers of tokens"};
  const HeadSlice& heads = program.dst_heads;
  if (heads.num == 0 || heads.num > heads.total || heads.first > heads.total - heads.num)
    return {Code::kInvalidArgument, "the copy program fills heads that its destination does not hold"};
  for (const CopyLoop& loop : program.loops) {
    if (loop.nbytes == 0 || loop.counts[0] == 0 || loop.counts[1] == 0 || loop.num_layers == 0)
      return {Code::kInvalidArgument, "the copy program has a loop that moves nothing"};
    if (loop.first_layer >= program.num_layers || loop.num_layers > program.num_layers - loop.first_layer)
      return {Code::kInvalidArgument, "the copy program has a loop beyond its last layer"};
    if (loop.grain >= kNumGrains || program.units[loop.grain].src == 0)
      return {Code::kInvalidArgument, "the copy program has a loop of units that its blocks do not have"};
    if (loop.nbytes > kMaxPairNbytes ||
        std::uint64_t{loop.counts[0]} * loop.counts[1] > kMaxPairNbytes / loop.nbytes)
      return {Code::kInvalidArgument, "the copy program has a loop of more than " +
                                          std::to_string(kMaxPairNbytes) + " bytes of a pair"};
    if (loop.conversion > program.conversions.size())
      return {Code::kInvalidArgument, "the copy program names a conversion beyond its table"};
    if (const Conversion* conversion = program.conversion_of(loop))
      if (Status status = check_conversion(program, loop, *conversion); !status.ok()) return status;
  }
  return {};
}

}  // namespace kvxfer
