#include "core/expectation.h"

#include <algorithm>

namespace kvxfer {

Expectation::Expectation(std::shared_ptr<Handle> handle, wire::Bytes tag, RegionId region,
                         std::optional<SessionKey> from, std::vector<std::uint32_t> blocks,
                         std::uint32_t first_layer, std::uint32_t num_layers)
    : handle_(std::move(handle)),
      tag_(std::move(tag)),
      region_(region),
      from_(from),
      blocks_(std::move(blocks)),
      first_layer_(first_layer),
      num_layers_(num_layers),
      bits_(std::size_t{num_layers} * blocks_.size()),
      missing_in_layer_(num_layers, static_cast<std::uint32_t>(blocks_.size())),
      missing_(std::uint64_t{num_layers} * blocks_.size()) {
  if (!blocks_.empty())
    index_.assign(std::size_t{*std::max_element(blocks_.begin(), blocks_.end())} + 1, kNotNamed);
  for (std::uint32_t i = 0; i < blocks_.size(); ++i) index_[blocks_[i]] = i;
}

bool Expectation::covers(SessionKey peer, RegionId region, std::span<const std::uint32_t> blocks,
                         std::uint32_t first_layer, std::uint32_t num_layers) const {
  if (region != region_ || (from_ && *from_ != peer)) return false;
  if (first_layer < first_layer_ || first_layer - first_layer_ + num_layers > num_layers_) return false;
  for (const std::uint32_t block : blocks)
    if (block >= index_.size() || index_[block] == kNotNamed) return false;
  return true;
}

bool Expectation::arrived(std::uint32_t layer, std::span<const std::uint32_t> blocks) {
  const std::uint32_t row = layer - first_layer_;
  for (const std::uint32_t block : blocks) {
    const std::size_t bit = std::size_t{row} * blocks_.size() + index_[block];
    if (bits_[bit]) continue;  // a transfer that was retried
    bits_[bit] = true;
    --missing_;
    if (--missing_in_layer_[row] == 0) return true;
  }
  return false;
}

std::vector<std::uint32_t> Expectation::incomplete_blocks() const {
  std::vector<std::uint32_t> out;
  for (std::size_t i = 0; i < blocks_.size(); ++i)
    for (std::size_t row = 0; row < num_layers_; ++row)
      if (!bits_[row * blocks_.size() + i]) {
        out.push_back(blocks_[i]);
        break;
      }
  return out;
}

}  // namespace kvxfer
