// Which of a region's blocks: a bit each.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvxfer {

class BlockSet {
 public:
  BlockSet() = default;
  explicit BlockSet(std::uint32_t num_blocks) : words_((std::size_t{num_blocks} + 63) / 64) {}
  static BlockSet all(std::uint32_t num_blocks) {
    BlockSet set(num_blocks);
    set.words_.assign(set.words_.size(), ~std::uint64_t{0});
    return set;
  }

  void insert(std::uint32_t block) noexcept { words_[block / 64] |= bit(block); }
  bool contains(std::uint32_t block) const noexcept {
    return block / 64 < words_.size() && (words_[block / 64] & bit(block)) != 0;
  }
  void insert(const BlockSet& other) {
    if (words_.size() < other.words_.size()) words_.resize(other.words_.size());
    for (std::size_t i = 0; i < other.words_.size(); ++i) words_[i] |= other.words_[i];
  }

 private:
  static constexpr std::uint64_t bit(std::uint32_t block) noexcept { return std::uint64_t{1} << block % 64; }
  std::vector<std::uint64_t> words_;
};

}  // namespace kvxfer
