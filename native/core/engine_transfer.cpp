// Transfers as both ends see them: programs, posting, what is checked of a peer's, and how they end.
#include <algorithm>
#include <unordered_set>

#include "core/engine.h"
#include "core/pack.h"

namespace kvxfer {

Result<std::uint32_t> Engine::install_program(Time now, SessionKey key, bool write, RegionId src,
                                              RegionId dst, CopyProgram program) {
  now_ = now;
  Peer* peer = open_peer(key);
  if (peer == nullptr) return lost_status(key);
  if (Status status = check_program(program); !status.ok()) return status;
  const RegionId ours = write ? src : dst, theirs = write ? dst : src;
  const Region* local = region(ours);
  if (local == nullptr)
    return Status(Code::kUnknownRegion, "region " + std::to_string(ours) + " is not registered here");
  auto remote = peer->regions.find(theirs);
  if (remote == peer->regions.end())
    return Status(Code::kUnknownRegion, "peer " + quoted(peer->session->peer().name) + " has no region " +
                                            std::to_string(theirs) + " (any more)");
  using Half = Footprint::Half;
  if (Status status = local->footprint.contains(program, write ? Half::kSrc : Half::kDst); !status.ok())
    return status;
  // The other half is the peer's to check; here only that it stays inside what the peer announced.
  const wire::Region& there = remote->second.region;
  if (auto extent =
          Footprint::create(program, write ? Half::kDst : Half::kSrc, there.num_blocks, there.spans);
      !extent.ok())
    return extent.status();
  Program entry;
  entry.program = std::make_shared<CopyProgram>(std::move(program));
  entry.src = src;
  entry.dst = dst;
  entry.write = write;
  const std::uint32_t id = peer->next_program++;
  send(*peer, wire::Program{id, src, dst, *entry.program});
  flush(*peer);
  peer->programs.emplace(id, std::move(entry));
  return id;
}

Result<std::shared_ptr<Handle>> Engine::post(Time now, TransferRequest request) {
  now_ = now;
  if (closed_) return Status(Code::kClosed, "the agent is closed");
  Peer* peer = open_peer(request.peer);
  if (peer == nullptr) return lost_status(request.peer);
  auto found = peer->programs.find(request.program);
  if (found == peer->programs.end())
    return Status(Code::kUnknownRegion,
                  "a region of the program is not registered any more, here or at peer " +
                      quoted(peer->session->peer().name));
  const Program& program = found->second;
  const RegionId ours = program.write ? program.src : program.dst,
                 theirs = program.write ? program.dst : program.src;
  const Region* local = region(ours);
  if (local == nullptr)
    return Status(Code::kUnknownRegion, "region " + std::to_string(ours) + " is not registered (any more)");
  const Remote& there = peer->regions.at(theirs);
  const wire::Region& remote = there.region;
  if (Status status = check_path(*peer, *local, there, !program.write); !status.ok()) return status;
  if (request.integrity)
    if (Status status = check_integrity(*local); !status.ok()) return status;
  const std::size_t num_pairs = request.src_ids.size();
  if (num_pairs != request.dst_ids.size())
    return Status(Code::kLengthMismatch, "src_blocks names " + std::to_string(num_pairs) +
                                             " blocks, dst_blocks " + std::to_string(request.dst_ids.size()));
  if (num_pairs > wire::kMaxBlocks)
    return Status(Code::kInvalidArgument, "a transfer takes up to " + std::to_string(wire::kMaxBlocks) +
                                              " block pairs, not " + std::to_string(num_pairs) +
                                              ": post several");
  if (request.notify.size() > wire::kMaxNotify)
    return Status(Code::kInvalidArgument,
                  "a notification has up to " + std::to_string(wire::kMaxNotify) + " bytes");
  if (request.num_layers == 0 || request.first_layer >= program.program->num_layers ||
      request.num_layers > program.program->num_layers - request.first_layer ||
      request.layers_ready > request.num_layers)
    return Status(Code::kOutOfRange, "layers " + std::to_string(request.first_layer) + " + " +
                                         std::to_string(request.num_layers) +
                                         " are not all of the program's " +
                                         std::to_string(program.program->num_layers));
  if (request.timeout_ns <= 0) return Status(Code::kInvalidArgument, "a transfer's timeout is more than 0 s");
  const auto num_blocks = [&](bool is_ours) { return is_ours ? local->num_blocks : remote.num_blocks; };
  const auto name = [&](bool is_ours) -> const std::string& { return is_ours ? local->name : remote.name; };
  if (request.num_fine > num_pairs)
    return Status(Code::kInvalidArgument, "more single tokens are named than there are pairs");
  using Half = Footprint::Half;
  if (Status status = check_ids(request.src_ids, request.num_fine, *program.program, Half::kSrc,
                                num_blocks(program.write), name(program.write));
      !status.ok())
    return status;
  if (Status status = check_ids(request.dst_ids, request.num_fine, *program.program, Half::kDst,
                                num_blocks(!program.write), name(!program.write));
      !status.ok())
    return status;

  // As many pairs in a piece as the rails that are likely to carry it want bytes, and no more than those
  // that it may fail over to have room for, within the bitmap's bound.
  std::uint64_t wanted_nbytes = 512 * 1024, most_nbytes = UINT64_MAX;
  std::uint32_t rank = UINT32_MAX;
  const bool reached = reaches(there, local->memory.kind);
  for (RailId rail : reached ? there.reach : peer->rails) {
    const Capabilities& capabilities = rails_.at(rail).info.capabilities;
    if (!carries(there, rail, local->memory.kind)) continue;
    if (capabilities.rank < rank || (capabilities.rank == rank && capabilities.piece_nbytes < wanted_nbytes))
      wanted_nbytes = capabilities.piece_nbytes;
    rank = std::min(rank, capabilities.rank);
    if (local->memory.kind == MemoryKind::kGpu)
      most_nbytes = std::min(most_nbytes, capabilities.most_piece_nbytes);
  }
  wanted_nbytes = std::min(wanted_nbytes, most_nbytes);
  const std::uint64_t unit_nbytes =
      std::max<std::uint64_t>(1, pair_nbytes(*program.program, request.first_layer, kCoarse));
  std::uint64_t per_piece = std::max<std::uint64_t>(1, wanted_nbytes / unit_nbytes);
  const std::uint64_t most_per_layer = wire::kMaxPieces / request.num_layers;
  per_piece = std::max(per_piece, (num_pairs + most_per_layer - 1) / most_per_layer);
  wire::TransferSpec spec;
  spec.transfer = peer->next_transfer;
  peer->next_transfer += 2;
  spec.program = request.program;
  spec.grid = {
      request.first_layer, request.num_layers, static_cast<std::uint32_t>(num_pairs),
      static_cast<std::uint32_t>(std::min<std::uint64_t>(per_piece, std::max<std::size_t>(1, num_pairs))),
      request.num_fine};
  spec.src_ids = std::move(request.src_ids);
  spec.dst_ids = std::move(request.dst_ids);
  const Key key{peer->key, spec.transfer};

  const auto fill = [&](Transfer& transfer) {
    transfer.key = key;
    transfer.ours = true;
    transfer.handle = program.write ? new_handle(0, 0) : new_handle(request.first_layer, request.num_layers);
    transfer.move = make_move(spec, program, *local, theirs);
    transfer.region = ours;
    transfer.memory = local->memory.kind;
    transfer.program = request.program;
    transfer.notify = std::move(request.notify);
    transfer.priority = request.priority;
    transfer.integrity = request.integrity;
    transfer.lease_named = request.lease != 0;
    transfer.lease = transfer.lease_named ? request.lease : peer->newest_lease_told;
    transfer.timeout_ns = request.timeout_ns;
    handles_[transfer.handle->id()] = {!program.write, key};
    peer->backlog.push_back(key);
    return transfer.handle;
  };
  std::shared_ptr<Handle> handle;
  if (program.write) {
    auto source = std::make_unique<Source>();
    source->layers_ready = request.layers_ready;
    source->fenced = false;
    handle = fill(*source);
    set_timer(*source, TimerKind::kSource, time_after(now, request.timeout_ns));
    sources_.emplace(key, std::move(source));
  } else {
    auto destination = std::make_unique<Destination>();
    destination->remote_region = theirs;
    destination->layers_ready = request.layers_ready;
    handle = fill(*destination);
    set_timer(*destination, TimerKind::kDestination, time_after(now, request.timeout_ns));
    destinations_.emplace(key, std::move(destination));
  }
  start_backlog(*peer);
  if (!peer->backlog.empty()) backlogged_.insert(peer->key);
  flush(*peer);
  return handle;
}

// Layers never become unready. A source tells how far it is, a destination asks for no more than it may.
void Engine::layers_ready(Time now, std::uint64_t handle, std::uint32_t layers) {
  now_ = now;
  auto found = handles_.find(handle);
  if (found == handles_.end()) return;
  const auto [is_destination, key] = found->second;
  Peer* peer = find_peer(key.first);
  if (is_destination) {
    Destination* destination = find_destination(key);
    if (destination == nullptr || layers <= destination->layers_ready) return;
    destination->layers_ready = std::min(layers, destination->move->grid.num_layers);
    if (peer != nullptr && destination->state == TransferState::kMoving) list_ready(*peer, *destination);
    return;
  }
  Source* source = find_source(key);
  if (source == nullptr || layers <= source->layers_ready) return;
  source->layers_ready = std::min(layers, source->move->grid.num_layers);
  if (peer == nullptr || source->state != TransferState::kServing) return;
  send(*peer, wire::LayersReady{key.second, source->layers_ready});
  flush(*peer);
}

void Engine::start_backlog(Peer& peer) {
  while (!peer.backlog.empty()) {
    const Key key = peer.backlog.front();
    if (Source* source = find_source(key); source != nullptr && source->state == TransferState::kQueued) {
      if (!has_room(peer.ours, source->move->grid.num_pairs)) return;
      if (!tell_offer(peer, *source).ok()) return;  // no fence slot is free: later
      count_open(peer, *source);
    } else if (Destination* destination = find_destination(key);
               destination != nullptr && destination->state == TransferState::kQueued) {
      if (!has_room(peer.ours, destination->move->grid.num_pairs)) return;
      step(destination_transitions(), destination->state, TransferEvent::kTold);
      destination->asked_at = now_;
      send(peer, wire::Request{spec_of(*destination)});
      count_open(peer, *destination);
    }  // else: ended while it waited
    peer.backlog.pop_front();
  }
}

bool Engine::has_room(const Peer::Open& open, std::uint64_t num_pairs) const {
  return open.transfers < config_.max_open_transfers && open.pairs + num_pairs <= config_.max_open_pairs;
}

void Engine::count_open(Peer& peer, Transfer& transfer) {
  transfer.counted = true;
  Peer::Open& open = transfer.ours ? peer.ours : peer.theirs;
  ++open.transfers;
  open.pairs += transfer.move->grid.num_pairs;
}

void Engine::count_closed(Peer& peer, Transfer& transfer) {
  if (!std::exchange(transfer.counted, false)) return;
  Peer::Open& open = transfer.ours ? peer.ours : peer.theirs;
  --open.transfers;
  open.pairs -= transfer.move->grid.num_pairs;
}

wire::TransferSpec Engine::spec_of(const Transfer& transfer) {
  wire::TransferSpec spec;
  spec.transfer = transfer.key.second;
  spec.program = transfer.program;
  spec.grid = transfer.move->grid;
  spec.priority = transfer.priority;
  spec.flags = static_cast<std::uint8_t>((transfer.integrity ? wire::kFlagIntegrity : 0) |
                                         (transfer.lease_named ? wire::kFlagLease : 0));
  spec.lease = transfer.lease;
  spec.timeout_ns = static_cast<std::uint64_t>(transfer.timeout_ns);
  spec.src_ids = transfer.move->src_ids;
  spec.dst_ids = transfer.move->dst_ids;
  spec.notify = transfer.notify;
  return spec;
}

std::shared_ptr<Move> Engine::make_move(wire::TransferSpec& spec, const Program& program, const Region& local,
                                        RegionId remote) {
  auto move = std::make_shared<Move>();
  move->transfer = spec.transfer;
  move->program = program.program;
  move->grid = spec.grid;
  move->src_ids = std::move(spec.src_ids);
  move->dst_ids = std::move(spec.dst_ids);
  move->local_base = local.memory.base;
  move->local_memory = local.memory.kind;
  move->remote_region = remote;
  return move;
}

Result<const Region*> Engine::check_spec(Peer& peer, const wire::TransferSpec& spec, Footprint::Half half) {
  auto found = peer.peer_programs.find(spec.program);
  if (found == peer.peer_programs.end())
    return Status(Code::kInvalidArgument, "program " + std::to_string(spec.program) + " was never told");
  Program& program = found->second;
  const bool is_src = half == Footprint::Half::kSrc;
  const Region* local = region(is_src ? program.src : program.dst);
  if (local == nullptr) return Status(Code::kRegionGone, "the region was deregistered, or never existed");
  if (!peer.regions.contains(is_src ? program.dst : program.src))
    return Status(Code::kUnknownRegion, "the peer names a region of its own that it never announced");
  const Remote& there = peer.regions.at(is_src ? program.dst : program.src);
  const wire::Region& remote = there.region;
  if (Status status = check_path(peer, *local, there, !is_src); !status.ok()) return status;
  if ((spec.flags & wire::kFlagIntegrity) != 0)
    if (Status status = check_integrity(*local); !status.ok()) return status;
  bool& checked = is_src ? program.checked_request : program.checked_offer;
  if (!checked) {
    if (Status status = local->footprint.contains(*program.program, half); !status.ok()) return status;
    if (!is_src) {
      // What is read from the peer's memory must be inside what it announced.
      if (auto extent =
              Footprint::create(*program.program, Footprint::Half::kSrc, remote.num_blocks, remote.spans);
          !extent.ok())
        return extent.status();
    }
    checked = true;
  }
  if (spec.grid.first_layer >= program.program->num_layers ||
      spec.grid.num_layers > program.program->num_layers - spec.grid.first_layer)
    return Status(Code::kOutOfRange, "the transfer names layers beyond the program's");
  using Half = Footprint::Half;
  if (Status status = check_ids(is_src ? spec.src_ids : spec.dst_ids, spec.grid.num_fine, *program.program,
                                is_src ? Half::kSrc : Half::kDst, local->num_blocks, local->name);
      !status.ok())
    return status;
  if (Status status = check_ids(is_src ? spec.dst_ids : spec.src_ids, spec.grid.num_fine, *program.program,
                                is_src ? Half::kDst : Half::kSrc, remote.num_blocks, remote.name);
      !status.ok())
    return status;
  return local;
}

// The blocks of those pairs, each once, in the order of the table.
std::vector<std::uint32_t> Engine::blocks_of(const Move& move, Footprint::Half half,
                                             const std::vector<bool>& pairs) {
  std::vector<std::uint32_t> blocks;
  std::unordered_set<std::uint32_t> seen;
  const bool src = half == Footprint::Half::kSrc;
  for (std::uint32_t pair = 0; pair < move.grid.num_pairs; ++pair) {
    if (!pairs[pair]) continue;
    const std::uint32_t block = src ? move.src_block(pair) : move.dst_block(pair);
    if (seen.insert(block).second) blocks.push_back(block);
  }
  return blocks;
}

void Engine::refuse(Peer& peer, TransferId transfer, const Status& why) {
  send(peer, wire::Fail{transfer, why.code(), why.message().substr(0, wire::kMaxText)});
}

std::shared_ptr<Handle> Engine::new_handle(std::uint32_t first_layer, std::uint32_t num_layers) {
  return std::make_shared<Handle>(next_handle_++, now_, first_layer, num_layers);
}

void Engine::end_handle(const std::shared_ptr<Handle>& handle, TransferState state, Status status,
                        std::vector<std::uint32_t> failed) {
  if (handle == nullptr) return;
  const Outcome outcome = outcome_of(state);
  const Code code = status.code();
  std::string message = status.message();
  handles_.erase(handle->id());
  handle->end(now_, outcome, std::move(status), std::move(failed));
  host_.emit(
      {.kind = EventKind::kEnded, .handle = handle->id(), .code = code, .message = std::move(message)});
}

void Engine::on(Peer& peer, const wire::Done& done) {
  Source* source = find_source({peer.key, done.transfer});
  if (source == nullptr || !step(source_transitions(), source->state, TransferEvent::kPeerDone)) return;
  // A send of a piece that another rail brought, or that the peer asked for in vain, reads pages
  // that are the caller's again when the last of them has completed.
  count_closed(peer, *source);
  if (source->posted.empty()) return drained_source(*source);
  source->to_send.clear();
  sending_.erase(source->key);
  release_fence(*source);
  stop_works(*source, TimerKind::kSource);
}

void Engine::on(Peer& peer, const wire::Fail& fail) {
  Status why(fail.code == Code::kOk ? Code::kRefused : fail.code, "the peer ended it: " + fail.text);
  const Key key{peer.key, fail.transfer};
  if (Source* source = find_source(key))
    fail_source(*source, TransferEvent::kFail, std::move(why), false);
  else if (Destination* destination = find_destination(key))
    fail_destination(*destination, TransferEvent::kFail, std::move(why), false);
}

void Engine::cancel(Time now, std::uint64_t handle) {
  now_ = now;
  const Status why{Code::kCancelled, "cancelled by the caller"};
  if (expectations_.contains(handle)) {
    end_expectation(handle, TransferState::kCancelled, why);
    return;
  }
  auto found = handles_.find(handle);
  if (found == handles_.end()) return;
  const auto [is_destination, key] = found->second;
  if (is_destination) {
    if (Destination* destination = find_destination(key))
      fail_destination(*destination, TransferEvent::kCancel, why, true);
  } else if (Source* source = find_source(key)) {
    fail_source(*source, TransferEvent::kCancel, why, true);
  }
}

void Engine::forget_work(Transfer& transfer, WorkId work) {
  const auto found = std::find_if(transfer.posted.begin(), transfer.posted.end(),
                                  [work](const auto& entry) { return entry.first == work; });
  if (found != transfer.posted.end()) transfer.posted.erase(found);
}

void Engine::on_completion(Time now, const Completion& completion) {
  now_ = now;
  auto found = works_.find(completion.work);
  if (found == works_.end()) return;
  const WorkRecord work = found->second;
  works_.erase(found);
  const bool is_due = work.use != WorkUse::kSend && !work.draining;
  if (is_due) --outstanding_pieces_;
  auto rail = rails_.find(work.rail);
  if (rail != rails_.end() && work.use != WorkUse::kSend) {
    if (is_due) --rail->second.outstanding;
    rail->second.moved_at = now_;
    rail->second.forgiven = false;
  }

  if (work.use == WorkUse::kSend) {
    Source* source = find_source(work.transfer);
    if (source == nullptr) return;
    forget_work(*source, completion.work);
    if (completion.code == Code::kOk) ++stats_.pieces_sent;
    if (completion.code == Code::kOk && source->handle && rail != rails_.end())
      source->handle->add_rail(rail->second.info.capabilities.name);
    // A piece that did not go out is the destination's to ask for again, where it hears of it by the rail's
    // end. Of one that this end cannot send it hears nothing: it waits for what never comes.
    if (completion.code != Code::kOk && completion.code != Code::kRailFailed &&
        completion.code != Code::kCancelled && !is_draining(source->state)) {
      const Code code = completion.code == Code::kSystem ? Code::kRailFailed : completion.code;
      return fail_source(*source, TransferEvent::kFail, {code, completion.detail}, true);
    }
    if (is_draining(source->state) && source->posted.empty()) drained_source(*source);
    return;
  }
  Destination* destination = find_destination(work.transfer);
  if (destination == nullptr) return;
  forget_work(*destination, completion.work);
  if (is_draining(destination->state)) {
    if (destination->posted.empty()) drained_destination(*destination);
    return;
  }
  Peer* peer = find_peer(work.transfer.first);
  if (peer == nullptr) return;  // its transfers are draining

  if (work.use == WorkUse::kFence) {
    std::vector<std::uint32_t> layers = std::move(destination->confirming);
    destination->confirming.clear();
    if (completion.code == Code::kOk) {
      confirmed(*peer, *destination, layers);
    } else if (completion.code == Code::kLeaseEnded) {
      ++stats_.fences_stale;
      fail_destination(*destination, TransferEvent::kFail,
                       {Code::kLeaseEnded, "the source ended the right to its pages while they were read"},
                       true);
    } else {  // the rail died: ask on another
      destination->to_confirm.insert(destination->to_confirm.end(), layers.begin(), layers.end());
      dirty_.insert(destination->key);
    }
    return;
  }
  if (rail != rails_.end() && (completion.code == Code::kOk) && destination->handle)
    destination->handle->add_rail(rail->second.info.capabilities.name);
  if (rail != rails_.end() && completion.code == Code::kOk && destination->expectation)
    destination->expectation->handle()->add_rail(rail->second.info.capabilities.name);
  switch (completion.code) {
    case Code::kOk:
      if (work.use == WorkUse::kFetch) destination->one_sided = true;
      piece_in(*peer, *destination, work.piece);
      break;
    case Code::kLeaseEnded:
      fail_destination(*destination, TransferEvent::kFail,
                       {Code::kLeaseEnded, "the source ended the right to its pages while it sent them"},
                       true);
      break;
    case Code::kRailFailed:
    case Code::kCancelled: redo(*peer, *destination, work.piece); break;
    case Code::kExhausted:  // the piece is too large for the rail, which others may use as before
      fail_destination(*destination, TransferEvent::kFail, {Code::kExhausted, completion.detail}, true);
      break;
    default:
      // This rail cannot reach that memory after all: others may.
      if (auto remote = peer->regions.find(destination->remote_region); remote != peer->regions.end()) {
        remote->second.notes.push_back(completion.detail);
        peer->notes.push_back(completion.detail);
        if (rail != rails_.end() &&
            rail->second.info.capabilities.memory.has(MemoryKinds(MemoryKind::kHost) | MemoryKind::kGpu)) {
          remote->second.unable.emplace_back(work.rail, destination->memory);
        } else {
          std::erase(remote->second.reach, work.rail);
          if (rail != rails_.end()) host_.detach(work.rail, destination->remote_region);
        }
        if (const Region* local = region(destination->region))
          if (Status path = check_path(*peer, *local, remote->second, true); !path.ok()) {
            fail_destination(*destination, TransferEvent::kFail, std::move(path), true);
            return;
          }
      }
      redo(*peer, *destination, work.piece);
  }
}

}  // namespace kvxfer
