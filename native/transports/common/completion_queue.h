// Completions of works and rails, in the order in which they happened, until poll's caller takes them.
#pragma once

#include <algorithm>
#include <iterator>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/in_room.h"
#include "kvxfer/transport.h"

namespace kvxfer {

inline Completion done(WorkId work) { return {CompletionKind::kWork, work, 0, Code::kOk, {}}; }
inline Completion failed(WorkId work, Code code, std::string detail = {}) {
  return {CompletionKind::kWork, work, 0, code, std::move(detail)};
}

// A rail calls make_room() before it accepts a work or a peer. Then push() can report its end even when there
// is no memory left.
class CompletionQueue {
 public:
  // `num`: how many completions may stand here untaken. Those already here count, and one for each work and
  // two for each peer.
  void make_room(std::size_t num) {
    if (entries_.capacity() - first_ >= num) return;
    entries_.erase(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(first_));
    first_ = 0;
    if (entries_.capacity() < num) entries_.reserve(std::max(num, 2 * entries_.capacity()));
  }

  void push(Completion completion) noexcept { add_in_room(entries_, std::move(completion)); }
  void work(WorkId id, Code code, std::string_view detail = {}) noexcept {
    push({CompletionKind::kWork, id, 0, code, copied(detail)});
  }
  void rail_up(PeerId peer) noexcept { push({CompletionKind::kRailUp, 0, peer, Code::kOk, {}}); }
  void rail_down(PeerId peer, std::string_view detail) noexcept {
    push({CompletionKind::kRailDown, 0, peer, Code::kRailFailed, copied(detail)});
  }

  // Drops what is queued about a rail to `peer`, since the owner has given that rail up.
  void forget_rail(PeerId peer) noexcept {
    const auto about_rail = [peer](const Completion& entry) {
      return entry.kind != CompletionKind::kWork && entry.peer == peer;
    };
    entries_.erase(
        std::remove_if(entries_.begin() + static_cast<std::ptrdiff_t>(first_), entries_.end(), about_rail),
        entries_.end());
  }

  std::size_t take(std::span<Completion> out) noexcept {
    const std::size_t count = std::min(out.size(), entries_.size() - first_);
    for (std::size_t i = 0; i < count; ++i) out[i] = std::move(entries_[first_ + i]);
    first_ += count;
    if (first_ == entries_.size()) {
      entries_.clear();  // keeps its memory for the next ones
      first_ = 0;
    }
    return count;
  }

  bool empty() const noexcept { return first_ == entries_.size(); }
  std::size_t size() const noexcept { return entries_.size() - first_; }

 private:
  // Returns an empty text where there is no memory for the words.
  static std::string copied(std::string_view detail) noexcept {
    try {
      return std::string(detail);
    } catch (const std::bad_alloc&) {
      return {};
    }
  }

  std::vector<Completion> entries_;
  std::size_t first_ = 0;
};

}  // namespace kvxfer
