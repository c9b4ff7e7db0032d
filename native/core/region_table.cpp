#include "core/region_table.h"

#include <algorithm>
#include <optional>
#include <unordered_set>

#include "core/bit_set.h"
#include "core/system/pool_memory.h"

namespace kvxfer {
namespace {

// The ids that were seen. A bit for each possible id, because sorting 64 thousand costs milliseconds and
// bits cost microseconds; unless there are far more possible ids than ids to look at. A region's number of
// blocks, and a block's number of units, may be a peer's claim.
class IdSet {
 public:
  IdSet(std::uint32_t num_blocks, std::uint32_t units, std::size_t num_looked_at)
      : has_bits_(std::uint64_t{num_blocks} * units <= kBitsPerId * num_looked_at),
        bits_(has_bits_ ? std::size_t{num_blocks} * units : 0) {}
  bool insert(std::uint32_t id) {
    if (!has_bits_) return ids_.insert(id).second;
    if (bits_.contains(id)) return false;
    bits_.insert(id);
    return true;
  }
  bool contains(std::uint32_t id) const { return has_bits_ ? bits_.contains(id) : ids_.contains(id); }

 private:
  static constexpr std::uint64_t kBitsPerId = 4096;
  const bool has_bits_;
  BitSet bits_;
  std::unordered_set<std::uint32_t> ids_;
};

// So few ids are compared with each other, which takes no memory.
constexpr std::size_t kFewIds = 16;

// The first id that occurred before.
std::optional<std::uint32_t> find_twice(std::span<const std::uint32_t> ids, std::uint32_t num_blocks,
                                        std::uint32_t units) {
  if (ids.size() <= kFewIds) {
    for (std::size_t i = 1; i < ids.size(); ++i)
      if (std::find(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(i), ids[i]) !=
          ids.begin() + static_cast<std::ptrdiff_t>(i))
        return ids[i];
    return std::nullopt;
  }
  IdSet seen(num_blocks, units, ids.size());
  for (const std::uint32_t id : ids)
    if (!seen.insert(id)) return id;
  return std::nullopt;
}

// The first token that belongs to a unit which also moves as a whole.
std::optional<std::uint32_t> find_in_units(std::span<const std::uint32_t> tokens,
                                           std::uint32_t tokens_per_unit,
                                           std::span<const std::uint32_t> units, std::uint32_t num_blocks,
                                           std::uint32_t units_per_block) {
  IdSet whole(num_blocks, units_per_block, units.size());
  for (const std::uint32_t unit : units) whole.insert(unit);
  for (const std::uint32_t token : tokens)
    if (whole.contains(token / tokens_per_unit)) return token;
  return std::nullopt;
}

}  // namespace

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
  if (const auto twice = find_twice(blocks, num_blocks, 1))
    return {Code::kDuplicateBlock, words(*twice, " is named twice in")};
  return {};
}

Status check_ids(std::span<const std::uint32_t> ids, std::uint32_t num_fine, const CopyProgram& program,
                 Side side, std::uint32_t num_blocks, std::string_view region_name) {
  const bool src = side == Side::kSrc;
  const std::uint32_t units = src ? program.units[kCoarse].src : program.units[kCoarse].dst;
  const std::uint32_t tokens = src ? program.units[kFine].src : program.units[kFine].dst;
  const std::string_view what = src ? "src_blocks" : "dst_blocks";
  if (units == 1 && num_fine == 0) return check_blocks(ids, num_blocks, !src, what, region_name);
  if (num_fine != 0 && tokens == 0)
    return {Code::kInvalidArgument,
            "the transfer names single tokens, but its copy program moves whole units"};
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
  if (const auto unit = find_twice(coarse, num_blocks, units))
    return {Code::kDuplicateBlock,
            words(*unit / units, ", unit " + std::to_string(*unit % units) + ", is named twice in")};
  std::optional<std::uint32_t> token = find_twice(fine, num_blocks, tokens);
  if (!token && !fine.empty()) token = find_in_units(fine, tokens / units, coarse, num_blocks, units);
  if (token)
    return {Code::kDuplicateBlock,
            words(*token / tokens, ", token " + std::to_string(*token % tokens) + ", is named twice in")};
  return {};
}

Result<std::unique_ptr<Region>> make_region(std::string name,
                                            std::vector<std::pair<std::byte*, std::uint64_t>> spans,
                                            std::uint32_t num_blocks, const CopyProgram& loops,
                                            wire::Bytes layout, MemoryKind kind, int device) {
  if (spans.empty() || spans.size() > wire::kMaxSpans || num_blocks == 0)
    return Status(Code::kInvalidArgument,
                  "a region has 1 to " + std::to_string(wire::kMaxSpans) + " ranges and at least one block");
  if (name.empty() || name.size() > wire::kMaxName || layout.size() > wire::kMaxLayout)
    return Status(Code::kInvalidArgument, "a region's name has 1 to " + std::to_string(wire::kMaxName) +
                                              " bytes, its layout up to " + std::to_string(wire::kMaxLayout));
  std::sort(spans.begin(), spans.end());
  auto region = std::make_unique<Region>();
  LocalRegion& memory = region->memory;
  memory.kind = kind;
  memory.device = device;
  memory.base = spans.front().first;
  for (const auto& [address, nbytes] : spans) {
    const auto offset = static_cast<std::uint64_t>(address - memory.base);
    if (nbytes == 0 ||
        (!memory.spans.empty() && offset < memory.spans.back().offset + memory.spans.back().nbytes))
      return Status(Code::kInvalidArgument, "the ranges of region '" + name + "' are empty or overlap");
    memory.spans.push_back({offset, nbytes});
  }
  if (Status status = check_program(loops); !status.ok()) return status;
  Result<Footprint> footprint = Footprint::create(loops, Side::kDst, num_blocks, memory.spans);
  if (!footprint.ok()) return footprint.status();
  region->footprint = std::move(footprint).value();
  region->name = std::move(name);
  region->num_blocks = num_blocks;
  region->layout = std::move(layout);
  const std::uint64_t extent = memory.spans.back().offset + memory.spans.back().nbytes;
  if (std::optional<PoolSlice> slice;
      kind == MemoryKind::kHost && (slice = PoolMemory::find(memory.base, extent)))
    region->keepalive = std::move(slice->keepalive);
  return region;
}

}  // namespace kvxfer
