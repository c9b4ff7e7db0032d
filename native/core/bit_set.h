// A set of things that are numbered from 0 on (a region's blocks, a transfer's pieces): one bit each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvxfer {

class BitSet {
 public:
  BitSet() = default;
  explicit BitSet(std::size_t num) : more_(num > 64 ? (num - 1) / 64 : 0) {}

  void insert(std::uint32_t id) noexcept { word(id) |= bit(id); }
  void erase(std::uint32_t id) noexcept { word(id) &= ~bit(id); }
  bool contains(std::uint32_t id) const noexcept {
    if (id < 64) return (first_ & bit(id)) != 0;
    return id / 64 <= more_.size() && (more_[id / 64 - 1] & bit(id)) != 0;
  }

 private:
  std::uint64_t& word(std::uint32_t id) noexcept { return id < 64 ? first_ : more_[id / 64 - 1]; }
  static constexpr std::uint64_t bit(std::uint32_t id) noexcept { return std::uint64_t{1} << id % 64; }
  std::uint64_t first_ = 0;  // the first bits lie here, as most transfers have few pieces
  std::vector<std::uint64_t> more_;
};

}  // namespace kvxfer
