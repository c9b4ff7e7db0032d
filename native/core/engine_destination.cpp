// Transfers whose bytes become ours: authorized, scheduled, accounted, confirmed.
#include <algorithm>
#include <numeric>

#include "core/engine.h"
#include "core/pack.h"

namespace kvxfer {
namespace {

// Pieces in flight over all peers: 256 x 512 KiB. A hundred prefills that offer at once share
// this much of the receiver instead of a window each.
constexpr std::uint32_t kMaxOutstandingPieces = 256;

}  // namespace

void Engine::on(Peer& peer, wire::Offer& offer) {
  wire::TransferSpec& spec = offer.spec;
  const Key key{peer.key, spec.transfer};
  if (spec.transfer % 2 == peer.next_transfer % 2 || sources_.contains(key) || destinations_.contains(key) ||
      offer.layers_ready > spec.grid.num_layers || offer.fence_slot >= FenceTable::kNumSlots) {
    end_session(now_, peer.key, Code::kProtocol,
                "OFFER: transfer " + std::to_string(spec.transfer) + " is not the peer's to begin");
    return;
  }
  Result<const Region*> local = check_spec(peer, spec, Footprint::Half::kDst);
  if (!local.ok()) return refuse(peer, spec.transfer, local.status());
  if (!has_room(peer.theirs, spec.grid.num_pairs))
    return refuse(peer, spec.transfer,
                  {Code::kRefused, "too many transfers are open at the peer: wait for some to end"});
  const Program& program = peer.peer_programs.at(spec.program);
  auto owned = std::make_unique<Destination>();
  Destination& destination = *owned;
  destination.key = key;
  destination.state = TransferState::kParked;
  destination.region = program.dst;
  destination.memory = local.value()->memory.kind;
  destination.remote_region = program.src;
  destination.program = spec.program;
  destination.move = make_move(spec, program, *local.value(), program.src);
  destination.notify = std::move(spec.notify);
  destination.priority = spec.priority;
  destination.integrity = (spec.flags & wire::kFlagIntegrity) != 0;
  destination.lease = spec.lease;
  destination.lease_named = (spec.flags & wire::kFlagLease) != 0;
  destination.timeout_ns = static_cast<Time>(spec.timeout_ns);
  destination.layers_ready = offer.layers_ready;
  destination.fence_slot = offer.fence_slot;
  destination.fence_generation = offer.fence_generation;
  destinations_.emplace(key, std::move(owned));
  count_open(peer, destination);
  set_timer(destination, TimerKind::kDestination, time_after(now_, destination.timeout_ns));
  if (Status status = authorize(peer, destination); status.ok())
    begin_moving(peer, destination);
  else if (destination.notify.empty() || destination.lease_named || !may_come_true(status))
    fail_destination(destination, TransferEvent::kFail, std::move(status), true);
  // else: it is parked until somebody expects its tag, or its time is over
}

void Engine::on(Peer& peer, const wire::Accept& accept) {
  Destination* destination = find_destination({peer.key, accept.transfer});
  if (destination == nullptr || destination->state != TransferState::kRequested) return;
  if (accept.fence_slot >= FenceTable::kNumSlots) {
    end_session(now_, peer.key, Code::kProtocol,
                "ACCEPT: there is no fence slot " + std::to_string(accept.fence_slot));
    return;
  }
  destination->fence_slot = accept.fence_slot;
  destination->fence_generation = accept.fence_generation;
  destination->lease_ttl_ns = static_cast<Time>(accept.ttl_ns);
  destination->lease_renewable = accept.renewable;
  step(destination_transitions(), destination->state, TransferEvent::kAccepted);
  begin_moving(peer, *destination);
}

void Engine::on(Peer& peer, const wire::LayersReady& ready) {
  Destination* destination = find_destination({peer.key, ready.transfer});
  // Of a read it is our caller who says how far it may go, and no peer.
  if (destination == nullptr || destination->ours || ready.layers_ready > destination->move->grid.num_layers)
    return;
  destination->layers_ready = std::max(destination->layers_ready, ready.layers_ready);
  if (destination->state == TransferState::kMoving) list_ready(peer, *destination);
}

void Engine::begin_moving(Peer& peer, Destination& destination) {
  if (destination.state == TransferState::kParked)
    step(destination_transitions(), destination.state, TransferEvent::kAuthorized);
  const PieceGrid& grid = destination.move->grid;
  destination.arrived.resize(grid.num_pieces());
  destination.left_in_layer.assign(grid.num_layers, grid.pieces_per_layer());
  destination.confirmed.resize(grid.num_layers);
  if (grid.num_pieces() == 0) {  // no blocks: every layer is in
    std::vector<std::uint32_t> rows(grid.num_layers);
    std::iota(rows.begin(), rows.end(), 0);
    confirmed(peer, destination, rows);
    return;
  }
  list_ready(peer, destination);
}

void Engine::list_ready(Peer& peer, Destination& destination) {
  if (destination.ready_listed) return;
  destination.ready_listed = true;
  peer.ready[destination.priority].push_back(destination.key.second);
  ready_peers_.insert(peer.key);
}

std::optional<std::uint32_t> Engine::next_piece(Destination& destination) {
  if (!destination.redo.empty()) return destination.redo.front();
  const PieceGrid& grid = destination.move->grid;
  if (destination.next_piece < destination.layers_ready * grid.pieces_per_layer())
    return destination.next_piece;
  return std::nullopt;
}

// The best rail that carries the bytes to memory of our region's kind, and has room; null where all are
// full, or none reaches.
Engine::Rail* Engine::choose_rail(Peer& peer, Destination& destination, bool& reachable) {
  reachable = false;
  auto remote = peer.regions.find(destination.remote_region);
  if (remote == peer.regions.end()) return nullptr;
  std::uint32_t rank = UINT32_MAX;
  for (RailId id : remote->second.reach)
    if (carries(remote->second, id, destination.memory))
      rank = std::min(rank, rails_.at(id).info.capabilities.rank);
  Rail* best = nullptr;
  for (RailId id : remote->second.reach) {
    Rail& rail = rails_.at(id);
    if (rail.info.capabilities.rank != rank || !carries(remote->second, id, destination.memory)) continue;
    reachable = true;
    if (rail.again || rail.outstanding >= rail.info.capabilities.window) continue;
    if (best == nullptr || rail.outstanding < best->outstanding) best = &rail;
  }
  return best;
}

// Posts at most one piece of this peer's. `progressed` where it did.
bool Engine::post_next(Peer& peer, bool& progressed) {
  while (!peer.ready.empty()) {
    if (outstanding_pieces_ >= kMaxOutstandingPieces) return false;
    auto level = peer.ready.begin();
    if (level->second.empty()) {
      peer.ready.erase(level);
      continue;
    }
    Destination* destination = find_destination({peer.key, level->second.front()});
    std::optional<std::uint32_t> piece;
    if (destination != nullptr && destination->state == TransferState::kMoving) {
      // A reader stops before its lease may end, unless it was renewed meanwhile.
      if (const Time ttl = destination->lease_ttl_ns; ttl != kNever) {
        const Time from = destination->lease_renewable ? peer.session->acknowledged_heartbeat_sent_at()
                                                       : destination->asked_at;
        if (now_ >= time_after(from, ttl - std::min(config_.lease_margin_ns, ttl / 4))) {
          fail_destination(*destination, TransferEvent::kFail,
                           {Code::kLeaseEnded, "the lease on the pages is about to expire"}, true);
          continue;
        }
      }
      piece = next_piece(*destination);
    }
    if (!piece) {
      if (destination != nullptr) destination->ready_listed = false;
      level->second.pop_front();
      continue;
    }
    bool reachable;
    Rail* rail = choose_rail(peer, *destination, reachable);
    if (rail == nullptr) {
      if (reachable) return false;
      // With no path at all it waits for one, or for its deadline; others may have one.
      destination->ready_listed = false;
      level->second.pop_front();
      continue;
    }
    const Capabilities& capabilities = rail->info.capabilities;
    Work work;
    work.id = next_work_++;
    work.kind = capabilities.one_sided ? WorkKind::kFetch : WorkKind::kReceive;
    work.piece = *piece;
    work.move = destination->move;
    const PostResult result = host_.post(rail->info.id, work);
    if (result.accepted == 0) {
      said_again(*rail);
      if (result.code == Code::kAgain) again_ = true;
      return false;
    }
    count_posted(*rail);
    destination->posted.emplace_back(work.id, rail->info.id);
    const WorkUse use = capabilities.one_sided ? WorkUse::kFetch : WorkUse::kReceive;
    works_.emplace(work.id, WorkRecord{use, destination->key, rail->info.id, *piece});
    if (!destination->redo.empty())
      destination->redo.pop_front();
    else
      ++destination->next_piece;
    if (!capabilities.one_sided || destination->integrity) {
      if (destination->to_credit.empty()) dirty_.insert(destination->key);
      destination->to_credit.emplace_back(rail->info.id, *piece);
    }
    progressed = true;
    return true;
  }
  return false;
}

// CREDIT goes out after the receives are posted, runs of neighbours in one frame.
void Engine::flush_credits(Peer& peer, Destination& destination) {
  auto& credits = destination.to_credit;
  std::sort(credits.begin(), credits.end());
  for (std::size_t i = 0; i < credits.size();) {
    const auto [rail_id, first] = credits[i];
    std::size_t n = 1;
    while (i + n < credits.size() &&
           credits[i + n] ==
               std::pair<RailId, std::uint32_t>(rail_id, first + static_cast<std::uint32_t>(n)) &&
           n < wire::kMaxCreditPieces)
      ++n;
    i += n;
    auto rail = rails_.find(rail_id);
    if (rail == rails_.end()) continue;  // its pieces come back as failed
    const bool one_sided = rail->second.info.capabilities.one_sided;
    send(peer, wire::Credit{destination.key.second, one_sided ? wire::kNoRail : rail->second.info.index,
                            first, static_cast<std::uint32_t>(n)});
  }
  credits.clear();
}

void Engine::redo(Peer& peer, Destination& destination, std::uint32_t piece) {
  if (destination.arrived[piece]) return;
  ++stats_.pieces_redone;
  if (++destination.num_redone > max_redone(destination.move->grid)) {
    fail_destination(destination, TransferEvent::kFail,
                     {Code::kRailFailed, "its pieces failed again and again on every rail"}, true);
    return;
  }
  destination.redo.push_back(piece);
  list_ready(peer, destination);
}

void Engine::piece_in(Peer& peer, Destination& destination, std::uint32_t piece) {
  ++stats_.pieces_in;
  if (destination.arrived[piece]) return;  // redone work that the old rail had delivered after all
  if (destination.handle) destination.handle->set_first_piece(now_);
  if (destination.expectation) destination.expectation->handle()->set_first_piece(now_);
  if (destination.integrity) {
    destination.sums_here[piece] = host_.checksum(*destination.move, piece, Side::kDst);
    compare_sums(peer, destination, piece);
    return;
  }
  count_piece(peer, destination, piece);
}

void Engine::on(Peer& peer, const wire::Checksums& checksums) {
  Destination* destination = find_destination({peer.key, checksums.transfer});
  if (destination == nullptr || !destination->integrity || destination->state != TransferState::kMoving)
    return;
  const std::uint32_t num_pieces = destination->move->grid.num_pieces();
  for (std::uint32_t i = 0; i < checksums.crc32c.size(); ++i) {
    const std::uint32_t piece = checksums.first_piece + i;
    if (piece >= num_pieces) return;
    destination->sums_there[piece] = checksums.crc32c[i];
    compare_sums(peer, *destination, piece);
    if (destination->state != TransferState::kMoving) return;
  }
}

void Engine::compare_sums(Peer& peer, Destination& destination, std::uint32_t piece) {
  auto here = destination.sums_here.find(piece);
  auto there = destination.sums_there.find(piece);
  if (here == destination.sums_here.end() || there == destination.sums_there.end()) return;
  const bool equal = here->second == there->second;
  destination.sums_here.erase(here);
  destination.sums_there.erase(there);
  if (equal) {
    if (!destination.arrived[piece]) count_piece(peer, destination, piece);
    return;
  }
  const Piece named = destination.move->grid.piece(piece);
  fail_destination(
      destination, TransferEvent::kFail,
      {Code::kIntegrity, "the checksum of layer " + std::to_string(named.layer) + ", " +
                             std::to_string(named.num_pairs) + " blocks from the table's place " +
                             std::to_string(named.first_pair) + " on, differs from the source's"},
      true);
}

void Engine::count_piece(Peer& peer, Destination& destination, std::uint32_t piece) {
  const PieceGrid& grid = destination.move->grid;
  destination.arrived[piece] = true;
  ++destination.num_arrived;
  const std::uint32_t row = piece / grid.pieces_per_layer();
  const Piece named = grid.piece(piece);
  stats_.bytes_in += piece_nbytes(*destination.move->program, named);
  if (--destination.left_in_layer[row] != 0) return;
  if (!destination.one_sided) {
    const std::uint32_t rows[] = {row};
    confirmed(peer, destination, rows);
    return;
  }
  destination.to_confirm.push_back(row);
  dirty_.insert(destination.key);
}

void Engine::confirm_dirty() {
  while (!dirty_.empty()) {
    const Key key = *dirty_.begin();
    dirty_.erase(dirty_.begin());
    Destination* destination = find_destination(key);
    Peer* peer = find_peer(key.first);
    if (destination == nullptr || peer == nullptr || destination->state != TransferState::kMoving) continue;
    flush_credits(*peer, *destination);
    confirm(*peer, *destination);
  }
}

// Asks whether the source's right held until now, for every layer that is in.
void Engine::confirm(Peer& peer, Destination& destination) {
  if (destination.to_confirm.empty() || !destination.confirming.empty()) return;
  const bool all = destination.num_arrived == destination.move->grid.num_pieces();
  // Layer by layer only where somebody can see it; one question at the end otherwise.
  if (!all && destination.handle == nullptr && destination.expectation == nullptr) return;
  if (!destination.one_sided) {
    const std::vector<std::uint32_t> layers = std::move(destination.to_confirm);
    destination.to_confirm.clear();
    confirmed(peer, destination, layers);
    return;
  }
  for (RailId id : peer.rails) {
    Rail& rail = rails_.at(id);
    if (!rail.info.capabilities.one_sided || !rail.info.capabilities.memory.has(destination.memory)) continue;
    Work work;
    work.id = next_work_++;
    work.kind = WorkKind::kCheckFence;
    work.move = destination.move;
    work.fence_slot = destination.fence_slot;
    work.fence_generation = destination.fence_generation;
    const PostResult result = host_.post(id, work);
    if (result.accepted == 1) {
      count_posted(rail);
      destination.posted.emplace_back(work.id, id);
      works_.emplace(work.id, WorkRecord{WorkUse::kFence, destination.key, id, 0});
      destination.confirming = std::move(destination.to_confirm);
      destination.to_confirm.clear();
      return;
    }
    if (result.code == Code::kAgain) {
      again_ = true;
      retry_.insert(destination.key);
      return;
    }
  }
  redo_unconfirmed(peer, destination);
}

// What was fetched can be confirmed no more, since no rail is left on which the source's fence can
// be read. Rails whose bytes need no such question may bring it again.
void Engine::redo_unconfirmed(Peer& peer, Destination& destination) {
  const auto remote = peer.regions.find(destination.remote_region);
  if (remote == peer.regions.end() || !reaches(remote->second, destination.memory)) {
    fail_destination(destination, TransferEvent::kFail,
                     {Code::kRailFailed, "no rail is left on which the source's fence can be read"}, true);
    return;
  }
  destination.to_confirm.clear();
  destination.one_sided = false;
  again_ = true;  // this round of posting is over
  const std::uint32_t per_layer = destination.move->grid.pieces_per_layer();
  for (std::uint32_t piece = 0; piece < destination.move->grid.num_pieces(); ++piece) {
    if (!destination.arrived[piece] || destination.confirmed[piece / per_layer]) continue;
    destination.arrived[piece] = false;
    --destination.num_arrived;
    ++destination.left_in_layer[piece / per_layer];
    redo(peer, destination, piece);
    if (destination.state != TransferState::kMoving) return;
  }
}

void Engine::confirmed(Peer& peer, Destination& destination, std::span<const std::uint32_t> layers) {
  const PieceGrid& grid = destination.move->grid;
  for (const std::uint32_t row : layers) {
    if (destination.confirmed[row]) continue;
    destination.confirmed[row] = true;
    ++destination.num_confirmed;
    const std::uint32_t layer = grid.first_layer + row;
    if (destination.handle && destination.handle->set_layer(layer))
      host_.emit({.kind = EventKind::kLayer, .handle = destination.handle->id(), .layer = layer});
    if (destination.expectation && destination.expectation->arrived(layer, *destination.move))
      if (const auto& handle = destination.expectation->handle(); handle->set_layer(layer))
        host_.emit({.kind = EventKind::kLayer, .handle = handle->id(), .layer = layer});
  }
  if (destination.num_confirmed == grid.num_layers)
    finish_destination(peer, destination);
  else if (!destination.to_confirm.empty())
    dirty_.insert(destination.key);
}

void Engine::finish_destination(Peer& peer, Destination& destination) {
  if (!step(destination_transitions(), destination.state, TransferEvent::kConfirmed)) return;
  send(peer, wire::Done{destination.key.second});
  drained_destination(destination);
}

std::vector<std::uint32_t> Engine::failed_blocks(const Destination& destination) const {
  const Move& move = *destination.move;
  const PieceGrid& grid = move.grid;
  const bool all = destination.confirmed.empty() || destination.reason.code() == Code::kIntegrity;
  std::vector<bool> bad(grid.num_pairs, all);
  for (std::uint32_t index = 0; !all && index < grid.num_pieces(); ++index) {
    if (destination.arrived[index] &&
        (!destination.one_sided || destination.confirmed[index / grid.pieces_per_layer()]))
      continue;
    const Piece piece = grid.piece(index);
    for (std::uint32_t p = 0; p < piece.num_pairs; ++p) bad[piece.first_pair + p] = true;
  }
  return blocks_of(move, Footprint::Half::kDst, bad);
}

void Engine::fail_destination(Destination& destination, TransferEvent event, Status why, bool tell_peer) {
  const bool told = destination.state != TransferState::kQueued;
  if (!step(destination_transitions(), destination.state, event)) return;
  clear_timer(destination);
  destination.reason = std::move(why);
  destination.to_credit.clear();
  const Outcome outcome = outcome_of(destination.state);
  if (destination.handle) destination.handle->let_streams_go(outcome);
  if (destination.expectation && expectations_.contains(destination.expectation->handle()->id()))
    destination.expectation->handle()->let_streams_go(Outcome::kFailed);
  if (Peer* peer = find_peer(destination.key.first)) count_closed(*peer, destination);
  if (!destination.posted.empty()) stop_works(destination, TimerKind::kDestination);  // the fence
  if (Peer* peer = open_peer(destination.key.first); peer != nullptr && tell_peer && told)
    refuse(*peer, destination.key.second, destination.reason);
  if (destination.posted.empty()) drained_destination(destination);
}

void Engine::drained_destination(Destination& destination) {
  step(destination_transitions(), destination.state, TransferEvent::kDrained);
  clear_timer(destination);
  const bool done = destination.state == TransferState::kDone;
  if (Peer* peer = find_peer(destination.key.first)) {
    if (destination.ours && !done && !peer->backlog.empty()) std::erase(peer->backlog, destination.key);
    count_closed(*peer, destination);
    if (done && !destination.ours && !destination.notify.empty() && destination.expectation == nullptr)
      host_.emit(
          {.kind = EventKind::kNotification, .peer = peer->key, .payload = std::move(destination.notify)});
  }
  ++(done ? stats_.transfers_done : stats_.transfers_failed);
  end_handle(destination.handle, destination.state, destination.reason,
             done ? std::vector<std::uint32_t>{} : failed_blocks(destination));
  std::shared_ptr<Expectation> expectation = std::move(destination.expectation);
  const Status reason = destination.reason;
  auto found = destinations_.find(destination.key);
  bury(std::move(found->second));
  destinations_.erase(found);
  drained(destination);
  if (expectation == nullptr) return;
  const std::uint64_t id = expectation->handle()->id();
  if (auto ending = ending_expectations_.find(id); ending != ending_expectations_.end()) {
    if (--ending->second.num_draining != 0) return;
    EndingExpectation ended = std::move(ending->second);
    ending_expectations_.erase(ending);
    expectation_fenced(*ended.expectation, ended.state, std::move(ended.why));
  } else if (!expectations_.contains(id)) {
    return;
  } else if (!done) {
    end_expectation(id, TransferState::kFailed, reason);
  } else if (expectation->complete()) {
    end_expectation(id, TransferState::kDone, {});
  }
}

}  // namespace kvxfer
