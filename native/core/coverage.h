// Which parts of the blocks that a receiver named have arrived, whoever brought them: one writer
// may fill some layers, some heads, some tokens of a block, and others the rest.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

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

  // Makes room for a writer that fills these heads, and blocks in so many units. kLayoutMismatch
  // where its heads or units are not the region's.
  Status split(const HeadSlice& heads, std::uint32_t units);

  // Unit `unit` of `units` of a block is in, in one layer and the heads of a writer that split()
  // knows, for good. True when that was the layer's last.
  bool mark(std::uint32_t layer, std::uint32_t block, std::uint32_t unit, std::uint32_t units,
            const HeadSlice& heads);

  bool complete() const noexcept { return missing_ == 0; }
  bool complete(std::uint32_t block) const;  // in all layers

 private:
  // Heads that always arrived together so far.
  struct Slice {
    std::uint32_t first, num;
    std::vector<bool> bits;  // [num_layers, num_blocks, units_]
  };

  void cut(std::uint32_t head);
  void refine(std::uint32_t units);
  void count();
  bool needs(std::uint32_t block, std::uint32_t unit) const;

  std::uint32_t num_blocks_, num_layers_;
  Needed needed_;
  std::uint32_t units_ = 1;  // that a block's bits are kept in
  std::vector<Slice> slices_;
  std::vector<std::uint64_t> missing_in_layer_;  // bits
  std::uint64_t missing_ = 0;
};

}  // namespace kvxfer
