#include "core/engine/admission.h"

#include <utility>

namespace kvxfer {
namespace {

// What one end of a transfer holds: two ids a pair, a bit for each piece, a count for each layer, and 1 KiB.
std::uint64_t nbytes_of(const TransferEnd& transfer) {
  const PieceGrid& grid = transfer.move->grid;
  return 1024 + std::uint64_t{grid.num_pairs} * 2 * sizeof(std::uint32_t) + transfer.notify.size() +
         transfer.context.size() + grid.num_pieces() / 8 + std::uint64_t{grid.num_layers} * 8;
}

// The most bytes of one session under way: a sixteenth of what its socket may hold unsent (frame_socket.h).
constexpr std::uint64_t kMaxEagerUnderWay = 1024 * 1024;

}  // namespace

TransferId Admission::number(const Peer& peer) {
  TransferId& next = sessions_[peer.key()].next_number;
  if (next == 0) next = peer.first_transfer();
  return std::exchange(next, next + 2);
}

bool Admission::has_room(SessionKey session, bool ours, std::uint64_t num_pairs) const {
  auto found = sessions_.find(session);
  Open open;
  if (found != sessions_.end()) open = ours ? found->second.ours : found->second.theirs;
  return open.transfers < config_.max_open_transfers && open.pairs + num_pairs <= config_.max_open_pairs;
}

bool Admission::has_eager_room(SessionKey session, std::uint32_t nbytes) const {
  auto found = sessions_.find(session);
  return (found == sessions_.end() ? 0 : found->second.ours.eager_nbytes) + nbytes <= kMaxEagerUnderWay;
}

Status Admission::admit(const Peer& peer, TransferEnd& transfer) const {
  if (!has_room(peer.key(), false, transfer.move->grid.num_pairs))
    return {Code::kRefused, "too many transfers are open at the peer: wait for some to end"};
  transfer.tables = Charge::take(peer.budget(), Resource::kBytes, nbytes_of(transfer));
  if (!transfer.tables)
    return {Code::kRefused, "your transfers use too much of the peer's memory: " +
                                peer.budget()->in_words(Resource::kBytes) + "; wait for some to end"};
  if (transfer.notify.empty()) return {};
  transfer.event = Charge::take(peer.budget(), Resource::kEvents, 1);
  if (transfer.event) return {};
  return {Code::kRefused, "too many of your notifications are unread at the peer: " +
                              peer.budget()->in_words(Resource::kEvents) +
                              "; the peer reads them with agent.notifications(), or expects tags"};
}

void Admission::opened(TransferEnd& transfer) {
  transfer.counted = true;
  OfSession& session = sessions_[transfer.key.first];
  Open& open = transfer.ours ? session.ours : session.theirs;
  ++open.transfers;
  open.pairs += transfer.move->grid.num_pairs;
  open.eager_nbytes += transfer.eager_nbytes;
}

void Admission::closed(TransferEnd& transfer) {
  if (!std::exchange(transfer.counted, false)) return;
  auto session = sessions_.find(transfer.key.first);
  if (session == sessions_.end()) return;
  Open& open = transfer.ours ? session->second.ours : session->second.theirs;
  --open.transfers;
  open.pairs -= transfer.move->grid.num_pairs;
  open.eager_nbytes -= transfer.eager_nbytes;
}

void Admission::wait(const TransferEnd& transfer) {
  sessions_[transfer.key.first].backlog.emplace(
      transfer.key.second, Waiting{transfer.key, transfer.is_source(), transfer.move->grid.num_pairs});
  backlogged_.insert(transfer.key.first);
}

std::optional<Admission::Waiting> Admission::next(SessionKey session) const {
  auto found = sessions_.find(session);
  if (found == sessions_.end() || found->second.backlog.empty()) return std::nullopt;
  const Waiting& waiting = found->second.backlog.begin()->second;
  return has_room(session, true, waiting.num_pairs) ? std::optional(waiting) : std::nullopt;
}

void Admission::told(SessionKey session) {
  OfSession& entry = sessions_.at(session);
  entry.backlog.erase(entry.backlog.begin());
  if (entry.backlog.empty()) backlogged_.erase(session);
}

void Admission::forget(const TransferEnd& transfer) {
  auto found = sessions_.find(transfer.key.first);
  if (found == sessions_.end() || found->second.backlog.erase(transfer.key.second) == 0) return;
  if (found->second.backlog.empty()) backlogged_.erase(transfer.key.first);
}

void Admission::remove_session(SessionKey session) {
  sessions_.erase(session);
  backlogged_.erase(session);
}

}  // namespace kvxfer
