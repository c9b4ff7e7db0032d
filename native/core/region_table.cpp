#include "core/region_table.h"

#include <algorithm>
#include <optional>
#include <unordered_set>

namespace kvxfer {
namespace {

// a * b + c, or false where that does not fit: every number here may come from a peer.
bool mul_add(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t& out) {
  return !__builtin_mul_overflow(a, b, &out) && !__builtin_add_overflow(out, c, &out);
}

// Ids that were seen. A bit for each that exists, because sorting 64 thousand costs milliseconds where
// bits cost microseconds; unless that is out of proportion to the ids that are looked at: how many
// blocks a region has, and how many units a block, may be a peer's claim.
class IdSet {
 public:
  IdSet(std::span<const std::uint32_t> ids, std::uint32_t num_blocks, std::uint32_t units) {
    const std::uint64_t num_ids = std::uint64_t{num_blocks} * units;
    if (!ids.empty() && num_ids <= kBitsPerId * ids.size() + kBitsAtLeast) bits_.resize(num_ids);
  }
  bool insert(std::uint32_t id) {
    if (bits_.empty()) return ids_.insert(id).second;
    if (bits_[id]) return false;
    bits_[id] = true;
    return true;
  }
  bool contains(std::uint32_t id) const { return bits_.empty() ? ids_.contains(id) : bits_[id]; }

 private:
  static constexpr std::uint64_t kBitsPerId = 512, kBitsAtLeast = 1 << 20;
  std::vector<bool> bits_;
  std::unordered_set<std::uint32_t> ids_;
};

// One side of a loop, or of its scales: where unit 0 of block 0 has its runs.
struct HalfLoop {
  std::uint64_t offset, layer_stride, block_stride, unit_stride;
  std::uint32_t units;
  const std::uint64_t* strides;
  std::uint64_t nbytes;
};

HalfLoop half_of(const CopyProgram& program, const CopyLoop& loop, Footprint::Half half) {
  const UnitsPerBlock& units = program.units[loop.grain];
  if (half == Footprint::Half::kSrc)
    return {loop.src_offset,
            loop.src_layer_stride,
            loop.src_block_stride,
            loop.src_unit_stride,
            units.src,
            loop.src_strides,
            loop.nbytes};
  return {loop.dst_offset,
          loop.dst_layer_stride,
          loop.dst_block_stride,
          loop.dst_unit_stride,
          units.dst,
          loop.dst_strides,
          dst_run_nbytes(loop, program.conversion_of(loop))};
}

// Scales that lie in the region; nothing where they do not.
std::optional<HalfLoop> scales_of(const Conversion* conversion, Footprint::Half half) {
  if (conversion == nullptr) return std::nullopt;
  if (half == Footprint::Half::kSrc) {
    if (conversion->src_scales != ScalePlace::kRegion) return std::nullopt;
    return HalfLoop{conversion->src_offset,
                    conversion->src_layer_stride,
                    conversion->src_block_stride,
                    0,
                    1,
                    conversion->src_strides,
                    sizeof(float)};
  }
  if (conversion->dst_scales != ScalePlace::kRegion) return std::nullopt;
  return HalfLoop{conversion->dst_offset,
                  conversion->dst_layer_stride,
                  conversion->dst_block_stride,
                  0,
                  1,
                  conversion->dst_strides,
                  sizeof(float)};
}

template <class Visit>
Status visit_half(std::size_t k, const CopyLoop& loop, const HalfLoop& own, Visit&& visit) {
  for (std::uint32_t l = 0; l < loop.num_layers; ++l)
    for (std::uint32_t unit = 0; unit < own.units; ++unit)
      for (std::uint32_t i = 0; i < loop.counts[0]; ++i)
        for (std::uint32_t j = 0; j < loop.counts[1]; ++j) {
          std::uint64_t first, last;
          if (!mul_add(l, own.layer_stride, own.offset, first) ||
              !mul_add(unit, own.unit_stride, first, first) || !mul_add(i, own.strides[0], first, first) ||
              !mul_add(j, own.strides[1], first, first) || __builtin_add_overflow(first, own.nbytes, &last))
            return {Code::kOutOfRange, "loop " + std::to_string(k) + " of the copy program leaves 64 bits"};
          if (Status status = visit(k, first, last, own.block_stride); !status.ok()) return status;
        }
  return {};
}

// Calls visit(loop, first, last, block_stride) for every run of block 0, those of scales too; an
// error stops. Refuses programs with too many runs or with offsets beyond 64 bits.
template <class Visit>
Status visit_runs(const CopyProgram& program, Footprint::Half half, Visit&& visit) {
  std::uint64_t num_runs = 0;
  for (std::size_t k = 0; k < program.loops.size(); ++k) {
    const CopyLoop& loop = program.loops[k];
    const HalfLoop own = half_of(program, loop, half);
    std::uint64_t runs;
    if (__builtin_mul_overflow(std::uint64_t{loop.counts[0]} * loop.counts[1],
                               std::uint64_t{loop.num_layers} * own.units, &runs) ||
        runs > Footprint::kMaxRuns || (num_runs += runs) > Footprint::kMaxRuns)
      return {Code::kLayoutMismatch, "the copy program has more than " + std::to_string(Footprint::kMaxRuns) +
                                         " runs for one block pair: the layouts are too far apart"};
    if (Status status = visit_half(k, loop, own, visit); !status.ok()) return status;
    if (const auto scales = scales_of(program.conversion_of(loop), half))
      if (Status status = visit_half(k, loop, *scales, visit); !status.ok()) return status;
  }
  return {};
}

// The largest index of a conversion's scales in the program's table, or false beyond 64 bits.
bool last_index(const CopyLoop& loop, std::uint64_t offset, std::uint64_t layer_stride,
                const std::uint64_t* strides, std::uint64_t& last) {
  return mul_add(loop.num_layers - 1, layer_stride, offset, last) &&
         mul_add(loop.counts[0] - 1, strides[0], last, last) &&
         mul_add(loop.counts[1] - 1, strides[1], last, last);
}

Status check_conversion(const CopyProgram& program, const CopyLoop& loop, const Conversion& conversion) {
  if (loop.nbytes % itemsize(conversion.src_dtype) != 0)
    return {Code::kInvalidArgument, "the copy program converts " + std::to_string(loop.nbytes) +
                                        " bytes, which are no whole elements"};
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
  // The scale of a page is found from all of it at once.
  if (conversion.finds_scales() && (loop.grain != kCoarse || program.units[kCoarse].dst != 1))
    return {Code::kInvalidArgument, "the copy program finds scales of parts of a block"};
  return {};
}

}  // namespace

Result<Footprint> Footprint::create(const CopyProgram& program, Half half, std::uint32_t num_blocks,
                                    std::span<const MemorySpan> spans) {
  Footprint footprint;
  std::vector<Interval>& intervals = footprint.intervals_;
  Status status = visit_runs(
      program, half,
      [&](std::size_t, std::uint64_t first, std::uint64_t last, std::uint64_t stride) -> Status {
        intervals.push_back({first, last, stride});
        std::uint64_t end;
        // Spans ascend and do not overlap: the last that begins at or before `first` is the one.
        const auto after =
            std::upper_bound(spans.begin(), spans.end(), first,
                             [](std::uint64_t value, const MemorySpan& span) { return value < span.offset; });
        if (!mul_add(num_blocks - 1, stride, last, end) || after == spans.begin() ||
            end > std::prev(after)->offset + std::prev(after)->nbytes)
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
  IdSet seen(blocks, num_blocks, 1);
  for (const std::uint32_t block : blocks)
    if (!seen.insert(block)) return {Code::kDuplicateBlock, words(block, " is named twice in")};
  return {};
}

Status check_ids(std::span<const std::uint32_t> ids, std::uint32_t num_fine, const CopyProgram& program,
                 Footprint::Half half, std::uint32_t num_blocks, std::string_view region_name) {
  const bool src = half == Footprint::Half::kSrc;
  const std::uint32_t units = src ? program.units[kCoarse].src : program.units[kCoarse].dst;
  const std::uint32_t tokens = src ? program.units[kFine].src : program.units[kFine].dst;
  const std::string_view what = src ? "src_blocks" : "dst_blocks";
  if (units == 1 && num_fine == 0) return check_blocks(ids, num_blocks, !src, what, region_name);
  if (num_fine != 0 && tokens == 0)
    return {Code::kInvalidArgument, "the transfer names single tokens, its copy program moves whole units"};
  const auto coarse = ids.first(ids.size() - num_fine), fine = ids.last(num_fine);
  const auto words = [&](std::uint64_t block, const std::string& problem) {
    return std::string(what) + ": block " + std::to_string(block) + problem + " region '" +
           std::string(region_name) + "'";
  };
  for (const auto& [part, per_block] : {std::pair(coarse, units), std::pair(fine, tokens)})
    for (const std::uint32_t id : part)
      if (id / per_block >= num_blocks)
        return {Code::kOutOfRange,
                words(id / per_block, " is not one of the " + std::to_string(num_blocks) + " blocks of")};
  if (src) return {};
  IdSet whole(coarse, num_blocks, units), single(fine, num_blocks, tokens);
  for (const std::uint32_t id : coarse)
    if (!whole.insert(id))
      return {Code::kDuplicateBlock,
              words(id / units, ", unit " + std::to_string(id % units) + ", is named twice in")};
  for (const std::uint32_t id : fine)
    if (!single.insert(id) || whole.contains(id / (tokens / units)))
      return {Code::kDuplicateBlock,
              words(id / tokens, ", token " + std::to_string(id % tokens) + ", is named twice in")};
  return {};
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
    if (loop.conversion > program.conversions.size())
      return {Code::kInvalidArgument, "the copy program names a conversion beyond its table"};
    if (const Conversion* conversion = program.conversion_of(loop))
      if (Status status = check_conversion(program, loop, *conversion); !status.ok()) return status;
  }
  return {};
}

}  // namespace kvxfer
