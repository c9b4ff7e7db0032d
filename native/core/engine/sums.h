// Checksums of pieces, computed in slices. Between slices others have their turn: sessions one after the
// other, and a bounded amount of work a round. So neither the number of pieces that a peer names, nor their
// size, nor its program decides how much is computed in one go. If the agent has threads that copy, they compute sums of
// different pieces at the same time.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "core/copy/copy_workers.h"
#include "core/copy/pack.h"
#include "core/engine/transfer_end.h"

namespace kvxfer {

// Neighbouring pieces, as a CREDIT names them.
struct Run { std::uint32_t first_piece, num_pieces; };

// Appends a run, or joins it with the last one if they are neighbours.
inline void append(std::list<Run>& runs, Run run) {
  if (!runs.empty() && runs.back().first_piece + runs.back().num_pieces == run.first_piece)
    runs.back().num_pieces += run.num_pieces;
  else
    runs.push_back(run);
}

class Sums {
 public:
  struct Finished {
    TransferKey transfer;
    std::uint32_t first_piece;
    std::vector<std::uint32_t> sums;  // of neighbouring pieces
  };

  // `workers` is the engine's; null if the driving thread computes alone.
  Sums(Side side, const std::shared_ptr<CopyWorkers>& workers) : side_(side), workers_(workers) {}

  // Queues pieces of our memory. They do not change until they are summed or forgotten.
  void add(const TransferEnd& transfer, Run run);
  void forget(TransferKey transfer) { asked_.erase(transfer); }
  std::size_t num_runs(TransferKey transfer) const;
  bool empty() const noexcept { return asked_.empty(); }
  // Computes for one round; the sum of one piece may take several. Sessions take turns, and tell(session,
  // sums) gets the results. serve(session, work) runs what is done for that session (Context::serve).
  template <class Serve, class Tell>
  void round(Serve&& serve, Tell&& tell) {
    for (std::uint64_t nbytes = 0; !asked_.empty() && nbytes < kNbytesPerRound;) {
      auto next = asked_.lower_bound({last_ + 1, 0});
      if (next == asked_.end()) next = asked_.begin();
      last_ = next->first.first;
      nbytes += kNbytesOfACall;
      serve(last_, [&] {
        std::vector<Finished> finished;
        nbytes += sum_some(next->first, next->second, finished);
        if (next->second.runs.empty()) asked_.erase(next);
        for (Finished& each : finished) tell(each);
      });
    }
  }

 private:
  // In one round, by each thread: about 1 ms at 4 GB/s. Bytes are those of work (core/copy/work.h), so that
  // short runs and loops that are passed count; each piece counts at least as much as the call for its sum
  // costs.
  static constexpr std::uint64_t kNbytesPerRound = 4 * 1024 * 1024;
  static constexpr std::uint64_t kNbytesOfACall = 1024;
  // For one session, by each thread, before the next session has its turn.
  static constexpr std::uint64_t kNbytesPerTurn = 1024 * 1024;
  // Waking a thread for less than this costs more than the thread saves.
  static constexpr std::uint64_t kLeastNbytesOfAThread = 128 * 1024;

  struct Asked {
    std::shared_ptr<const Move> move;
    std::list<Run> runs;
    // Sums of the first pieces, in order; behind an unfinished one there may be finished ones.
    std::deque<PieceChecksum> begun;
  };
  class Share;

  std::uint64_t begin_pieces(Asked& asked, std::uint64_t nbytes) const;
  std::uint64_t compute(std::deque<PieceChecksum>& begun, std::size_t num_threads) const;
  std::uint64_t sum_some(TransferKey transfer, Asked& asked, std::vector<Finished>& finished) const;

  const Side side_;
  const std::shared_ptr<CopyWorkers>& workers_;
  std::map<TransferKey, Asked> asked_;
  SessionKey last_ = 0;  // the session that had the last turn
};

}  // namespace kvxfer
