// A rail whose destination copies with this processor: peers take turns, a slice each, and poll returns after about
// as much.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <span>
#include <string>
#include <utility>

#include "core/copy/sliced_copy.h"
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
      try {
        step(*peer, cost);
      } catch (const std::bad_alloc&) {
        this->fail(*peer, this->kNoMemory);
      }
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
      // It stays the peer's until it has ended, as what fails it takes it from there.
      const std::size_t at = this->first_that_runs(peer);
      const Work& next = peer.queue[at];
      if (next.kind != WorkKind::kFetch) {
        Completion completion = next.kind == WorkKind::kCheckFence
                                    ? compare_fence(peer, next)
                                    : failed(next.id, Code::kUnsupported,
                                             this->words("the destination fetches; nothing is sent"));
        peer.queue.drop(at, 1);
        return this->end_work(std::move(completion));
      }
      const SlicedCopy slices(*next.move, next.piece);
      const std::uint64_t src_end = piece_end(*next.move, next.piece, Side::kSrc);
      peer.copy.emplace(peer.queue.take(at), slices, src_end);
    }
    advance(peer, *peer.copy, cost);
  }

  // Copies a slice, which may be the work's end.
  void advance(Peer& peer, typename Peer::Copy& copy, std::uint64_t& cost) {
    std::string broken;
    const Result<std::uint64_t> slice = copy_slice(peer, copy, broken);
    if (slice.ok()) cost += slice.value();
    if (slice.ok() && !copy.slices.done()) return;
    Completion completion =
        slice.ok() ? done(copy.work.id)
                   : failed(copy.work.id, slice.status().code(), this->words(slice.status().message()));
    peer.copy.reset();
    this->end_work(std::move(completion));
    if (!broken.empty()) this->fail(peer, broken);
  }
};

}  // namespace kvxfer
