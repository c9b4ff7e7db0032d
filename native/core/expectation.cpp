#include "core/expectation.h"

#include <algorithm>

namespace kvxfer {

Expectation::Expectation(std::shared_ptr<Handle> handle, wire::Bytes tag, RegionId region,
                         std::optional<SessionKey> from, std::vector<std::uint32_t> blocks,
                         std::uint32_t first_layer, std::uint32_t num_layers, const Needed& needed)
    : handle_(std::move(handle)),
      tag_(std::move(tag)),
      region_(region),
      from_(from),
      blocks_(std::move(blocks)),
      first_layer_(first_layer),
      num_layers_(num_layers),
      block_tokens_(needed.block_tokens),
      coverage_(static_cast<std::uint32_t>(blocks_.size()), num_layers, needed),
      claims_(static_cast<std::uint32_t>(blocks_.size()), needed.block_tokens) {
  if (blocks_.size() <= kFewBlocks) return;
  index_ =
      SparseTable<std::uint32_t, 256>(std::size_t{*std::max_element(blocks_.begin(), blocks_.end())} + 1);
  for (std::uint32_t i = 0; i < blocks_.size(); ++i) index_.at(blocks_[i]) = i + 1;
}

std::uint32_t Expectation::place_of(std::uint32_t block) const noexcept {
  const auto num_blocks = static_cast<std::uint32_t>(blocks_.size());
  if (num_blocks > kFewBlocks) {
    const std::uint32_t found = index_.get(block);
    return found == 0 ? num_blocks : found - 1;
  }
  return static_cast<std::uint32_t>(std::find(blocks_.begin(), blocks_.end(), block) - blocks_.begin());
}

bool Expectation::concerns(SessionKey peer, RegionId region) const {
  return region == region_ && (!from_ || *from_ == peer);
}

Status Expectation::covers(const Move& move) const {
  const PieceGrid& grid = move.grid;
  if (grid.first_layer < first_layer_ || grid.first_layer - first_layer_ + grid.num_layers > num_layers_)
    return {Code::kRefused, "its tag is expected with layers " + std::to_string(first_layer_) + " to " +
                                std::to_string(first_layer_ + num_layers_ - 1) + " of the region, not " +
                                std::to_string(grid.first_layer) + " to " +
                                std::to_string(grid.first_layer + grid.num_layers - 1)};
  for (std::uint32_t pair = 0; pair < grid.num_pairs; ++pair) {
    const std::uint32_t block = move.dst_block(pair);
    if (place_of(block) == blocks_.size())
      return {Code::kRefused, "its tag is expected with other blocks: block " + std::to_string(block) +
                                  " is not among the " + std::to_string(blocks_.size()) + " that were named"};
  }
  return {};
}

std::vector<Stretch> Expectation::stretches_of(const Move& move) const {
  const CopyProgram& program = *move.program;
  std::vector<Stretch> stretches;
  stretches.reserve(move.grid.num_pairs);
  for (std::uint32_t pair = 0; pair < move.grid.num_pairs; ++pair) {
    const std::uint32_t units = program.units[move.grid.grain_of(pair)].dst;
    const std::uint32_t num_tokens = block_tokens_ / units;
    stretches.push_back({place_of(move.dst_block(pair)),
                         units == 1 ? 0 : move.dst_ids[pair] % units * num_tokens, num_tokens});
  }
  return stretches;
}

Status Expectation::follow(const Move& move, Writer& writer) {
  const CopyProgram& program = *move.program;
  if (Status status = coverage_.check(program.dst_heads, program.units[kCoarse].dst); !status.ok())
    return status;
  if (move.grid.num_fine != 0)
    if (Status status = coverage_.check(program.dst_heads, program.units[kFine].dst); !status.ok())
      return status;
  const std::vector<Stretch> stretches = stretches_of(move);
  if (Status status =
          claims_.claim(move.grid.first_layer, move.grid.num_layers, program.dst_heads, stretches);
      !status.ok())
    return status;
  writer.num_cells_ = coverage_.num_cells(program.dst_heads, stretches);
  writers_.push_back(writer);
  return {};
}

bool Expectation::arrived(std::uint32_t layer, const Writer& writer) noexcept {
  return coverage_.add(layer - first_layer_, writer.num_cells_);
}

void Expectation::arrived(const Move& move) {
  if (complete()) return;
  coverage_.add_writer(move.grid.num_layers, move.program->dst_heads, stretches_of(move));
}

std::vector<std::uint32_t> Expectation::incomplete_blocks() const {
  std::vector<std::uint32_t> out;
  for (std::uint32_t i = 0; i < blocks_.size(); ++i)
    if (!coverage_.complete(i)) out.push_back(blocks_[i]);
  return out;
}

}  // namespace kvxfer
