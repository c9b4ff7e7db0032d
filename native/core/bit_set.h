// Which of some things that are numbered from 0 on (a region's blocks, a transfer's pieces): a bit each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvxfer {

class BitSet {
 public:
  BitSet() = default;
  explicit BitSet(std::size_t num) : words_((num + 63) / 64) {}

  void insert(std::uint32_t id) noexcept { words_[id / 64] |= bit(id); }
  void erase(std::uint32_t id) noexcept { words_[id / 64] &= ~bit(id); }
  bool contains(std::uint32_t id) const noexcept {
    return id / 64 < words_.size() && (words_[id / 64] & bit(id)) != 0;
  }

 private:
  static constexpr std::uint64_t bit(std::uint32_t id) noexcept { return std::uint64_t{1} << id % 64; }
  std::vector<std::uint64_t> words_;
};

}  // namespace kvxfer
