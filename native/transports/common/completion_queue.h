// How works and rails end: completions on their way to poll's caller, in the order in which they came about.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/transport.h"

namespace kvxfer {

inline Completion done(WorkId work) { return {CompletionKind::kWork, work, 0, Code::kOk, {}}; }
inline Completion failed(WorkId work, Code code, std::string detail = {}) {
  return {CompletionKind::kWork, work, 0, code, std::move(detail)};
}

class CompletionQueue {
 public:
  void push(Completion completion) { entries_.push_back(std::move(completion)); }
  void work(WorkId id, Code code, std::string detail = {}) { push(failed(id, code, std::move(detail))); }
  void rail_up(PeerId peer) { entries_.push_back({CompletionKind::kRailUp, 0, peer, Code::kOk, {}}); }
  void rail_down(PeerId peer, std::string detail) {
    entries_.push_back({CompletionKind::kRailDown, 0, peer, Code::kRailFailed, std::move(detail)});
  }

  // What was to be said about a rail that its owner has given up is not said any more.
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
  std::vector<Completion> entries_;
  std::size_t first_ = 0;
};

}  // namespace kvxfer
