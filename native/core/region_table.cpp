#include "core/region_table.h"

#include <algorithm>
#include <unordered_set>

namespace kvxfer {
namespace {

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

}  // namespace kvxfer
