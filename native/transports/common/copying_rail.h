// A rail whose destination copies with this processor: peers take turns, a slice each, and poll returns after about
// as much.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "core/sliced_copy.h"
#include "transports/common/rail_peers.h"

namespace kvxfer {

template <class Peer>
class CopyingRail : public RailPeers<Peer> {
 public:
  std::size_t poll(std::span<Completion> completions) noexcept override {
    if (this->ready_.empty() && this->active().empty()) {
      on_idle();
      return 0;
    }
    std::size_t count = this->ready_.take(completions);
    std::uint64_t cost = 0;
    while (count < completions.size() && cost < kPollCost) {
      Peer* const peer = this->next_turn();
      if (peer == nullptr) break;
      this->end_turn();
      step(*peer, cost);
      count += this->ready_.take(completions.subspan(count));
    }
    after_round(completions.first(count));
    if (cost == 0) on_idle();
    return count;
  }

 protected:
  using RailPeers<Peer>::RailPeers;

  // One slice of a fetch, from a region that may have gone or changed since the last one. Returns its cost.
  // `broken`: the rail to the peer is to fail with these words, after the work.
  virtual Result<std::uint64_t> copy_slice(Peer& peer, typename Peer::Copy& copy, std::string& broken) = 0;
  virtual Completion compare_fence(Peer& peer, const Work& work) = 0;
  // Of a round that is over, before it is told.
  virtual void after_round(std::span<Completion>) noexcept {}
  // There is nothing to move: time for what will make later copies faster.
  virtual void on_idle() {}

 private:
  // When a poll stops, so that the slice that it began last makes it one slice and a half at most.
  static constexpr std::uint64_t kPollCost = SlicedCopy::kSliceCost / 2;

  void step(Peer& peer, std::uint64_t& cost) {
    if (!peer.copy.has_value()) {
      Work work = peer.queue.take(this->first_that_runs(peer));
      if (work.kind != WorkKind::kFetch)
        return this->end_work(work.kind == WorkKind::kCheckFence
                                  ? compare_fence(peer, work)
                                  : failed(work.id, Code::kUnsupported,
                                           this->words("the destination fetches; nothing is sent")));
      const SlicedCopy slices(*work.move, work.piece);
      const std::uint64_t src_end = piece_end(*work.move, work.piece, Side::kSrc);
      typename Peer::Copy copy{std::move(work), slices, src_end};
      if (!advance(peer, copy, cost)) peer.copy = std::move(copy);  // a piece of the engine's is one slice
      return;
    }
    if (advance(peer, *peer.copy, cost)) peer.copy.reset();
  }

  // Copies a slice. True where that, or something else, was the work's end.
  bool advance(Peer& peer, typename Peer::Copy& copy, std::uint64_t& cost) {
    std::string broken;
    const Result<std::uint64_t> slice = copy_slice(peer, copy, broken);
    if (slice.ok()) cost += slice.value();
    if (slice.ok() && !copy.slices.done()) return false;
    const WorkId id = copy.work.id;
    this->end_work(slice.ok() ? done(id)
                              : failed(id, slice.status().code(), this->words(slice.status().message())));
    if (broken.empty()) return true;
    peer.copy.reset();  // it has ended
    this->fail(peer, broken);
    return true;
  }
};

}  // namespace kvxfer
