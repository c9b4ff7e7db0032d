#include "core/region_table.h"

#include <algorithm>

namespace kvxfer {
namespace {

// a * b + c, or false where that does not fit: every number here may come from a peer.
bool mul_add(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t& out) {
  return !__builtin_mul_overflow(a, b, &out) && !__builtin_add_overflow(out, c, &out);
}

struct HalfLoop { std::uint64_t offset, layer_stride, block_stride, strides[2]; };

HalfLoop half_of(const CopyLoop& loop, Footprint::Half half) {
  if (half == Footprint::Half::kSrc)
    return {loop.src_offset,
            loop.src_layer_stride,
            loop.src_block_stride,
            {loop.src_strides[0], loop.src_strides[1]}};
  return {loop.dst_offset,
          loop.dst_layer_stride,
          loop.dst_block_stride,
          {loop.dst_strides[0], loop.dst_strides[1]}};
}

// Calls visit(first, last, block_stride) for every run of block 0; false stops. Refuses programs
// with too many runs or with offsets beyond 64 bits.
template <class Visit>
Status visit_runs(const CopyProgram& program, Footprint::Half half, Visit&& visit) {
  std::uint64_t num_runs = 0;
  for (std::size_t k = 0; k < program.loops.size(); ++k) {
    const CopyLoop& loop = program.loops[k];
    std::uint64_t runs;
    if (__builtin_mul_overflow(std::uint64_t{loop.counts[0]} * loop.counts[1], std::uint64_t{loop.num_layers},
                               &runs) ||
        (num_runs += runs) > Footprint::kMaxRuns || runs > Footprint::kMaxRuns)
      return {Code::kLayoutMismatch, "the copy program has more than " + std::to_string(Footprint::kMaxRuns) +
                                         " runs for one block pair: the layouts are too far apart"};
    const HalfLoop own = half_of(loop, half);
    for (std::uint32_t l = 0; l < loop.num_layers; ++l)
      for (std::uint32_t i = 0; i < loop.counts[0]; ++i)
        for (std::uint32_t j = 0; j < loop.counts[1]; ++j) {
          std::uint64_t first, last;
          if (!mul_add(l, own.layer_stride, own.offset, first) || !mul_add(i, own.strides[0], first, first) ||
              !mul_add(j, own.strides[1], first, first) || __builtin_add_overflow(first, loop.nbytes, &last))
            return {Code::kOutOfRange, "loop " + std::to_string(k) + " of the copy program leaves 64 bits"};
          if (Status status = visit(k, first, last, own.block_stride); !status.ok()) return status;
        }
  }
  return {};
}

}  // namespace

Result<Footprint> Footprint::create(const CopyProgram& loops, std::uint32_t num_blocks,
                                    std::span<const MemorySpan> spans) {
  Footprint footprint;
  std::vector<Interval>& intervals = footprint.intervals_;
  Status status = visit_runs(
      loops, Half::kDst,
      [&](std::size_t, std::uint64_t first, std::uint64_t last, std::uint64_t stride) -> Status {
        intervals.push_back({first, last, stride});
        std::uint64_t end;
        const auto in_span = [&](const MemorySpan& span) {
          return first >= span.offset && end <= span.offset + span.nbytes;
        };
        if (!mul_add(num_blocks - 1, stride, last, end) || std::none_of(spans.begin(), spans.end(), in_span))
          return {Code::kOutOfRange, "the layout's bytes " + std::to_string(first) + " to " +
                                         std::to_string(last) + " of block 0, or the same of block " +
                                         std::to_string(num_blocks - 1) +
                                         ", lie outside the registered memory"};
        return {};
      });
  if (!status.ok()) return status;
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.first < b.first; });
  // Neighbours of one stride become one interval.
  std::vector<Interval> merged;
  for (const Interval& interval : intervals) {
    if (!merged.empty() && interval.first <= merged.back().last &&
        interval.block_stride == merged.back().block_stride)
      merged.back().last = std::max(merged.back().last, interval.last);
    else
      merged.push_back(interval);
  }
  intervals = std::move(merged);
  return footprint;
}

Status Footprint::contains(const CopyProgram& program, Half half) const {
  return visit_runs(
      program, half,
      [&](std::size_t loop, std::uint64_t first, std::uint64_t last, std::uint64_t stride) -> Status {
        auto after = std::upper_bound(
            intervals_.begin(), intervals_.end(), first,
            [](std::uint64_t value, const Interval& interval) { return value < interval.first; });
        if (after != intervals_.begin()) {
          const Interval& interval = *std::prev(after);
          if (last <= interval.last && stride == interval.block_stride) return {};
        }
        return {Code::kLayoutMismatch, "loop " + std::to_string(loop) +
                                           " of the copy program touches bytes " + std::to_string(first) +
                                           " to " + std::to_string(last) +
                                           ", which are not block 0's in the region's layout"};
      });
}

wire::Region Region::described() const {
  wire::Region out;
  out.id = memory.id;
  out.name = name;
  out.base = reinterpret_cast<std::uint64_t>(memory.base);
  out.spans = memory.spans;
  out.num_blocks = num_blocks;
  out.layout = layout;
  out.keys = keys;
  return out;
}

Status check_blocks(std::span<const std::uint32_t> blocks, std::uint32_t num_blocks, bool distinct,
                    std::string_view what, std::string_view region_name) {
  const auto words = [&](std::uint32_t block, const std::string& problem) {
    return std::string(what) + ": block " + std::to_string(block) + problem + " region '" +
           std::string(region_name) + "'";
  };
  for (const std::uint32_t block : blocks)
    if (block >= num_blocks)
      return {Code::kOutOfRange,
              words(block, " is not one of the " + std::to_string(num_blocks) + " blocks of")};
  if (!distinct) return {};
  // Sorting 64 thousand ids costs milliseconds where a bit for each block costs microseconds.
  thread_local std::vector<bool> seen;
  seen.assign(num_blocks, false);
  for (const std::uint32_t block : blocks) {
    if (seen[block]) return {Code::kDuplicateBlock, words(block, " is named twice in")};
    seen[block] = true;
  }
  return {};
}

Status check_program(const CopyProgram& program) {
  if (program.num_layers == 0 || program.num_layers > wire::kMaxLayers)
    return {Code::kInvalidArgument, "a copy program has 1 to " + std::to_string(wire::kMaxLayers) +
                                        " layers, not " + std::to_string(program.num_layers)};
  if (program.loops.empty() || program.loops.size() > wire::kMaxLoops)
    return {Code::kInvalidArgument, "a copy program has 1 to " + std::to_string(wire::kMaxLoops) +
                                        " loops, not " + std::to_string(program.loops.size())};
  for (const CopyLoop& loop : program.loops) {
    if (loop.op != 0)
      return {Code::kUnsupported, "the copy program converts values, which this version cannot"};
    if (loop.nbytes == 0 || loop.counts[0] == 0 || loop.counts[1] == 0 || loop.num_layers == 0)
      return {Code::kInvalidArgument, "the copy program has a loop that moves nothing"};
    if (loop.first_layer >= program.num_layers || loop.num_layers > program.num_layers - loop.first_layer)
      return {Code::kInvalidArgument, "the copy program has a loop beyond its last layer"};
  }
  return {};
}

}  // namespace kvxfer
