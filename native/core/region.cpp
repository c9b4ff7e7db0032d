#include "core/region.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>

#include "core/bit_set.h"
#include "core/system/pool_memory.h"

namespace kvxfer {
namespace {

// May these ids be marked as bits, of all that are possible? Bits cost a nanosecond an id, sorting some ten.
// But a region's number of blocks, and a block's number of units, may be a peer's claim: the memory that a
// check takes grows with the ids that were sent, eight bytes each, as sorting takes.
bool may_mark(std::uint32_t num_blocks, std::uint32_t units, std::size_t num_ids) noexcept {
  return std::uint64_t{num_blocks} * units <= 64 * num_ids;
}

// Digit by digit, so no order of the ids is slower than another.
std::vector<std::uint32_t> sorted(std::vector<std::uint32_t> ids) {
  constexpr std::uint32_t kDigits = 256;
  std::vector<std::uint32_t> out(ids.size());
  for (int shift = 0; shift < 32; shift += 8) {
    std::array<std::size_t, kDigits> place{};
    for (const std::uint32_t id : ids) ++place[id >> shift & 255];
    if (std::find(place.begin(), place.end(), ids.size()) != place.end()) continue;  // one digit in all
    std::exclusive_scan(place.begin(), place.end(), place.begin(), std::size_t{0});
    for (const std::uint32_t id : ids) out[place[id >> shift & 255]++] = id;
    ids.swap(out);
  }
  return ids;
}

std::vector<std::uint32_t> sorted(std::span<const std::uint32_t> ids) {
  return sorted(std::vector<std::uint32_t>(ids.begin(), ids.end()));
}

// So few ids are compared with each other, which takes no memory.
constexpr std::size_t kFewIds = 16;

// An id that occurs twice.
std::optional<std::uint32_t> find_twice(std::span<const std::uint32_t> ids, std::uint32_t num_blocks,
                                        std::uint32_t units) {
  if (ids.size() <= kFewIds) {
    for (std::size_t i = 1; i < ids.size(); ++i)
      if (std::find(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(i), ids[i]) !=
          ids.begin() + static_cast<std::ptrdiff_t>(i))
        return ids[i];
    return std::nullopt;
  }
  if (may_mark(num_blocks, units, ids.size())) {
    BitSet seen(std::size_t{num_blocks} * units);
    for (const std::uint32_t id : ids) {
      if (seen.contains(id)) return id;
      seen.insert(id);
    }
    return std::nullopt;
  }
  const std::vector<std::uint32_t> in_order = sorted(ids);
  const auto twice = std::adjacent_find(in_order.begin(), in_order.end());
  return twice == in_order.end() ? std::nullopt : std::optional(*twice);
}

// A token that belongs to a unit which also moves as a whole.
std::optional<std::uint32_t> find_in_units(std::span<const std::uint32_t> tokens,
                                           std::uint32_t tokens_per_unit,
                                           std::span<const std::uint32_t> units, std::uint32_t num_blocks,
                                           std::uint32_t units_per_block) {
  if (may_mark(num_blocks, units_per_block, units.size())) {
    BitSet whole(std::size_t{num_blocks} * units_per_block);
    for (const std::uint32_t unit : units) whole.insert(unit);
    for (const std::uint32_t token : tokens)
      if (whole.contains(token / tokens_per_unit)) return token;
    return std::nullopt;
  }
  const std::vector<std::uint32_t> whole = sorted(units), parts = sorted(tokens);
  auto unit = whole.begin();
  for (const std::uint32_t token : parts) {
    while (unit != whole.end() && *unit < token / tokens_per_unit) ++unit;
    if (unit != whole.end() && *unit == token / tokens_per_unit) return token;
  }
  return std::nullopt;
}

std::string words_of_block(std::string_view what, std::uint32_t block, const std::string& problem,
                           std::string_view region_name) {
  return std::string(what) + ": block " + std::to_string(block) + problem + " region '" +
         std::string(region_name) + "'";
}

std::string not_one_of(std::uint32_t num_blocks) {
  return " is not one of the " + std::to_string(num_blocks) + " blocks of";
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

wire::Region Region::keys_after(std::uint64_t told) const {
  wire::Region out;
  out.id = memory.id;
  const auto first = std::upper_bound(late_keys.begin(), late_keys.end(), told);
  out.keys.assign(keys.end() - (late_keys.end() - first), keys.end());
  return out;
}

Status check_blocks(std::span<const std::uint32_t> blocks, std::uint32_t num_blocks, bool distinct,
                    std::string_view what, std::string_view region_name) {
  for (const std::uint32_t block : blocks)
    if (block >= num_blocks)
      return {Code::kOutOfRange, words_of_block(what, block, not_one_of(num_blocks), region_name)};
  if (!distinct) return {};
  if (const auto twice = find_twice(blocks, num_blocks, 1))
    return {Code::kDuplicateBlock, words_of_block(what, *twice, " is named twice in", region_name)};
  return {};
}

Status check_range(std::span<const std::uint32_t> ids, std::uint32_t num_fine, const CopyProgram& program,
                   Side side, std::uint32_t num_blocks, std::string_view region_name) {
  const bool src = side == Side::kSrc;
  const std::uint32_t units = src ? program.units[kCoarse].src : program.units[kCoarse].dst;
  const std::uint32_t tokens = src ? program.units[kFine].src : program.units[kFine].dst;
  if (num_fine != 0 && tokens == 0)
    return {Code::kInvalidArgument,
            "the transfer names single tokens, but its copy program moves whole units"};
  const auto coarse = ids.first(ids.size() - num_fine), fine = ids.last(num_fine);
  for (const auto& [part, per_block] : {std::pair(coarse, units), std::pair(fine, tokens)})
    for (const std::uint32_t id : part)
      if (id >= std::uint64_t{num_blocks} * per_block)
        return {Code::kOutOfRange, words_of_block(src ? "src_blocks" : "dst_blocks", id / per_block,
                                                  not_one_of(num_blocks), region_name)};
  return {};
}

Status check_ids(std::span<const std::uint32_t> ids, std::uint32_t num_fine, const CopyProgram& program,
                 Side side, std::uint32_t num_blocks, std::string_view region_name) {
  const bool src = side == Side::kSrc;
  const std::uint32_t units = src ? program.units[kCoarse].src : program.units[kCoarse].dst;
  if (units == 1 && num_fine == 0)
    return check_blocks(ids, num_blocks, !src, src ? "src_blocks" : "dst_blocks", region_name);
  if (Status status = check_range(ids, num_fine, program, side, num_blocks, region_name); !status.ok() || src)
    return status;
  const auto twice = [&](std::uint32_t id, std::uint32_t per_block, const char* what) -> Status {
    return {Code::kDuplicateBlock, words_of_block("dst_blocks", id / per_block,
                                                  std::string(", ") + what + " " +
                                                      std::to_string(id % per_block) + ", is named twice in",
                                                  region_name)};
  };
  const std::uint32_t tokens = program.units[kFine].dst;
  const auto coarse = ids.first(ids.size() - num_fine), fine = ids.last(num_fine);
  if (const auto unit = find_twice(coarse, num_blocks, units)) return twice(*unit, units, "unit");
  std::optional<std::uint32_t> token = find_twice(fine, num_blocks, tokens);
  if (!token && !fine.empty()) token = find_in_units(fine, tokens / units, coarse, num_blocks, units);
  if (token) return twice(*token, tokens, "token");
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
