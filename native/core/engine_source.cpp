// Transfers whose bytes are ours: offered by us, or asked for by a peer that holds a lease.
#include <algorithm>

#include "core/engine.h"

namespace kvxfer {

// A fence word for the transfer, and the OFFER that names it.
Status Engine::tell_offer(Peer& peer, Source& source) {
  if (free_slots_.empty()) return {Code::kAgain, "every fence slot is in use"};
  source.fence_slot = free_slots_.back();
  free_slots_.pop_back();
  source.fenced = true;
  source.fence_generation = host_.fence_generation(source.fence_slot);
  step(source_transitions(), source.state, TransferEvent::kTold);
  send(peer, wire::Offer{spec_of(source), source.layers_ready, source.fence_slot, source.fence_generation});
  return {};
}

void Engine::on(Peer& peer, wire::Request& request) {
  wire::TransferSpec& spec = request.spec;
  const Key key{peer.key, spec.transfer};
  if (spec.transfer % 2 == peer.next_transfer % 2 || sources_.contains(key) || destinations_.contains(key)) {
    end_session(now_, peer.key, Code::kProtocol,
                "REQUEST: transfer " + std::to_string(spec.transfer) + " is not the peer's to begin");
    return;
  }
  Result<const Region*> local = check_spec(peer, spec, Footprint::Half::kSrc);
  if (!local.ok()) return refuse(peer, spec.transfer, local.status());
  if (!has_room(peer.theirs, spec.grid.num_pairs) || free_slots_.empty())
    return refuse(peer, spec.transfer,
                  {Code::kRefused, "too many transfers are open at the peer: wait for some to end"});
  const Program& program = peer.peer_programs.at(spec.program);
  auto source = std::make_unique<Source>();
  source->key = key;
  source->state = TransferState::kServing;
  source->region = program.src;
  source->memory = local.value()->memory.kind;
  source->program = spec.program;
  source->move = make_move(spec, program, *local.value(), program.dst);
  source->notify = std::move(spec.notify);
  source->priority = spec.priority;
  source->integrity = (spec.flags & wire::kFlagIntegrity) != 0;
  source->lease = spec.lease;
  source->lease_named = (spec.flags & wire::kFlagLease) != 0;
  if (Status status = find_leases(peer, *source, wire::LeaseMode::kRead); !status.ok())
    return refuse(peer, spec.transfer, status);
  source->timeout_ns = static_cast<Time>(spec.timeout_ns);
  source->layers_ready = spec.grid.num_layers;
  source->fence_slot = free_slots_.back();
  free_slots_.pop_back();
  source->fence_generation = host_.fence_generation(source->fence_slot);
  // The reader may act until the first of the leases that it needs ends. Where heartbeats renew all
  // of them it counts the whole time from its newest acknowledged one, else what is left from asking.
  Time whole = kNever, left = kNever;
  bool renewable = true;
  for (LeaseId id : source->leases) {
    const Lease& lease = leases_.at(id);
    whole = std::min(whole, lease.ttl_ns());
    left = std::min(left, lease.expires_at() - now_);
    renewable = renewable && lease.renewable();
  }
  const Time ttl = renewable ? whole : left;
  set_timer(*source, TimerKind::kSource, time_after(now_, source->timeout_ns));
  count_open(peer, *source);
  send(peer, wire::Accept{spec.transfer, source->fence_slot, source->fence_generation,
                          static_cast<std::uint64_t>(std::max<Time>(0, ttl)), renewable});
  sources_.emplace(key, std::move(source));
}

void Engine::on(Peer& peer, const wire::Credit& credit) {
  Source* source = find_source({peer.key, credit.transfer});
  if (source == nullptr || source->state != TransferState::kServing) return;  // it ended meanwhile
  const PieceGrid& grid = source->move->grid;
  if (credit.num_pieces > grid.num_pieces() || credit.first_piece > grid.num_pieces() - credit.num_pieces ||
      grid.piece(credit.first_piece + credit.num_pieces - 1).layer - grid.first_layer >=
          source->layers_ready) {
    end_session(now_, peer.key, Code::kProtocol, "CREDIT for pieces that are not there or not ready");
    return;
  }
  // Which of a rail that is not up at this end yet is not known.
  const bool sends =
      credit.rail == wire::kNoRail
          ? source->memory == MemoryKind::kHost
          : std::none_of(peer.rails.begin(), peer.rails.end(), [&](RailId id) {
              const RailInfo& info = rails_.at(id).info;
              return info.index == credit.rail && !info.capabilities.memory.has(source->memory);
            });
  if (!sends) {
    end_session(now_, peer.key, Code::kProtocol, "CREDIT for pages that no rail sends: they lie on a GPU");
    return;
  }
  // A receiver asks for every piece once, and again for those that it may redo.
  source->num_credited += credit.num_pieces;
  if (source->num_credited > grid.num_pieces() + max_redone(grid)) {
    end_session(now_, peer.key, Code::kProtocol, "CREDIT for the same pieces over and over");
    return;
  }
  if (source->integrity) {
    // The pages are ours and at rest, so the sums can be told before the bytes arrive.
    wire::Checksums sums{credit.transfer, credit.first_piece, {}};
    for (std::uint32_t i = 0; i < credit.num_pieces; ++i)
      sums.crc32c.push_back(host_.checksum(*source->move, credit.first_piece + i, Side::kSrc));
    send(peer, sums);
  }
  if (credit.rail == wire::kNoRail) return;
  for (std::uint32_t i = 0; i < credit.num_pieces; ++i)
    source->to_send.emplace_back(credit.rail, credit.first_piece + i);
  send_pieces(peer, *source);
}

void Engine::send_pieces(Peer& peer, Source& source) {
  // Pieces of a rail that is not up at this end yet wait; of one that went down they are not
  // wanted any more: the destination sees that too and asks elsewhere.
  std::list<std::pair<std::uint16_t, std::uint32_t>> later;
  while (!source.to_send.empty() && source.state == TransferState::kServing) {
    const auto [index, piece] = source.to_send.front();
    source.to_send.pop_front();
    Rail* rail = nullptr;
    for (RailId id : peer.rails)
      if (const RailInfo& info = rails_.at(id).info;
          info.index == index && !info.capabilities.one_sided && info.capabilities.memory.has(source.memory))
        rail = &rails_.at(id);
    if (rail == nullptr || rail->again) {
      later.emplace_back(index, piece);
      continue;
    }
    Work work;
    work.id = next_work_++;
    work.kind = WorkKind::kSend;
    work.piece = piece;
    work.move = source.move;
    const PostResult result = host_.post(rail->info.id, work);
    if (result.accepted == 1) {
      source.posted.emplace_back(work.id, rail->info.id);
      works_.emplace(work.id, WorkRecord{WorkUse::kSend, source.key, rail->info.id, piece});
    } else if (result.code == Code::kAgain) {
      said_again(*rail);
      again_ = true;
      later.emplace_back(index, piece);
    }
  }
  source.to_send = std::move(later);
  if (source.to_send.empty())
    sending_.erase(source.key);
  else
    sending_.insert(source.key);
}

void Engine::release_fence(Source& source) {
  if (!source.fenced) return;
  source.fenced = false;
  host_.bump_fence(source.fence_slot);
  free_slots_.push_back(source.fence_slot);
}

void Engine::fail_source(Source& source, TransferEvent event, Status why, bool tell_peer) {
  const bool told = source.state == TransferState::kServing;
  if (!step(source_transitions(), source.state, event)) return;
  clear_timer(source);
  source.reason = std::move(why);
  if (source.handle) source.handle->let_streams_go(outcome_of(source.state));
  release_fence(source);  // whoever still reads will find out before it says done
  source.to_send.clear();
  if (Peer* peer = find_peer(source.key.first)) count_closed(*peer, source);
  if (!source.posted.empty()) stop_works(source, TimerKind::kSource);
  if (Peer* peer = open_peer(source.key.first); peer != nullptr && tell_peer && told)
    refuse(*peer, source.key.second, source.reason);
  if (source.posted.empty()) drained_source(source);
}

// The one way out: done, or nothing of it is posted any more.
void Engine::drained_source(Source& source) {
  step(source_transitions(), source.state, TransferEvent::kDrained);
  release_fence(source);
  clear_timer(source);
  if (Peer* peer = find_peer(source.key.first)) {
    if (source.ours && source.state != TransferState::kDone && !peer->backlog.empty())
      std::erase(peer->backlog, source.key);
    if (source.state == TransferState::kDone && !source.ours && !source.notify.empty())
      host_.emit({.kind = EventKind::kNotification, .peer = peer->key, .payload = std::move(source.notify)});
  }
  ++(source.state == TransferState::kDone ? stats_.transfers_done : stats_.transfers_failed);
  // What the destination has of it is not known here; all of it may have to be written again.
  std::vector<std::uint32_t> failed;
  if (source.state != TransferState::kDone)
    failed =
        blocks_of(*source.move, Footprint::Half::kSrc, std::vector<bool>(source.move->grid.num_pairs, true));
  end_handle(source.handle, source.state, source.reason, std::move(failed));
  sending_.erase(source.key);
  auto found = sources_.find(source.key);
  bury(std::move(found->second));
  sources_.erase(found);
  drained(source);
}

}  // namespace kvxfer
