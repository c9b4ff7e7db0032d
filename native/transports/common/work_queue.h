// Works that a rail has accepted for one peer and not begun.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/transport.h"
#include "transports/common/completion_queue.h"

namespace kvxfer {

class WorkQueue {
 public:
  static constexpr std::size_t kMost = 1024;  // the engine posts `window` at a time

  // False: it is full.
  bool post(const Work& work) {
    if (works_.size() == kMost) return false;
    works_.push_back(work);
    return true;
  }

  // False: the work is not here. It has begun, or was never posted.
  bool withdraw(WorkId id) {
    // Work ids usually ascend in the order of their posts.
    auto found = std::lower_bound(works_.begin(), works_.end(), id,
                                  [](const Work& work, WorkId wanted) { return work.id < wanted; });
    if (found == works_.end() || found->id != id)
      found = std::find_if(works_.begin(), works_.end(), [id](const Work& work) { return work.id == id; });
    if (found == works_.end()) return false;
    works_.erase(found);
    return true;
  }

  bool empty() const noexcept { return works_.empty(); }
  std::size_t size() const noexcept { return works_.size(); }
  const Work& operator[](std::size_t index) const noexcept { return works_[index]; }
  // The first work that can run; size() where none can. Works need no order.
  template <class CanRun>
  std::size_t first(CanRun can_run) const {
    return static_cast<std::size_t>(std::find_if(works_.begin(), works_.end(), can_run) - works_.begin());
  }
  Work take(std::size_t index) {
    Work work = std::move(works_[index]);
    drop(index, 1);
    return work;
  }
  void drop(std::size_t index, std::size_t num) {
    if (index == 0 && num == 1) return works_.pop_front();
    const auto begin = works_.begin() + static_cast<std::ptrdiff_t>(index);
    works_.erase(begin, begin + static_cast<std::ptrdiff_t>(num));
  }

 private:
  std::deque<Work> works_;
};

// Which peer each work of a rail belongs to, until the work ends. So withdrawing a work need not ask every
// peer. A hash table with open addressing that keeps its memory.
class WorkIndex {
 public:
  void insert(WorkId work, PeerId peer) {
    if (2 * (num_ + 1) > slots_.size()) grow();
    std::size_t at = place(work);
    while (slots_[at].peer != 0) at = (at + 1) & mask();
    slots_[at] = {work, peer};
    ++num_;
  }
  // 0: the work is not here.
  PeerId find(WorkId work) const noexcept {
    if (num_ == 0) return 0;
    for (std::size_t at = place(work); slots_[at].peer != 0; at = (at + 1) & mask())
      if (slots_[at].work == work) return slots_[at].peer;
    return 0;
  }
  void erase(WorkId work) noexcept {
    if (num_ == 0) return;
    std::size_t hole = place(work);
    for (; slots_[hole].work != work || slots_[hole].peer == 0; hole = (hole + 1) & mask())
      if (slots_[hole].peer == 0) return;
    // Moves up each entry that a search would no longer reach.
    for (std::size_t at = (hole + 1) & mask(); slots_[at].peer != 0; at = (at + 1) & mask())
      if (((at - place(slots_[at].work)) & mask()) >= ((at - hole) & mask())) {
        slots_[hole] = slots_[at];
        hole = at;
      }
    slots_[hole] = {};
    --num_;
  }
  std::size_t size() const noexcept { return num_; }

 private:
  struct Slot {
    WorkId work = 0;
    PeerId peer = 0;  // 0: free
  };
  std::size_t mask() const noexcept { return slots_.size() - 1; }
  // Fibonacci hashing keeps works with consecutive numbers apart from those that stay long.
  std::size_t place(WorkId work) const noexcept {
    return static_cast<std::size_t>((work * 0x9e3779b97f4a7c15u) >> shift_);
  }
  void grow() {
    if (!slots_.empty()) --shift_;
    std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(std::size_t{1} << (64 - shift_)));
    num_ = 0;
    for (const Slot& slot : old)
      if (slot.peer != 0) insert(slot.work, slot.peer);
  }

  std::vector<Slot> slots_;  // 2^(64 - shift_) of them, at most half full
  unsigned shift_ = 64 - 6;
  std::size_t num_ = 0;
};

}  // namespace kvxfer
