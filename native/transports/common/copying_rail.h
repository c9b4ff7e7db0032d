// A rail whose destination copies with this processor. Peers take turns, one slice each, and poll returns
// after about one slice. Where the agent has threads that copy (core/copy/copy_workers.h), a large enough
// work is shared among them and the driving thread; the driving thread copies all other works alone.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/copy/copy_workers.h"
#include "core/copy/sliced_copy.h"
#include "transports/common/rail_peers.h"

namespace kvxfer {

template <class Peer>
class CopyingRail : public RailPeers<Peer> {
 public:
  ~CopyingRail() override {
    for (const auto& flight : flights_) workers_->stop(*flight);
    for (const auto& flight : flights_) workers_->await(*flight);
  }

  std::size_t poll(std::span<Completion> completions) noexcept override {
    this->tell_some();
    if (this->ready_.empty() && this->active().empty() && flights_.empty()) {
      on_idle();
      return 0;
    }
    land();
    std::size_t count = this->ready_.take(completions);
    std::uint64_t cost = 0;
    while (count < completions.size() && cost < kPollCost) {
      Peer* const peer = this->next_turn();
      if (peer == nullptr && !copy_slice_here(cost)) break;
      if (peer != nullptr) {
        this->end_turn();
        try {
          step(*peer, cost);
        } catch (const std::bad_alloc&) {
          this->fail(*peer, this->kNoMemory);
        }
      }
      land();
      count += this->ready_.take(completions.subspan(count));
    }
    after_round(completions.first(count));
    if (cost == 0) on_idle();
    return count;
  }

  // While other threads are about to finish their slices, the driving thread stays awake.
  bool busy() const noexcept override {
    if (RailPeers<Peer>::busy()) return true;
    return !flights_.empty() && (workers_->has_slices() || any_landed() || Clock::now() < awake_until_);
  }
  bool wants_poll() const noexcept override { return !flights_.empty() || RailPeers<Peer>::wants_poll(); }
  bool arm() noexcept override {
    if (flights_.empty()) return true;
    workers_->announce_next();
    return !any_landed();
  }

 protected:
  // A work that several threads copy. It owns all that it reads and writes, so its peer may go meanwhile.
  struct Flight : SharedCopy {
    Flight(Work its, PeerId of) noexcept : SharedCopy(*its.move, its.piece), work(std::move(its)), peer(of) {}
    const Work work;
    const PeerId peer;
    Code stopped = Code::kOk;  // its result if it was stopped
    std::string why;
  };

  // `workers`: null if the driving thread copies alone.
  explicit CopyingRail(Reactor& reactor, std::shared_ptr<CopyWorkers> workers = nullptr)
      : RailPeers<Peer>(reactor), workers_(std::move(workers)) {}

  // Copies one slice of a fetch and returns its cost. The region may have gone or changed since the last
  // slice. Words in `broken` make the rail to the peer fail, after the work has ended.
  virtual Result<std::uint64_t> copy_slice(Peer& peer, typename Peer::Copy& copy, std::string& broken) = 0;
  // Whether the source's right still holds, after all bytes of a fetch were read.
  virtual Status compare_fence(Peer& peer, const Fence& fence) = 0;
  // The same work, prepared for several threads. Null: it cannot be begun, and copy_slice says why. `src_end`
  // as in Peer::Copy.
  virtual std::unique_ptr<Flight> share(Peer&, const Work&, [[maybe_unused]] std::uint64_t src_end) {
    return nullptr;
  }
  // The result of a flight that has landed and was not stopped; `broken` as above.
  virtual Status result_of(Peer&, const Flight& flight, std::string&) { return flight.status(); }
  // Called at the end of a round, before its completions are handed out.
  virtual void after_round(std::span<Completion>) noexcept {}
  // Called when there is nothing to move, to prepare what makes later copies faster.
  virtual void on_idle() {}

  const std::shared_ptr<CopyWorkers> workers_;

 private:
  using Clock = std::chrono::steady_clock;

  // A poll begins no slice beyond this cost, so with its last slice it takes one slice and a half at most.
  static constexpr std::uint64_t kPollCost = SlicedCopy::kSliceCost / 2;
  // How long a thread may still need for its last slice, once nothing is left to take: as long as one slice
  // takes.
  static constexpr std::chrono::microseconds kAwake{50};

  void step(Peer& peer, std::uint64_t& cost) {
    if (!peer.copy.has_value()) {
      // The work stays in the peer's queue until it has ended, because fail() ends the works that it finds
      // there.
      const std::size_t at = this->first_that_runs(peer);
      const Work& next = peer.queue[at];
      if (next.kind != WorkKind::kFetch) {
        Completion completion = failed(next.id, Code::kUnsupported,
                                       this->words("this rail cannot send: the destination fetches"));
        peer.queue.drop(at, 1);
        return this->end_work(std::move(completion));
      }
      const SlicedCopy slices(*next.move, next.piece);
      const bool shares = workers_ != nullptr && workers_->is_worth(slices.cost(), peer.queue.size());
      if (shares && !workers_->has_room() && copy_slice_here(cost)) return;
      const std::uint64_t src_end = piece_end(*next.move, next.piece, Side::kSrc);
      if (shares && launch(peer, at, src_end)) return;
      peer.copy.emplace(peer.queue.take(at), slices, src_end);
    }
    advance(peer, *peer.copy, cost);
  }

  // Copies one slice, and ends the work if it was the last.
  void advance(Peer& peer, typename Peer::Copy& copy, std::uint64_t& cost) {
    std::string broken;
    const Result<std::uint64_t> slice = copy_slice(peer, copy, broken);
    if (slice.ok()) cost += slice.value();
    if (slice.ok() && !copy.slices.done()) return;
    const Status status = slice.ok() ? compare_fence(peer, copy.work.move->fence) : slice.status();
    Completion completion =
        status.ok() ? done(copy.work.id) : failed(copy.work.id, status.code(), this->words(status.message()));
    peer.copy.reset();
    this->end_work(std::move(completion));
    if (!broken.empty()) this->fail(peer, broken);
  }

  // ---- works that threads share ----

  bool launch(Peer& peer, std::size_t at, std::uint64_t src_end) {
    flights_.reserve(flights_.size() + 1);
    std::unique_ptr<Flight> flight = share(peer, peer.queue[at], src_end);
    if (flight == nullptr) return false;
    workers_->add(*flight);
    flights_.push_back(std::move(flight));
    peer.queue.drop(at, 1);
    return true;
  }

  // Copies one slice of a shared work. False: other threads have taken all slices.
  bool copy_slice_here(std::uint64_t& cost) noexcept {
    if (flights_.empty()) return false;
    const std::uint64_t copied = workers_->copy_slice_here();
    cost += copied;
    if (copied != 0) awake_until_ = Clock::now() + kAwake;
    return copied != 0;
  }

  bool any_landed() const noexcept {
    return std::any_of(flights_.begin(), flights_.end(), [](const auto& flight) { return flight->landed(); });
  }

  void land() noexcept {
    for (;;) {
      const auto found =
          std::find_if(flights_.begin(), flights_.end(), [](const auto& flight) { return flight->landed(); });
      if (found == flights_.end()) return;
      const std::unique_ptr<Flight> landed = std::move(*found);
      flights_.erase(found);
      end(*landed);
    }
  }

  void end(const Flight& flight) noexcept {
    if (flight.stopped != Code::kOk) return this->end_work(flight.work.id, flight.stopped, flight.why);
    Peer& peer = *this->find(flight.peer);
    if (flight.starved()) {
      this->end_work(flight.work.id, Code::kRailFailed, this->kNoMemory);
      return this->fail(peer, this->kNoMemory);
    }
    std::string broken;
    Code code = Code::kOk;
    try {
      Status status = result_of(peer, flight, broken);
      if (status.ok()) status = compare_fence(peer, flight.work.move->fence);
      code = status.code();
      this->end_work(status.ok() ? done(flight.work.id)
                                 : failed(flight.work.id, code, this->words(status.message())));
    } catch (const std::bad_alloc&) {
      this->end_work(flight.work.id, code == Code::kOk ? Code::kRailFailed : code);
      return this->fail(peer, this->kNoMemory);
    }
    if (!broken.empty()) this->fail(peer, broken);
  }

  template <class Meant>
  void stop_all(Code code, std::string_view why, Meant&& meant) noexcept {
    for (const auto& flight : flights_) {
      if (!meant(*flight) || flight->stopped != Code::kOk) continue;
      flight->stopped = code;
      try {
        flight->why = why;
      } catch (const std::bad_alloc&) {  // the code is enough
      }
      workers_->stop(*flight);
    }
    land();
  }
  void stop_shared(WorkId work) noexcept override {
    stop_all(Code::kCancelled, {}, [work](const Flight& flight) { return flight.work.id == work; });
  }
  void stop_shared(PeerId peer, Code code, std::string_view why) noexcept override {
    stop_all(code, why, [peer](const Flight& flight) { return flight.peer == peer; });
  }

  std::vector<std::unique_ptr<Flight>> flights_;
  Clock::time_point awake_until_{};
};

}  // namespace kvxfer
