#include "core/engine/sums.h"

#include <algorithm>

namespace kvxfer {

void Sums::add(const TransferEnd& transfer, Run run) {
  Asked& asked = asked_[transfer.key];
  asked.move = transfer.move;
  append(asked.runs, run);
}

std::size_t Sums::num_runs(TransferKey transfer) const {
  const auto found = asked_.find(transfer);
  return found == asked_.end() ? 0 : found->second.runs.size();
}

std::uint64_t Sums::sum_some(TransferKey transfer, Asked& asked, std::uint64_t nbytes,
                             std::vector<Told>& told) {
  std::uint64_t summed = 0;
  while (!asked.runs.empty() && summed < nbytes) {
    Run& run = asked.runs.front();
    if (!asked.begun) {
      asked.begun.emplace(*asked.move, run.first_piece, side_, asked.move->local->base);
      summed += kNbytesOfACall;
    }
    summed += asked.begun->advance(nbytes - std::min(summed, nbytes));
    if (!asked.begun->done()) break;
    const bool continues = !told.empty() && told.back().transfer == transfer &&
                           told.back().first_piece + told.back().sums.size() == run.first_piece;
    if (!continues) told.push_back({transfer, run.first_piece, {}});
    told.back().sums.push_back(asked.begun->value());
    asked.begun.reset();
    ++run.first_piece;
    if (--run.num_pieces == 0) asked.runs.pop_front();
  }
  return summed;
}

}  // namespace kvxfer
