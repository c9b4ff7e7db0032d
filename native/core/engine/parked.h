// Writes that wait for a right. An expectation finds them by their tag. A lease finds them by the first
// block that no lease lets them write. A right for other writes looks at none of these.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/engine/transfer_end.h"

namespace kvxfer {

class Parked {
  // In the order in which they came, by tag and by block. The tags' bytes belong to the transfers.
  using ByTag = std::multimap<std::string_view, TransferKey>;
  using ByBlock = std::multimap<std::tuple<SessionKey, RegionId, std::uint32_t>, TransferKey>;

 public:
  // Where one is listed. It is kept with the transfer, which neither moves nor changes its tag meanwhile.
  class Place {
    friend class Parked;
    std::optional<ByTag::iterator> by_tag;
    std::optional<ByBlock::iterator> by_block;
  };

  // Lists it, or lists it anew if it now lacks a right to another block.
  void add(const TransferEnd& transfer, Place& place) {
    const auto by_block = by_block_.emplace(
        std::tuple(transfer.key.first, transfer.region, transfer.lacks_block), transfer.key);
    if (place.by_block) by_block_.erase(*place.by_block);
    place.by_block = by_block;
    if (!place.by_tag) place.by_tag = by_tag_.emplace(tag_of(transfer.notify), transfer.key);
  }
  void remove(Place& place) noexcept {
    if (place.by_tag) by_tag_.erase(*place.by_tag);
    if (place.by_block) by_block_.erase(*place.by_block);
    place = {};
  }

  std::vector<TransferKey> of_tag(const wire::Bytes& tag) const {
    std::vector<TransferKey> keys;
    const auto [first, last] = by_tag_.equal_range(tag_of(tag));
    for (auto each = first; each != last; ++each) keys.push_back(each->second);
    return keys;
  }
  // Those of a session that a lease on some blocks, or on all, may permit, in the order of their numbers.
  std::vector<TransferKey> of_blocks(SessionKey session, RegionId region, bool all_blocks,
                                     std::span<const std::uint32_t> blocks) const {
    std::vector<TransferKey> keys;
    if (by_block_.empty()) return keys;
    const auto append = [&](std::uint32_t first, std::uint32_t last) {
      for (auto each = by_block_.lower_bound({session, region, first}),
                end = by_block_.upper_bound({session, region, last});
           each != end; ++each)
        keys.push_back(each->second);
    };
    if (all_blocks)
      append(0, UINT32_MAX);
    else
      for (const std::uint32_t block : blocks) append(block, block);
    std::sort(keys.begin(), keys.end());
    return keys;
  }

 private:
  static std::string_view tag_of(const wire::Bytes& tag) noexcept {
    return {reinterpret_cast<const char*>(tag.data()), tag.size()};
  }
  ByTag by_tag_;
  ByBlock by_block_;
};

}  // namespace kvxfer
