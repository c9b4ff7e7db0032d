#include "core/region_table.h"

#include <algorithm>
#include <optional>
#include <unordered_set>

#include "core/bit_set.h"

namespace kvxfer {
namespace {

// Ids that were seen. A bit for each that exists, because sorting 64 thousand costs milliseconds where
// bits cost microseconds; unless that is out of proportion to the ids that are looked at: how many
// blocks a region has, and how many units a block, may be a peer's claim.
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

// So few are compared with each other, which takes no memory.
constexpr std::size_t kFewIds = 16;

// The first that stood before.
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

// The first token of a unit that is moved as a whole, too.
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

}  // namespace kvxfer
