// Works that a rail has accepted for one peer and not begun.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <span>
#include <string>
#include <utility>

#include "kvxfer/transport.h"
#include "transports/common/completion_queue.h"

namespace kvxfer {

class WorkQueue {
 public:
  static constexpr std::size_t kMost = 1024;  // the engine posts `window` at a time

  PostResult post(std::span<const Work> batch) {
    const std::size_t accepted = std::min(batch.size(), kMost - works_.size());
    // One by one: an insertion into an empty deque takes memory anew each time.
    for (const Work& work : batch.first(accepted)) works_.push_back(work);
    return {accepted, accepted == batch.size() ? Code::kOk : Code::kAgain};
  }

  // False where the work is not here: it has begun, or was never posted.
  bool withdraw(WorkId id) {
    const auto found =
        std::find_if(works_.begin(), works_.end(), [id](const Work& work) { return work.id == id; });
    if (found == works_.end()) return false;
    works_.erase(found);
    return true;
  }

  // All of them, unbegun.
  void end(Code code, const std::string& detail, CompletionQueue& completions) {
    for (const Work& work : works_) completions.work(work.id, code, detail);
    works_.clear();
  }

  bool empty() const noexcept { return works_.empty(); }
  std::size_t size() const noexcept { return works_.size(); }
  const Work& front() const noexcept { return works_.front(); }
  const Work& operator[](std::size_t index) const noexcept { return works_[index]; }
  Work take() {
    Work work = std::move(works_.front());
    works_.pop_front();
    return work;
  }
  void drop(std::size_t num) {
    works_.erase(works_.begin(), works_.begin() + static_cast<std::ptrdiff_t>(num));
  }

  // Is there one that can run?
  template <class CanRun>
  bool has(CanRun can_run) const {
    return std::any_of(works_.begin(), works_.end(), can_run);
  }
  // The same, and the first of them is the front then: no order was promised.
  template <class CanRun>
  bool bring_forward(CanRun can_run) {
    const auto next = std::find_if(works_.begin(), works_.end(), can_run);
    if (next == works_.end()) return false;
    if (next != works_.begin()) std::rotate(works_.begin(), next, next + 1);
    return true;
  }

 private:
  std::deque<Work> works_;
};

// Whose turn it is: the first entry behind `last`, around the end, that has something to do; else the end.
// Ordered: a map by peers' numbers, or a set of them.
template <class Ordered, class HasWork>
typename Ordered::iterator next_in_turn(Ordered& entries, PeerId last, HasWork has_work) {
  auto at = entries.upper_bound(last);
  for (std::size_t i = 0; i < entries.size(); ++i, ++at) {
    if (at == entries.end()) at = entries.begin();
    if (has_work(*at)) return at;
  }
  return entries.end();
}

}  // namespace kvxfer
