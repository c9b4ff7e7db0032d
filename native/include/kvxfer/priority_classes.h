// Priorities of transfers (0..255, 0 goes first), divided into classes. On a rail, the works of one class do
// not wait for those of another.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvxfer {

class PriorityClasses {
 public:
  // As many as lossless networks have queues.
  static constexpr std::size_t kMost = 8;
  static constexpr unsigned kEnd = 256;  // of priorities

  constexpr std::size_t size() const noexcept { return size_; }
  // Adds a class behind the others, for priorities from `first` on. `first` is above the first priority of
  // each class before it; for the first class it is 0. Fewer than kMost classes exist before the call.
  constexpr void add(std::uint8_t first) noexcept {
    if (first != 0) firsts_[size_++] = first;
  }
  constexpr std::size_t of(std::uint8_t priority) const noexcept {
    std::size_t at = 0;
    while (at + 1 < size_ && priority >= firsts_[at + 1]) ++at;
    return at;
  }
  constexpr std::uint8_t first(std::size_t at) const noexcept { return firsts_[at]; }
  // One past the last priority of a class.
  constexpr unsigned end(std::size_t at) const noexcept { return at + 1 < size_ ? firsts_[at + 1] : kEnd; }
  constexpr bool operator==(const PriorityClasses&) const noexcept = default;

 private:
  std::array<std::uint8_t, kMost> firsts_{};
  std::uint8_t size_ = 1;
};

}  // namespace kvxfer
