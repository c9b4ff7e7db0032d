// How the pieces of destinations are posted and counted.
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

// A source that ended a right is waited for so long, to hear why.
constexpr Time kWordNs = 100'000'000;

// Even a slow rail gets this many pieces: it stays busy, and shows when it is no longer slow.
constexpr std::uint32_t kLeastOutstanding = 2;

}  // namespace

// ---- posting ------------------------------------------------------------------------------------

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
    if (destination != nullptr && destination->state == TransferState::kMoving && !destination->is_stale) {
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
    const Code posted = rails_.post(*rail, work, *destination);
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
      if (destination->to_credit.empty()) asking_.push_back(destination->key);
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

// CREDIT goes out after the receives are posted.
void Destinations::flush_credits() {
  for (const TransferKey& key : asking_)
    context_.serve(key.first, [&] {
      Destination* const destination = find(key);
      if (destination != nullptr && !destination->to_credit.empty()) send_credits(*destination);
    });
  // Those that memory was lacking for ask in the next round.
  std::erase_if(asking_, [this](const TransferKey& key) {
    const Destination* const destination = find(key);
    return destination == nullptr || destination->to_credit.empty();
  });
}

// One frame names a run of neighbours.
void Destinations::send_credits(Destination& destination) {
  auto& credits = destination.to_credit;
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
  if (work.rail != nullptr && completion.code == Code::kOk &&
      destination.rails.add(work.rail->capabilities().name)) {
    if (destination.handle) destination.handle->add_rail(work.rail->capabilities().name);
    if (destination.expectation) destination.expectation->handle()->add_rail(work.rail->capabilities().name);
  }
  switch (completion.code) {
    case Code::kOk: piece_in(destination, work.piece); break;
    case Code::kLeaseEnded:
      if (work.kind == WorkKind::kFetch) {
        if (std::exchange(destination.is_stale, true)) break;
        ++context_.stats.fences_stale;
        rails_.stop(destination);
        // The source says why, in a frame that may come later than its word was read.
        const Time due = time_after(context_.now, kWordNs);
        if (due < Timers::at(destination.timer)) destination.set_timer(context_.timers, due);
        break;
      }
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
  if (destination.arrivals.has(piece) || destination.is_stale) return;
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
  if (destination.arrivals.add(piece)) layer_in(destination, destination.arrivals.row_of(piece));
  if (destination.arrivals.has_all()) all_in(destination);
}

// Each byte of the layer is in, under a right that held.
void Destinations::layer_in(Destination& destination, std::uint32_t row) {
  const std::uint32_t layer = destination.move->grid.first_layer + row;
  const auto arrived = [&](const std::shared_ptr<Handle>& handle) {
    if (handle->set_layer(layer))
      context_.host.emit({.kind = EventKind::kLayer, .handle = handle->id(), .layer = layer});
  };
  if (destination.handle) arrived(destination.handle);
  if (destination.expectation && destination.expectation->arrived(layer, destination))
    arrived(destination.expectation->handle());
}

void Destinations::all_in(Destination& destination) {
  if (destination.expectation) destination.expectation->arrived(*destination.move);
  finish(destination);
}

}  // namespace kvxfer
