// Records which parts of the blocks that a receiver named are brought, or were brought, by some writer. No
// second writer may bring the same part: its source could lose its right while its bytes land, and spoil
// good bytes for ever.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvxfer/copy_program.h"
#include "kvxfer/status.h"

namespace kvxfer {

// Some tokens of a block. The block is named by its place among the named ones.
struct Stretch { std::uint32_t block, first_token, num_tokens; };

class Claims {
 public:
  // Most groups of writers of one expectation that differ in their layers or heads, and the most memory
  // that they may make us hold: 128 MiB.
  static constexpr std::size_t kMaxGroups = 4096;
  static constexpr std::uint64_t kMaxBits = std::uint64_t{1} << 30;

  Claims(std::uint32_t num_blocks, std::uint32_t block_tokens)
      : num_blocks_(num_blocks), block_tokens_(block_tokens) {}

  // Claims these tokens in these layers and heads. kRefused, and nothing changes, if another writer has
  // some of them. Costs a look for each stretch and each group of writers with a layer and a head in
  // common.
  Status claim(std::uint32_t first_layer, std::uint32_t num_layers, const HeadSlice& heads,
               std::span<const Stretch> stretches);

 private:
  struct Group {
    std::uint32_t first_layer, num_layers;
    HeadSlice heads;
    std::vector<bool> blocks;  // that are claimed whole
    std::vector<bool> tokens;  // [num_blocks, block_tokens]; empty until a block is claimed in part

    bool is_of(std::uint32_t first, std::uint32_t num, const HeadSlice& of) const noexcept;
    bool meets(std::uint32_t first, std::uint32_t num, const HeadSlice& of) const noexcept;
  };

  bool is_claimed(const Group& group, const Stretch& stretch) const;
  void put(Group& group, const Stretch& stretch);

  std::uint32_t num_blocks_, block_tokens_;
  std::vector<Group> groups_;
  std::uint64_t num_bits_ = 0;  // of all groups
};

}  // namespace kvxfer
