#include "core/engine/sums.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "core/copy/work.h"

namespace kvxfer {

// What one thread computes in a turn: piece after piece, of those that no other thread has taken.
class Sums::Share final : public Task {
 public:
  Share(std::deque<PieceChecksum>& begun, std::atomic<std::size_t>& next) noexcept
      : begun_(begun), next_(next) {}
  void run() noexcept override {
    try {
      while (nbytes_ < kNbytesPerTurn) {
        const std::size_t index = next_.fetch_add(1, std::memory_order_relaxed);
        if (index >= begun_.size()) return;
        nbytes_ += kNbytesOfACall;
        nbytes_ += begun_[index].advance(kNbytesPerTurn - std::min(nbytes_, kNbytesPerTurn));
      }
    } catch (const std::bad_alloc&) {
      starved_ = true;
    }
  }
  std::uint64_t nbytes() const noexcept { return nbytes_; }
  bool starved() const noexcept { return starved_; }

 private:
  std::deque<PieceChecksum>& begun_;
  std::atomic<std::size_t>& next_;
  std::uint64_t nbytes_ = 0;
  bool starved_ = false;  // memory was lacking
};

void Sums::add(const TransferEnd& transfer, Run run) {
  Asked& asked = asked_[transfer.key];
  asked.move = transfer.move;
  append(asked.runs, run);
}

std::size_t Sums::num_runs(TransferKey transfer) const {
  const auto found = asked_.find(transfer);
  return found == asked_.end() ? 0 : found->second.runs.size();
}

// Begins more pieces until the begun ones have `nbytes` of work for a turn. Returns how much they have.
std::uint64_t Sums::begin_pieces(Asked& asked, std::uint64_t nbytes) const {
  std::uint64_t total = 0;
  std::size_t num_seen = 0;
  for (const Run& run : asked.runs)
    for (std::uint32_t i = 0; i < run.num_pieces; ++i, ++num_seen) {
      if (total >= nbytes) return total;
      const std::uint32_t piece = run.first_piece + i;
      if (num_seen == asked.begun.size())
        asked.begun.emplace_back(*asked.move, piece, side_, asked.move->local->base);
      total += std::clamp(piece_work(*asked.move->program, asked.move->grid.piece(piece)), kNbytesOfACall,
                          kNbytesPerTurn);
    }
  return total;
}

// A turn's worth on each thread. Returns the most that one of them computed.
std::uint64_t Sums::compute(std::deque<PieceChecksum>& begun, std::size_t num_threads) const {
  std::atomic<std::size_t> next{0};
  std::vector<Share> shares(std::max<std::size_t>(num_threads, 1), Share(begun, next));
  if (shares.size() == 1) {
    shares.front().run();
  } else {
    std::vector<Task*> tasks;
    for (Share& share : shares) tasks.push_back(&share);
    workers_->run_all(tasks);
  }
  std::uint64_t most = 0;
  for (const Share& share : shares) {
    if (share.starved()) throw std::bad_alloc();
    most = std::max(most, share.nbytes());
  }
  return most;
}

std::uint64_t Sums::sum_some(TransferKey transfer, Asked& asked, std::vector<Finished>& finished) const {
  const std::size_t most_threads = workers_ == nullptr ? 1 : workers_->num_threads();
  const std::uint64_t nbytes = begin_pieces(asked, most_threads * kNbytesPerTurn);
  const std::uint64_t computed =
      compute(asked.begun, std::min({most_threads, asked.begun.size(), nbytes / kLeastNbytesOfAThread}));
  while (!asked.begun.empty() && asked.begun.front().done()) {
    Run& run = asked.runs.front();
    const bool continues =
        !finished.empty() && finished.back().first_piece + finished.back().sums.size() == run.first_piece;
    if (!continues) finished.push_back({transfer, run.first_piece, {}});
    finished.back().sums.push_back(asked.begun.front().value());
    asked.begun.pop_front();
    ++run.first_piece;
    if (--run.num_pieces == 0) asked.runs.pop_front();
  }
  return computed;
}

}  // namespace kvxfer
