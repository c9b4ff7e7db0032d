// Pieces that the source writes into the destination's memory (transports/common/written_pieces.h).
#include <algorithm>
#include <new>

#include "transports/fabric/fabric_rail.h"

namespace kvxfer {

using fabric::Message;
using fabric::MessageKind;

// ---- at the destination ----

void FabricRail::await_some(Peer& peer) {
  while (!peer.down && peer.awaited.has_room()) {
    const std::size_t at = peer.queue.first([](const Work& work) { return work.kind == WorkKind::kReceive; });
    if (at == peer.queue.size()) return;
    await(peer, at);
  }
}

void FabricRail::await(Peer& peer, std::size_t at) {
  // What needs memory comes first: a work that is in no queue would never end.
  const Status local = registered(*peer.queue[at].move).status();
  std::string why = local.ok() ? std::string() : words(local.message());
  Work work = peer.queue.take(at);
  PieceTicket ticket{work.move->transfer, work.piece, 0};
  if (!local.ok()) {
    end_work(failed(work.id, local.code(), std::move(why)));
    return tell_of_piece(peer, MessageKind::kGiveUp, ticket);
  }
  ticket.number = peer.awaited.add(std::move(work), 0).number;
  if (peer.endpoint->fd() < 0) peer.quiet_since = Clock::now();
  wake(peer);
  tell_of_piece(peer, MessageKind::kAwait, ticket);
}

// The peer may be writing it: the piece ends when the peer says that it no longer does, or with the endpoint.
bool FabricRail::stop_awaited(Peer& peer, WorkId work) noexcept {
  AwaitedPieces::Piece* const piece = peer.awaited.find_work(work);
  if (piece == nullptr) return false;
  if (piece->code != Code::kOk) return true;
  piece->code = Code::kCancelled;
  piece->due_at = Clock::now() + kSendStopBound;
  if (!peer.due || piece->due_at < *peer.due) watch(peer, piece->due_at);
  tell_of_piece(peer, MessageKind::kGiveUp, {piece->work.move->transfer, piece->work.piece, piece->number});
  return true;
}

// ---- at both ends ----

Status FabricRail::on_piece(Peer& peer, const Message& message) {
  if (!peer.writes())
    return {Code::kRailFailed, "it sent a message about writes, which the two ends have not agreed on"};
  if (message.kind == MessageKind::kAwait || message.kind == MessageKind::kGiveUp)
    return on_asked(peer, message.kind, message.ticket);
  if (AwaitedPieces::Piece* const piece = peer.awaited.find(message.ticket.number)) {
    const bool is_dropped = message.kind == MessageKind::kDropped && piece->code == Code::kOk;
    end_awaited(peer, *piece, is_dropped ? Code::kLeaseEnded : piece->code,
                is_dropped ? words("the source stopped before all of the piece was written") : piece->why);
    land(peer);
    if (!peer.down && !peer.queue.empty()) activate(peer);  // another piece can be awaited
  }
  return {};
}

// ---- at the source ----

void FabricRail::tell_what_was_written(Peer& peer) noexcept {
  for (std::size_t i = 0; i < peer.written.size() && !peer.down; ++i) {
    const auto [number, is_whole] = peer.written[i];
    tell_of_piece(peer, is_whole ? MessageKind::kWritten : MessageKind::kDropped, {0, 0, number});
  }
  peer.written.clear();
}

}  // namespace kvxfer
