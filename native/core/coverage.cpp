#include "core/coverage.h"

#include <algorithm>
#include <numeric>
#include <string>

namespace kvxfer {

Coverage::Coverage(std::uint32_t num_blocks, std::uint32_t num_layers, const Needed& needed)
    : num_blocks_(num_blocks), num_layers_(num_layers), needed_(needed), missing_in_layer_(num_layers) {
  slices_.push_back({0, needed.num_heads, std::vector<bool>(std::size_t{num_layers} * num_blocks)});
  count();
}

Status Coverage::split(const HeadSlice& heads, std::uint32_t units) {
  if (heads.total != needed_.num_heads)
    return {Code::kLayoutMismatch, "the writer's program knows " + std::to_string(heads.total) +
                                       " heads of the region, which has " +
                                       std::to_string(needed_.num_heads)};
  if (units == 0 || needed_.block_tokens % units != 0)
    return {Code::kLayoutMismatch, "the writer's program cuts blocks of " +
                                       std::to_string(needed_.block_tokens) + " tokens into " +
                                       std::to_string(units) + " units"};
  const std::size_t num_slices = slices_.size();
  const std::uint32_t had = units_;
  cut(heads.first);
  cut(heads.first + heads.num);
  refine(std::lcm(units_, units));
  if (slices_.size() != num_slices || units_ != had) count();
  return {};
}

bool Coverage::mark(std::uint32_t layer, std::uint32_t block, std::uint32_t unit, std::uint32_t units,
                    const HeadSlice& heads) {
  const std::uint32_t each = units_ / units;
  const std::size_t first = (std::size_t{layer} * num_blocks_ + block) * units_ + std::size_t{unit} * each;
  const bool was_complete = missing_in_layer_[layer] == 0;
  for (Slice& slice : slices_) {
    if (slice.first < heads.first || slice.first >= heads.first + heads.num) continue;
    for (std::uint32_t i = 0; i < each; ++i) {
      if (slice.bits[first + i]) continue;  // a transfer that was repeated, or a replica
      slice.bits[first + i] = true;
      if (!needs(block, unit * each + i)) continue;
      --missing_;
      --missing_in_layer_[layer];
    }
  }
  return !was_complete && missing_in_layer_[layer] == 0;
}

bool Coverage::complete(std::uint32_t block) const {
  for (const Slice& slice : slices_)
    for (std::size_t layer = 0; layer < num_layers_; ++layer)
      for (std::uint32_t unit = 0; unit < units_; ++unit)
        if (!slice.bits[(layer * num_blocks_ + block) * units_ + unit] && needs(block, unit)) return false;
  return true;
}

void Coverage::cut(std::uint32_t head) {
  for (std::size_t i = 0; i < slices_.size(); ++i) {
    Slice& slice = slices_[i];
    if (head <= slice.first || head >= slice.first + slice.num) continue;
    Slice above{head, slice.first + slice.num - head, slice.bits};
    slice.num = head - slice.first;
    slices_.push_back(std::move(above));
    return;
  }
}

void Coverage::refine(std::uint32_t units) {
  if (units == units_) return;
  const std::uint32_t each = units / units_;
  for (Slice& slice : slices_) {
    std::vector<bool> finer(slice.bits.size() * each);
    for (std::size_t i = 0; i < finer.size(); ++i) finer[i] = slice.bits[i / each];
    slice.bits = std::move(finer);
  }
  units_ = units;
}

void Coverage::count() {
  std::fill(missing_in_layer_.begin(), missing_in_layer_.end(), 0);
  for (const Slice& slice : slices_) {
    std::size_t bit = 0;
    for (std::uint32_t layer = 0; layer < num_layers_; ++layer)
      for (std::uint32_t block = 0; block < num_blocks_; ++block)
        for (std::uint32_t unit = 0; unit < units_; ++unit, ++bit)
          missing_in_layer_[layer] += !slice.bits[bit] && needs(block, unit) ? 1 : 0;
  }
  missing_ = std::accumulate(missing_in_layer_.begin(), missing_in_layer_.end(), std::uint64_t{0});
}

bool Coverage::needs(std::uint32_t block, std::uint32_t unit) const {
  const std::uint64_t tokens = needed_.block_tokens / units_;
  const std::uint64_t first = std::uint64_t{block} * needed_.block_tokens + unit * tokens;
  return first < needed_.end_token && first + tokens > needed_.first_token;
}

}  // namespace kvxfer
