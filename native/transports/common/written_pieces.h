// The common part of rails whose pieces the source can write: what the two ends say to each other about
// pieces that no work has begun (piece_tickets.h).
//
// A Peer has `AwaitedPieces awaited` and `AskedPieces asked`; its Message has a PieceTicket, and among its
// kinds kAwait, kGiveUp and kDropped.
#pragma once

#include <cstddef>
#include <optional>

#include "transports/common/piece_tickets.h"
#include "transports/common/rail_peers.h"

namespace kvxfer {

template <class Peer>
class WrittenPieces : public RailPeers<Peer> {
 protected:
  using Message = typename Peer::Message;
  using MessageKind = decltype(Message::kind);
  using RailPeers<Peer>::RailPeers;

  void tell_of_piece(Peer& peer, MessageKind kind, const PieceTicket& ticket) noexcept {
    Message message;
    message.kind = kind;
    message.ticket = ticket;
    this->tell(peer, message);
  }

  // At the source: the peer awaits a piece (kAwait), or no longer does (kGiveUp).
  Status on_asked(Peer& peer, MessageKind kind, const PieceTicket& ticket) {
    if (kind == MessageKind::kGiveUp) {
      // If the piece has begun, what announces its end tells the peer.
      if (!peer.asked.give_up(ticket)) return {};
      if (ticket.number != 0) tell_of_piece(peer, MessageKind::kDropped, ticket);
      if (!peer.down) this->activate(peer);  // its work, if there is one, ends cancelled
      return {};
    }
    switch (peer.asked.add(ticket)) {
      case AskedPieces::Added::kYes: this->activate(peer); break;  // a work that waited for this can begin
      case AskedPieces::Added::kDropped: tell_of_piece(peer, MessageKind::kDropped, ticket); break;
      case AskedPieces::Added::kTooMany: return {Code::kRailFailed, "it awaits more pieces than it may"};
    }
    return {};
  }

  // Each awaited piece has a work at the source that writes it. If one of the two works ends before they have
  // met, the peer is told, and the other work ends as well.
  void drop_piece(Peer& peer, WorkId work) noexcept {
    const std::size_t at = peer.queue.first([work](const Work& each) { return each.id == work; });
    if (at == peer.queue.size()) return;
    const WorkKind kind = peer.queue[at].kind;
    if (kind != WorkKind::kReceive && kind != WorkKind::kSend) return;
    // A copy: if the peer cannot be told, the rail fails and its queue is emptied.
    const PieceTicket ticket{peer.queue[at].move->transfer, peer.queue[at].piece, 0};
    if (kind == WorkKind::kReceive) return tell_of_piece(peer, MessageKind::kGiveUp, ticket);
    if (const std::optional<PieceTicket> awaited = peer.asked.drop(ticket))
      tell_of_piece(peer, MessageKind::kDropped, *awaited);
  }

  void end_awaited(Peer& peer, AwaitedPieces::Piece& piece, Code code, std::string_view why) noexcept {
    this->end_work(piece.work.id, code, code == Code::kOk ? std::string_view() : why);
    peer.awaited.erase(&piece);
  }
};

}  // namespace kvxfer
