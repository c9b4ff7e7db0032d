// The words of the fence table. Each transfer that a source serves has one, and the source bumps
// it when the transfer's right ends.
//
// A session may take another word while it has fewer than twice as many as are free. A session alone thus
// gets two thirds of them. If several want more than there are, what is left goes to sessions that have few.
// So transfers that are parked at one peer do not keep another peer from being served.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/engine/context.h"
#include "kvxfer/budget.h"

namespace kvxfer {

class FenceSlots {
 public:
  struct Slot {
    std::uint32_t index = 0;
    std::uint64_t generation = 0;  // while the right holds
    Charge charge;  // of the peer, if it asked for the transfer
    SessionKey session = 0;
  };

  // Makes room for all slots, so that giving one back takes no memory.
  explicit FenceSlots(Context& context) : context_(context) { free_.reserve(FenceTable::kNumSlots); }

  bool has_room(SessionKey session) const noexcept {
    const auto found = used_.find(session);
    return (found == used_.end() ? 0 : found->second) < 2 * num_free();
  }
  Slot take(SessionKey session, Charge charge = {}) {  // only if there is room
    ++used_[session];
    std::uint32_t index = next_;
    if (free_.empty())
      ++next_;
    else
      index = free_.back(), free_.pop_back();
    return {index, context_.host.fence_generation(index), std::move(charge), session};
  }
  void give_back(const Slot& slot) {
    context_.host.bump_fence(slot.index);
    free_.push_back(slot.index);
    if (const auto found = used_.find(slot.session); found != used_.end()) --found->second;
  }
  // Slots of its draining transfers still come back.
  void remove_session(SessionKey session) { used_.erase(session); }
  std::size_t num_used() const noexcept { return FenceTable::kNumSlots - num_free(); }

 private:
  std::size_t num_free() const noexcept { return FenceTable::kNumSlots - next_ + free_.size(); }

  Context& context_;
  std::uint32_t next_ = 0;  // this slot, and all behind it, were never taken
  std::vector<std::uint32_t> free_;  // slots that came back; they are taken again first
  std::unordered_map<SessionKey, std::uint32_t> used_;
};

}  // namespace kvxfer
