// How much of the blocks that a receiver named has arrived, whoever brought it: one writer may fill some layers, some
// heads, some tokens of a block, and others the rest.
//
// It is counted and not marked, since no two writers bring the same (claims.h): a layer of a writer that arrives costs
// one subtraction, however many blocks it is of. A cell is a token of one head that is needed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/copy/claims.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/status.h"

namespace kvxfer {

// What of the named blocks has to arrive. Tokens are counted over the blocks as they were named.
struct Needed {
  std::uint32_t block_tokens = 1;
  std::uint64_t first_token = 0, end_token = UINT64_MAX;
  std::uint32_t num_heads = 1;
};

class Coverage {
 public:
  Coverage(std::uint32_t num_blocks, std::uint32_t num_layers, const Needed& needed);

  // kRefused where a writer's heads, or the units that it cuts blocks into, are not the region's.
  Status check(const HeadSlice& heads, std::uint32_t units) const;
  // Cells that a writer of these heads brings in each of its layers.
  std::uint64_t num_cells(const HeadSlice& heads, std::span<const Stretch> stretches) const noexcept;
  // So many of one layer are in, for good. True when they were the layer's last.
  bool add(std::uint32_t layer, std::uint64_t num_cells) noexcept;
  // All that a writer brings is in: told for complete(block), where others bring the rest.
  void add_writer(std::uint32_t num_layers, const HeadSlice& heads, std::span<const Stretch> stretches);

  bool complete() const noexcept { return num_layers_left_ == 0; }
  // In all layers, by writers of which all is in.
  bool complete(std::uint32_t block) const noexcept;

 private:
  // How many of the tokens [first, first + num) are needed.
  std::uint64_t num_needed(std::uint64_t first, std::uint64_t num) const noexcept;

  std::uint32_t num_blocks_;
  Needed needed_;
  std::vector<std::uint64_t> missing_;  // cells, by layer
  std::size_t num_layers_left_ = 0;
  std::vector<std::uint64_t> cells_;  // in, by block, over all layers; empty before the first writer is
};

}  // namespace kvxfer
