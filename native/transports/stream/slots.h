// A stretch of memory, handed out in contiguous slots and shared among holders.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>

namespace kvxfer {

// All rails of a session share one holder.
using SlotHolder = std::shared_ptr<const void>;

struct Slot {
  std::uint64_t offset = 0, nbytes = 0;
  SlotHolder holder;
};

// Takes the first gap that is large enough. There are few slots at a time: a window of pieces for each rail.
//
// A holder that gives nothing back must leave room for the others. So no slot is larger than a quarter of the
// whole, and beyond its first slot a holder may take at most a third of what it leaves free. One holder alone
// gets a quarter; each further holder that gives nothing back gets three quarters of what the one before it
// got. With slots of a 64th of the whole there is room for another holder until 14 of them give nothing back;
// fixed quarters would end with four.
class Slots {
 public:
  // Slots begin and end at multiples of this: a page, and more than any kernel aligns to.
  static constexpr std::uint64_t kAlignment = 4096;

  explicit Slots(std::uint64_t capacity) : capacity_(capacity / kAlignment * kAlignment) {}

  std::uint64_t capacity() const noexcept { return capacity_; }
  static constexpr std::uint64_t most_nbytes(std::uint64_t capacity) noexcept { return capacity / 4; }
  std::uint64_t used() const noexcept { return used_; }

  // Whether the holder's share allows another slot, if there is a gap.
  bool may_take(const SlotHolder& holder, std::uint64_t nbytes) const noexcept {
    if (nbytes == 0 || nbytes > most_nbytes(capacity_)) return false;
    const auto held = held_.find(holder);
    const std::uint64_t with_it = used_ + aligned(nbytes);
    return held == held_.end() ||
           (with_it < capacity_ && held->second + aligned(nbytes) <= (capacity_ - with_it) / 3);
  }
  bool has_gap(std::uint64_t nbytes) const noexcept { return gap(aligned(nbytes)).has_value(); }

  std::optional<Slot> take(const SlotHolder& holder, std::uint64_t nbytes) {
    if (!may_take(holder, nbytes)) return std::nullopt;
    nbytes = aligned(nbytes);
    const std::optional<std::uint64_t> offset = gap(nbytes);
    if (!offset) return std::nullopt;
    taken_.emplace(*offset, nbytes);
    used_ += nbytes;
    held_[holder] += nbytes;
    return Slot{*offset, nbytes, holder};
  }
  void give_back(const Slot& slot) noexcept {
    if (taken_.erase(slot.offset) == 0) return;
    used_ -= slot.nbytes;
    const auto held = held_.find(slot.holder);
    if ((held->second -= slot.nbytes) == 0) held_.erase(held);
  }

 private:
  static std::uint64_t aligned(std::uint64_t nbytes) noexcept {
    return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  std::optional<std::uint64_t> gap(std::uint64_t nbytes) const noexcept {
    std::uint64_t free_from = 0;
    for (const auto& [offset, taken] : taken_) {
      if (offset - free_from >= nbytes) break;
      free_from = offset + taken;
    }
    if (capacity_ - free_from < nbytes) return std::nullopt;
    return free_from;
  }

  std::uint64_t capacity_, used_ = 0;
  std::map<std::uint64_t, std::uint64_t> taken_;  // offset -> bytes
  std::map<SlotHolder, std::uint64_t> held_;      // holders without a slot have no entry
};

}  // namespace kvxfer
