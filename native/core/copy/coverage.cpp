#include "core/copy/coverage.h"

#include <algorithm>
#include <string>

namespace kvxfer {

Coverage::Coverage(std::uint32_t num_blocks, std::uint32_t num_layers, const Needed& needed)
    : num_blocks_(num_blocks), needed_(needed), missing_in_layer_(num_layers) {
  const std::uint64_t num_tokens = std::uint64_t{num_blocks} * needed.block_tokens;
  needed_.end_token = std::min(needed.end_token, num_tokens);
  needed_.first_token = std::min(needed.first_token, needed_.end_token);
  const bool any = needed_.first_token < needed_.end_token;
  const auto first = static_cast<std::uint32_t>(needed_.first_token / needed.block_tokens);
  const auto stop =
      static_cast<std::uint32_t>((needed_.end_token + needed.block_tokens - 1) / needed.block_tokens);
  Layer layer{std::vector<bool>(num_blocks, true), {}, any ? stop - first : 0};
  if (any) std::fill(layer.blocks.begin() + first, layer.blocks.begin() + stop, false);
  slices_.push_back({0, needed.num_heads, std::vector<Layer>(num_layers, layer)});
  std::fill(missing_in_layer_.begin(), missing_in_layer_.end(), layer.missing);
  missing_ = std::uint64_t{layer.missing} * num_layers;
}

Status Coverage::split(const HeadSlice& heads, std::uint32_t units) {
  if (heads.total != needed_.num_heads)
    return {Code::kRefused, "the writer's program knows " + std::to_string(heads.total) +
                                " heads of the region, which has " + std::to_string(needed_.num_heads)};
  if (units == 0 || needed_.block_tokens % units != 0)
    return {Code::kRefused, "the writer's program cuts blocks of " + std::to_string(needed_.block_tokens) +
                                " tokens into " + std::to_string(units) + " units"};
  const std::uint64_t num_slices = slices_.size() + (heads.num == heads.total ? 0 : 2);
  const bool in_parts = in_parts_ || units != 1;
  const std::uint64_t bits_of_block = in_parts ? std::uint64_t{needed_.block_tokens} + 1 : 1;
  if (num_slices * missing_in_layer_.size() * num_blocks_ * bits_of_block > kMaxBits)
    return {Code::kRefused,
            "the blocks that are expected would arrive in too many parts to follow: expect "
            "fewer of them under one tag, or let fewer writers fill them"};
  in_parts_ = in_parts;
  cut(heads.first);
  cut(heads.first + heads.num);
  return {};
}

bool Coverage::mark(std::uint32_t layer, std::uint32_t block, std::uint32_t unit, std::uint32_t units,
                    const HeadSlice& heads) {
  const std::uint32_t num_tokens = needed_.block_tokens / units;
  const bool was_complete = missing_in_layer_[layer] == 0;
  for (Slice& slice : slices_) {
    if (slice.first < heads.first || slice.first >= heads.first + heads.num) continue;
    Layer& of = slice.layers[layer];
    if (of.blocks[block]) continue;  // a transfer that was repeated, or a replica
    if (units != 1 && !fill(of, block, unit * num_tokens, num_tokens)) continue;
    of.blocks[block] = true;
    --of.missing;
    --missing_in_layer_[layer];
    --missing_;
  }
  return !was_complete && missing_in_layer_[layer] == 0;
}

bool Coverage::complete(std::uint32_t block) const {
  return std::all_of(slices_.begin(), slices_.end(), [block](const Slice& slice) {
    return std::all_of(slice.layers.begin(), slice.layers.end(),
                       [block](const Layer& layer) { return layer.blocks[block]; });
  });
}

// Heads from `head` on become a slice of their own.
void Coverage::cut(std::uint32_t head) {
  for (Slice& slice : slices_) {
    if (head <= slice.first || head >= slice.first + slice.num) continue;
    Slice above{head, slice.first + slice.num - head, slice.layers};
    slice.num = head - slice.first;
    for (std::size_t i = 0; i < above.layers.size(); ++i) {
      missing_in_layer_[i] += above.layers[i].missing;
      missing_ += above.layers[i].missing;
    }
    slices_.push_back(std::move(above));
    return;
  }
}

// Takes part of a block; true when all that is needed of it is there.
bool Coverage::fill(Layer& layer, std::uint32_t block, std::uint32_t first_token, std::uint32_t num_tokens) {
  if (layer.tokens.empty()) layer.tokens.resize(std::size_t{num_blocks_} * needed_.block_tokens);
  const auto begin = layer.tokens.begin() + static_cast<std::ptrdiff_t>(block) * needed_.block_tokens;
  std::fill(begin + first_token, begin + first_token + num_tokens, true);
  const std::uint64_t first = std::uint64_t{block} * needed_.block_tokens;
  for (std::uint32_t token = 0; token < needed_.block_tokens; ++token)
    if (!begin[token] && is_needed(first + token)) return false;
  return true;
}

}  // namespace kvxfer
