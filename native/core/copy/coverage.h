// Which parts of the blocks that a receiver named have arrived, whoever brought them: one writer
// may fill some layers, some heads, some tokens of a block, and others the rest.
#pragma once

#include <cstdint>
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
  // One bit for each layer and block, and where a block comes in parts one for each of its tokens:
  // so much and no more, however finely writers divide the heads. 128 MiB.
  static constexpr std::uint64_t kMaxBits = std::uint64_t{1} << 30;

  Coverage(std::uint32_t num_blocks, std::uint32_t num_layers, const Needed& needed);

  // Makes room for a writer that fills these heads, and blocks in so many units. kRefused
  // where its heads or units are not the region's, kRefused where kMaxBits would not suffice.
  Status split(const HeadSlice& heads, std::uint32_t units);

  // Unit `unit` of `units` of a block is in, in one layer and the heads of a writer that split()
  // knows, for good. True when that was the layer's last.
  bool mark(std::uint32_t layer, std::uint32_t block, std::uint32_t unit, std::uint32_t units,
            const HeadSlice& heads);

  bool complete() const noexcept { return missing_ == 0; }
  bool complete(std::uint32_t block) const;  // in all layers

 private:
  // Of one layer, for heads that always arrived together so far.
  struct Layer {
    std::vector<bool> blocks;    // all there, or not needed
    std::vector<bool> tokens;    // [num_blocks, block_tokens]; empty until a block comes in parts
    std::uint32_t missing = 0;   // blocks
  };
  struct Slice {
    std::uint32_t first, num;
    std::vector<Layer> layers;
  };

  void cut(std::uint32_t head);
  bool fill(Layer& layer, std::uint32_t block, std::uint32_t first_token, std::uint32_t num_tokens);
  bool is_needed(std::uint64_t token) const noexcept {
    return token >= needed_.first_token && token < needed_.end_token;
  }

  std::uint32_t num_blocks_;
  Needed needed_;
  std::vector<Slice> slices_;
  std::vector<std::uint64_t> missing_in_layer_;  // blocks, over all slices
  std::uint64_t missing_ = 0;
  bool in_parts_ = false;  // some writer brings less than whole blocks
};

}  // namespace kvxfer
