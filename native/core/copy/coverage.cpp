#include "core/copy/coverage.h"

#include <algorithm>
#include <string>

namespace kvxfer {

Coverage::Coverage(std::uint32_t num_blocks, std::uint32_t num_layers, const Needed& needed)
    : num_blocks_(num_blocks), needed_(needed) {
  const std::uint64_t num_tokens = num_needed(0, std::uint64_t{num_blocks} * needed.block_tokens);
  missing_.assign(num_layers, num_tokens * needed.num_heads);
  num_layers_left_ = num_tokens == 0 ? 0 : num_layers;
}

Status Coverage::check(const HeadSlice& heads, std::uint32_t units) const {
  if (heads.total != needed_.num_heads)
    return {Code::kRefused, "the writer's program assumes " + std::to_string(heads.total) +
                                " heads in the region, which has " + std::to_string(needed_.num_heads)};
  if (units == 0 || needed_.block_tokens % units != 0)
    return {Code::kRefused, "the writer's program cuts blocks of " + std::to_string(needed_.block_tokens) +
                                " tokens into " + std::to_string(units) + " units"};
  return {};
}

std::uint64_t Coverage::num_needed(std::uint64_t first, std::uint64_t num) const noexcept {
  const std::uint64_t from = std::max(first, needed_.first_token);
  const std::uint64_t to = std::min(first + num, needed_.end_token);
  return from < to ? to - from : 0;
}

std::uint64_t Coverage::num_cells(const HeadSlice& heads, std::span<const Stretch> stretches) const noexcept {
  std::uint64_t num_tokens = 0;
  for (const Stretch& stretch : stretches)
    num_tokens += num_needed(std::uint64_t{stretch.block} * needed_.block_tokens + stretch.first_token,
                             stretch.num_tokens);
  return num_tokens * heads.num;
}

bool Coverage::add(std::uint32_t layer, std::uint64_t num_cells) noexcept {
  if (num_cells == 0 || (missing_[layer] -= num_cells) != 0) return false;
  --num_layers_left_;
  return true;
}

void Coverage::add_writer(std::uint32_t num_layers, const HeadSlice& heads,
                          std::span<const Stretch> stretches) {
  if (cells_.empty()) cells_.resize(num_blocks_);
  for (const Stretch& stretch : stretches)
    cells_[stretch.block] += num_cells(heads, {&stretch, 1}) * num_layers;
}

bool Coverage::complete(std::uint32_t block) const noexcept {
  const std::uint64_t first = std::uint64_t{block} * needed_.block_tokens;
  const std::uint64_t whole = num_needed(first, needed_.block_tokens) * needed_.num_heads * missing_.size();
  return whole == 0 || complete() || (!cells_.empty() && cells_[block] == whole);
}

}  // namespace kvxfer
