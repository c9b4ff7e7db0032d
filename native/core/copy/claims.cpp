#include "core/copy/claims.h"

#include <algorithm>

namespace kvxfer {
namespace {

bool overlap(std::uint32_t first, std::uint32_t num, std::uint32_t other_first,
             std::uint32_t other_num) noexcept {
  return first < other_first + other_num && other_first < first + num;
}

}  // namespace

bool Claims::Group::is_of(std::uint32_t first, std::uint32_t num, const HeadSlice& of) const noexcept {
  return first == first_layer && num == num_layers && of.first == heads.first && of.num == heads.num;
}

bool Claims::Group::meets(std::uint32_t first, std::uint32_t num, const HeadSlice& of) const noexcept {
  return overlap(first, num, first_layer, num_layers) && overlap(of.first, of.num, heads.first, heads.num);
}

Status Claims::claim(std::uint32_t first_layer, std::uint32_t num_layers, const HeadSlice& heads,
                     std::span<const Stretch> stretches) {
  Group* own = nullptr;
  for (Group& group : groups_) {
    if (group.is_of(first_layer, num_layers, heads)) own = &group;
    if (!group.meets(first_layer, num_layers, heads)) continue;
    if (std::any_of(stretches.begin(), stretches.end(),
                    [&](const Stretch& stretch) { return is_claimed(group, stretch); }))
      return {Code::kRefused, "another transfer is writing some of these blocks, or has written them"};
  }
  const bool in_parts = std::any_of(stretches.begin(), stretches.end(), [&](const Stretch& stretch) {
    return stretch.num_tokens != block_tokens_;
  });
  std::uint64_t more = own == nullptr ? num_blocks_ : 0;
  if (in_parts && (own == nullptr || own->tokens.empty())) more += std::uint64_t{num_blocks_} * block_tokens_;
  if (num_bits_ + more > kMaxBits || (own == nullptr && groups_.size() == kMaxGroups))
    return {Code::kRefused, "too many writers with different layers and heads write to this expectation"};
  num_bits_ += more;
  if (own == nullptr) {
    own = &groups_.emplace_back(Group{first_layer, num_layers, heads, std::vector<bool>(num_blocks_), {}});
  }
  for (const Stretch& stretch : stretches) put(*own, stretch);
  return {};
}

bool Claims::is_claimed(const Group& group, const Stretch& stretch) const {
  if (group.blocks[stretch.block]) return true;
  if (group.tokens.empty()) return false;
  const auto first =
      group.tokens.begin() + static_cast<std::ptrdiff_t>(stretch.block) * block_tokens_ + stretch.first_token;
  return std::find(first, first + stretch.num_tokens, true) != first + stretch.num_tokens;
}

void Claims::put(Group& group, const Stretch& stretch) {
  if (stretch.num_tokens == block_tokens_) {
    group.blocks[stretch.block] = true;
    return;
  }
  if (group.tokens.empty()) group.tokens.resize(std::size_t{num_blocks_} * block_tokens_);
  const auto first =
      group.tokens.begin() + static_cast<std::ptrdiff_t>(stretch.block) * block_tokens_ + stretch.first_token;
  std::fill(first, first + stretch.num_tokens, true);
}

}  // namespace kvxfer
