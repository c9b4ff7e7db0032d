// The words of the fence table: each transfer that a source serves has one, which is bumped when its right ends.
#pragma once

#include <cstdint>
#include <vector>

#include "core/engine/context.h"
#include "kvxfer/budget.h"

namespace kvxfer {

class FenceSlots {
 public:
  struct Slot {
    std::uint32_t index = 0;
    std::uint64_t generation = 0;  // while the right holds
    Charge charge;  // of a peer that asked for the transfer
  };

  explicit FenceSlots(Context& context) : context_(context) {
    free_.reserve(FenceTable::kNumSlots);
    for (std::uint32_t slot = FenceTable::kNumSlots; slot-- > 0;) free_.push_back(slot);
  }

  bool empty() const noexcept { return free_.empty(); }
  Slot take(Charge charge = {}) {
    const std::uint32_t index = free_.back();
    free_.pop_back();
    return {index, context_.host.fence_generation(index), std::move(charge)};
  }
  void give_back(const Slot& slot) {
    context_.host.bump_fence(slot.index);
    free_.push_back(slot.index);
  }
  std::size_t num_used() const noexcept { return FenceTable::kNumSlots - free_.size(); }

 private:
  Context& context_;
  std::vector<std::uint32_t> free_;
};

}  // namespace kvxfer
