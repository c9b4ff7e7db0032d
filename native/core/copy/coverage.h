// How much of the blocks that a receiver named has arrived, from any writer. One writer may fill some
// layers, some heads, some tokens of a block, and others the rest.
//
// Arrivals are counted and not marked, since no two writers bring the same part (claims.h). When a layer of
// a writer arrives, that costs one subtraction, however many blocks it covers. A cell is a token of one head
// that is needed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/copy/claims.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/status.h"

namespace kvxfer {

// What must arrive of the named blocks. Tokens are counted over the blocks in the order of their naming.
struct Needed {
  std::uint32_t block_tokens = 1;
  std::uint64_t first_token = 0, end_token = UINT64_MAX;
  std::uint32_t num_heads = 1;
};

class Coverage {
 public:
  Coverage(std::uint32_t num_blocks, std::uint32_t num_layers, const Needed& needed);

  // kRefused if a writer's heads, or the units that it cuts blocks into, do not fit the region's.
  Status check(const HeadSlice& heads, std::uint32_t units) const;
  // Cells that a writer of these heads brings in each of its layers.
  std::uint64_t num_cells(const HeadSlice& heads, std::span<const Stretch> stretches) const noexcept;
  // So many cells of one layer have arrived for good. True if they were the layer's last.
  bool add(std::uint32_t layer, std::uint64_t num_cells) noexcept;
  // All that a writer brings has arrived. complete(block) needs this where other writers bring the rest.
  void add_writer(std::uint32_t num_layers, const HeadSlice& heads, std::span<const Stretch> stretches);

  bool complete() const noexcept { return num_layers_left_ == 0; }
  // True if writers that have brought everything fill the block in all layers.
  bool complete(std::uint32_t block) const noexcept;

 private:
  // How many of the tokens [first, first + num) are needed.
  std::uint64_t num_needed(std::uint64_t first, std::uint64_t num) const noexcept;

  std::uint32_t num_blocks_;
  Needed needed_;
  std::vector<std::uint64_t> missing_;  // cells, by layer
  std::size_t num_layers_left_ = 0;
  // Arrived cells by block, over all layers; empty before the first writer has brought everything.
  std::vector<std::uint64_t> cells_;
};

}  // namespace kvxfer
