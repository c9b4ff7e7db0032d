// Room in a stretch of memory, handed out in contiguous slots.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace kvxfer {

struct Slot { std::uint64_t offset = 0, nbytes = 0; };

// The first gap that is large enough. There are few slots at a time, a window of pieces for each rail.
class Slots {
 public:
  // Slots begin and end at multiples of this: a page, and more than any kernel aligns to.
  static constexpr std::uint64_t kAlignment = 4096;

  explicit Slots(std::uint64_t capacity) : capacity_(capacity / kAlignment * kAlignment) {}

  std::uint64_t capacity() const noexcept { return capacity_; }
  std::uint64_t used() const noexcept { return used_; }

  // Where a slot of that many bytes would lie now.
  std::optional<Slot> find(std::uint64_t nbytes) const noexcept {
    if (nbytes == 0 || nbytes > capacity_) return std::nullopt;
    nbytes = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    std::uint64_t free_from = 0;
    for (const auto& [offset, taken] : taken_) {
      if (offset - free_from >= nbytes) break;
      free_from = offset + taken;
    }
    if (capacity_ - free_from < nbytes) return std::nullopt;
    return Slot{free_from, nbytes};
  }
  std::optional<Slot> take(std::uint64_t nbytes) {
    const std::optional<Slot> slot = find(nbytes);
    if (!slot) return std::nullopt;
    taken_.emplace(slot->offset, slot->nbytes);
    used_ += slot->nbytes;
    return slot;
  }
  void give_back(Slot slot) noexcept {
    if (taken_.erase(slot.offset) != 0) used_ -= slot.nbytes;
  }

 private:
  std::uint64_t capacity_, used_ = 0;
  std::map<std::uint64_t, std::uint64_t> taken_;  // offset -> bytes
};

}  // namespace kvxfer
