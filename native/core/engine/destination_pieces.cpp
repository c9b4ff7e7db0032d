// How the pieces of destinations are posted, counted and confirmed.
#include <algorithm>

#include "core/copy/pack.h"
#include "core/engine/destinations.h"
#include "core/engine/eager.h"

namespace kvxfer {
namespace {

// Pieces in flight over all peers, for each class of priorities: 256 x 512 KiB. A hundred prefills that
// offer at once share this much of the receiver instead of having a window each.
constexpr std::uint32_t kMaxOutstandingPieces = 256;

// The most pieces posted in one round, over all peers: 0.5 us each. In between the driving thread does other
// things.
constexpr std::uint32_t kMostPostedAtOnce = 64;

// Even a slow rail gets this many pieces: it stays busy, and shows when it is no longer slow.
constexpr std::uint32_t kLeastOutstanding = 2;

}  // namespace

// ---- posting ------------------------------------------------------------------------------------

void Destinations::begin_round() {
  for (const TransferKey& key : retry_)
    context_.serve(key.first, [&] {
      if (Destination* const destination = find(key)) mark(*destination);
    });
  retry_.clear();
}

void Destinations::mark(Destination& destination) {
  if (destination.dirty) return;
  dirty_.push_back(destination.key);
  destination.dirty = true;
}

void Destinations::list(Destination& destination) {
  if (destination.listed) return;
  turns_.list(destination.key.first, destination.priority, destination.key.second);
  destination.listed = true;
}

void Destinations::path_came(SessionKey session, RegionId remote) {
  for (const TransferKey& key : ends_.of_remote(session, remote))
    if (Destination& destination = *find(key); destination.state == TransferState::kMoving) list(destination);
}

void Destinations::post_pieces() {
  std::uint32_t num_posted = 0;
  turns_.serve([&](SessionKey session) {
    if (num_posted == kMostPostedAtOnce) return !(context_.pump_again = true);
    bool has_posted = false;
    context_.serve(session, [&] { has_posted = post_next(session); });
    num_posted += has_posted ? 1 : 0;
    return has_posted;
  });
}

// Posts at most one piece of this session's. True where it did.
bool Destinations::post_next(SessionKey session) {
  if (limits_.has_paced() && !limits_.may_post(session)) {
    turns_.hold(session);
    return false;
  }
  // If one class of priorities has no room, later classes still have their turn.
  unsigned from = 0;
  const auto first = [&] {
    return from < PriorityClasses::kEnd ? turns_.first(session, static_cast<std::uint8_t>(from))
                                        : std::nullopt;
  };
  while (const std::optional<TransferId> next = first()) {
    Destination* destination = find({session, *next});
    std::optional<std::uint32_t> piece;
    if (destination != nullptr && destination->state == TransferState::kMoving) {
      if (lease_ends_soon(*destination)) {
        fail(*destination, TransferEvent::kFail,
             {Code::kLeaseEnded, "the lease on the pages is about to expire"}, true);
        continue;
      }
      piece = destination->arrivals.next(destination->layers_ready);
    }
    Choice choice;
    if (piece) choice = choose_rail(*destination);
    Rail* const rail = choice.rail;
    if (rail == nullptr && !choice.is_reachable) {
      // It has nothing to post; if it has no path at all, it waits for one, or for its deadline.
      if (destination != nullptr) destination->listed = false;
      turns_.drop_first(session, static_cast<std::uint8_t>(from));
      continue;
    }
    if (rail == nullptr) {
      from = choice.class_end;
      continue;
    }
    Work work;
    work.kind = rails_.kind_to_bring(*rail, *destination->move, *piece);
    work.piece = *piece;
    work.move = destination->move;
    const bool fetched = work.kind == WorkKind::kFetch;
    const Code posted = rails_.post(*rail, fetched ? WorkUse::kFetch : WorkUse::kReceive, work, *destination);
    if (posted != Code::kOk) {
      rails_.note_again(*rail, destination->priority);
      if (posted == Code::kAgain) context_.pump_again = true;
      from = choice.class_end;
      continue;
    }
    destination->arrivals.posted_next();
    if (limits_.has_paced())
      limits_.took(session, piece_nbytes(*work.move->program, work.move->grid.piece(*piece)));
    if (!fetched || destination->integrity) {
      mark(*destination);
      destination->to_credit.emplace_back(fetched ? wire::RailName(wire::kNoRail) : rail->info().name,
                                          *piece);
    }
    return true;
  }
  return false;
}

// A reader stops before its lease may end, unless the lease was renewed meanwhile.
bool Destinations::lease_ends_soon(const Destination& destination) const {
  const Time ttl = destination.lease_ttl_ns;
  if (ttl == kNever) return false;
  const Time from = destination.lease_renewable
                        ? sessions_.find(destination.key.first)->session().acknowledged_heartbeat_sent_at()
                        : destination.asked_at;
  return context_.now >= time_after(from, ttl - std::min(context_.config.lease_margin_ns, ttl / 4));
}

// The best rail that carries the bytes to our region; rails near its memory come first. Among equally good
// ones, the rail over which the piece arrives first. No rail if that one is full, or if none reaches the
// region.
Destinations::Choice Destinations::choose_rail(const Destination& destination) {
  Choice choice;
  const PeerRegion* remote = peer_regions_.find(destination.key.first, destination.remote_region());
  if (remote == nullptr) return choice;
  const std::uint8_t priority = destination.priority;
  const bool converts = destination.move->program->converts();
  const LocalRegion& local = *destination.move->local;
  std::uint32_t rank = UINT32_MAX;
  Rail*& best = choice.rail;
  const Rail* soonest = nullptr;  // it may be full
  for (Rail* rail : remote->reach) {
    const Capabilities& capabilities = rail->capabilities();
    const std::uint32_t its = capabilities.rank_for(local);
    if (its > rank || !remote->comes_over(*rail, destination.memory, converts)) continue;
    if (its < rank) {  // it is preferred to all rails before it
      best = nullptr, soonest = nullptr;
      choice.class_end = 0;
    }
    rank = its;
    choice.is_reachable = true;
    const std::size_t of_class = rail->class_of(priority);
    choice.class_end = std::max(choice.class_end, capabilities.classes.end(of_class));
    if (rail->lane(priority).said_again()) continue;
    if (soonest == nullptr || rail->is_sooner(*soonest, priority)) soonest = rail;
    if (rail->is_full(priority) || rails_.outstanding(of_class) >= kMaxOutstandingPieces) continue;
    if (best == nullptr || rail->is_sooner(*best, priority)) best = rail;
  }
  if (best == nullptr || best == soonest || best->lane(priority).outstanding() < kLeastOutstanding)
    return choice;
  if (soonest->is_sooner(*best, priority)) best = nullptr;
  return choice;
}

// CREDIT goes out after the receives are posted; one frame names a run of neighbours.
void Destinations::flush_credits(Destination& destination) {
  auto& credits = destination.to_credit;
  if (credits.empty()) return;
  Peer& peer = *sessions_.find(destination.key.first);
  std::sort(credits.begin(), credits.end());
  for (std::size_t i = 0; i < credits.size();) {
    const auto [rail, first] = credits[i];
    std::size_t n = 1;
    while (i + n < credits.size() &&
           credits[i + n] == std::pair(rail, first + static_cast<std::uint32_t>(n)) &&
           n < wire::kMaxCreditPieces)
      ++n;
    i += n;
    sessions_.send(peer, wire::Credit{destination.key.second, rail, first, static_cast<std::uint32_t>(n)});
  }
  credits.clear();
}

// ---- counting -----------------------------------------------------------------------------------

void Destinations::completed(const Rails::Completed& work, const Completion& completion) {
  Destination* found = find(work.transfer);
  if (found == nullptr) return;
  Destination& destination = *found;
  destination.forget_work(completion.work);
  if (is_draining(destination.state)) {
    if (destination.posted.empty()) drained(destination);
    return;
  }
  if (work.use == WorkUse::kFence) return fence_checked(destination, completion.code);
  if (work.rail != nullptr && completion.code == Code::kOk &&
      destination.rails.add(work.rail->capabilities().name)) {
    if (destination.handle) destination.handle->add_rail(work.rail->capabilities().name);
    if (destination.expectation) destination.expectation->handle()->add_rail(work.rail->capabilities().name);
  }
  switch (completion.code) {
    case Code::kOk:
      if (work.use == WorkUse::kFetch) destination.one_sided = true;
      piece_in(destination, work.piece);
      break;
    case Code::kLeaseEnded:
      fail(destination, TransferEvent::kFail,
           {Code::kLeaseEnded, "the lease on the source's pages ended while it sent them"}, true);
      break;
    case Code::kRailFailed:
    case Code::kCancelled: redo(destination, work.piece); break;
    case Code::kExhausted:  // the piece is too large for the rail, which others may use as before
      fail(destination, TransferEvent::kFail, {Code::kExhausted, completion.detail}, true);
      break;
    default: unreachable(destination, work, completion);
  }
}

// This rail cannot reach that memory after all; others may.
void Destinations::unreachable(Destination& destination, const Rails::Completed& work,
                               const Completion& completion) {
  Peer* const found = sessions_.find(destination.key.first);
  if (found == nullptr) return;  // its session is lost, and the rest of that end waits for memory
  Peer& peer = *found;
  if (PeerRegion* remote = peer_regions_.find(peer.key(), destination.remote_region())) {
    remote->note(completion.detail);
    sessions_.note(peer, completion.detail);
    peer_regions_.rail_failed(*remote, work.rail, destination.memory);
    if (const Region* local = regions_.find(destination.region))
      if (Status path =
              peer_regions_.check_path(peer, *local, *remote, true, destination.move->program->converts());
          !path.ok())
        return fail(destination, TransferEvent::kFail, std::move(path), true);
  }
  redo(destination, work.piece);
}

// Lands pages that came with the OFFER, under the right that was found in this call: none of its works is
// under way.
void Destinations::land(Destination& destination, wire::ByteSpan pages) {
  unpack_pages(*destination.move, pages);
  limits_.took(destination.key.first, pages.size());
  destination.rails.add(kEagerRail);
  if (destination.expectation) destination.expectation->handle()->add_rail(kEagerRail);
  const std::uint32_t num_pieces = destination.move->grid.num_pieces();
  for (std::uint32_t piece = 0; piece < num_pieces; ++piece) piece_in(destination, piece);
}

void Destinations::redo(Destination& destination, std::uint32_t piece) {
  if (destination.arrivals.has(piece)) return;
  ++context_.stats.pieces_redone;
  if (!destination.arrivals.redo(piece))
    return fail(destination, TransferEvent::kFail,
                {Code::kRailFailed, "its pieces failed repeatedly on every rail"}, true);
  list(destination);
}

void Destinations::piece_in(Destination& destination, std::uint32_t piece) {
  ++context_.stats.pieces_in;
  // Moved again, but the old rail had delivered it after all.
  if (destination.arrivals.has(piece)) return;
  if (destination.first_piece_at == 0) {
    destination.first_piece_at = context_.now;
    if (destination.handle) destination.handle->set_first_piece(context_.now);
    if (destination.expectation) destination.expectation->handle()->set_first_piece(context_.now);
  }
  if (!destination.integrity) return count_piece(destination, piece);
  sums_.add(destination, {piece, 1});
}

void Destinations::sum_slice() {
  if (sums_.empty()) return;
  sums_.round([this](SessionKey session, auto&& turn) { context_.serve(session, turn); },
              [this](const Sums::Finished& finished) {
                for (std::uint32_t i = 0; i < finished.sums.size(); ++i) {
                  Destination* destination = find(finished.transfer);
                  if (destination == nullptr || destination->state != TransferState::kMoving) break;
                  destination->sums->here[finished.first_piece + i] = finished.sums[i];
                  compare_sums(*destination, finished.first_piece + i);
                }
              });
  if (!sums_.empty()) context_.pump_again = true;
}

void Destinations::on(Peer& peer, const wire::Checksums& checksums) {
  Destination* destination = find({peer.key(), checksums.transfer});
  if (destination == nullptr || !destination->integrity || destination->state != TransferState::kMoving)
    return;
  for (std::uint32_t i = 0; i < checksums.crc32c.size(); ++i) {
    const std::uint32_t piece = checksums.first_piece + i;
    if (!destination->arrivals.is_awaited(piece)) continue;  // not asked for, or late
    destination->sums->there[piece] = checksums.crc32c[i];
    compare_sums(*destination, piece);
    if (destination->state != TransferState::kMoving) return;
  }
}

void Destinations::compare_sums(Destination& destination, std::uint32_t piece) {
  Destination::PieceSums& sums = *destination.sums;
  auto here = sums.here.find(piece);
  auto there = sums.there.find(piece);
  if (here == sums.here.end() || there == sums.there.end()) return;
  const bool equal = here->second == there->second;
  sums.here.erase(here);
  sums.there.erase(there);
  if (equal) {
    if (!destination.arrivals.has(piece)) count_piece(destination, piece);
    return;
  }
  const Piece named = destination.move->grid.piece(piece);
  fail(destination, TransferEvent::kFail,
       {Code::kIntegrity, "the checksum of layer " + std::to_string(named.layer) + ", " +
                              std::to_string(named.num_pairs) + " blocks from entry " +
                              std::to_string(named.first_pair) +
                              " of the block table on, differs from the source's"},
       true);
}

void Destinations::count_piece(Destination& destination, std::uint32_t piece) {
  context_.stats.bytes_in += piece_nbytes(*destination.move->program, destination.move->grid.piece(piece));
  if (!destination.arrivals.add(piece)) return;
  const std::uint32_t row = destination.arrivals.row_of(piece);
  if (!destination.one_sided) return confirmed(destination, {&row, 1});
  destination.to_confirm.push_back(row);
  mark(destination);
}

// ---- confirming ---------------------------------------------------------------------------------

void Destinations::confirm_dirty() {
  // By index: more may join.
  for (std::size_t i = 0; i < dirty_.size(); ++i) {
    context_.serve(dirty_[i].first, [&] {
      Destination* const destination = find(dirty_[i]);
      if (destination == nullptr) return;
      destination->dirty = false;
      if (destination->state != TransferState::kMoving) return;
      flush_credits(*destination);
      confirm(*destination);
    });
  }
  dirty_.clear();
}

// Asks whether the source's right held until now, for every layer that is in.
void Destinations::confirm(Destination& destination) {
  if (destination.to_confirm.empty() || !destination.confirming.empty()) return;
  // Layer by layer only if a caller can see it; otherwise one question at the end.
  if (!destination.arrivals.has_all() && destination.handle == nullptr && destination.expectation == nullptr)
    return;
  if (!destination.one_sided) return confirmed(destination, std::exchange(destination.to_confirm, {}));
  for (Rail* rail : rails_.of(destination.key.first)) {
    if (!rail->capabilities().one_sided || !rail->capabilities().memory.has(destination.memory)) continue;
    Work work;
    work.kind = WorkKind::kCheckFence;
    work.move = destination.move;
    work.fence_slot = destination.fence_slot;
    work.fence_generation = destination.fence_generation;
    const Code posted = rails_.post(*rail, WorkUse::kFence, work, destination);
    if (posted == Code::kOk) {
      destination.confirming = std::move(destination.to_confirm);
      destination.to_confirm.clear();
      return;
    }
    if (posted == Code::kAgain) {
      context_.pump_again = true;
      retry_.push_back(destination.key);
      return;
    }
  }
  redo_unconfirmed(destination);
}

void Destinations::fence_checked(Destination& destination, Code code) {
  const std::vector<std::uint32_t> rows = std::exchange(destination.confirming, {});
  if (code == Code::kOk) return confirmed(destination, rows);
  if (code == Code::kLeaseEnded) {
    ++context_.stats.fences_stale;
    return fail(destination, TransferEvent::kFail,
                {Code::kLeaseEnded, "the lease on the source's pages ended while they were read"}, true);
  }
  // The rail died: ask on another.
  destination.to_confirm.insert(destination.to_confirm.end(), rows.begin(), rows.end());
  mark(destination);
}

// Fetched pieces can no longer be confirmed, since no rail is left on which the source's fence can be read.
// Rails whose bytes need no such question may bring them again.
void Destinations::redo_unconfirmed(Destination& destination) {
  const PeerRegion* remote = peer_regions_.find(destination.key.first, destination.remote_region());
  if (remote == nullptr ||
      !remote->is_reached_from(destination.memory, destination.move->program->converts()))
    return fail(destination, TransferEvent::kFail,
                {Code::kRailFailed, "no rail is left that can read the source's fence"}, true);
  destination.to_confirm.clear();
  destination.one_sided = false;
  context_.pump_again = true;  // this round of posting is over
  const std::uint32_t num_pieces = destination.move->grid.num_pieces();
  for (std::uint32_t piece = 0; piece < num_pieces; ++piece) {
    if (!destination.arrivals.take_back(piece)) continue;
    redo(destination, piece);
    if (destination.state != TransferState::kMoving) return;
  }
}

void Destinations::confirmed(Destination& destination, std::span<const std::uint32_t> rows) {
  const auto arrived = [&](const std::shared_ptr<Handle>& handle, std::uint32_t layer) {
    if (handle->set_layer(layer))
      context_.host.emit({.kind = EventKind::kLayer, .handle = handle->id(), .layer = layer});
  };
  for (const std::uint32_t row : rows) {
    if (!destination.arrivals.confirm(row)) continue;
    const std::uint32_t layer = destination.move->grid.first_layer + row;
    if (destination.handle) arrived(destination.handle, layer);
    if (destination.expectation && destination.expectation->arrived(layer, destination))
      arrived(destination.expectation->handle(), layer);
  }
  if (destination.arrivals.is_complete()) {
    if (destination.expectation) destination.expectation->arrived(*destination.move);
    finish(destination);
  } else if (!destination.to_confirm.empty()) {
    mark(destination);
  }
}

}  // namespace kvxfer
