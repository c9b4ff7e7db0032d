// What callers of this end ask for: regions, transfers, rights and messages.
#include <utility>

#include "core/engine.h"

namespace kvxfer {

// ---- regions ------------------------------------------------------------------------------------

Result<RegionId> Engine::register_region(Time now, std::unique_ptr<Region> region) {
  context_.now = now;
  const RegionId id = regions_.add(std::move(region));
  sessions_.all_behind();
  return id;
}

void Engine::add_keys(Time now, RegionId id, wire::TransportKeys keys) {
  context_.now = now;
  Region* const region = regions_.find(id);
  if (region == nullptr) return;
  regions_.add_keys(*region, std::move(keys));
  sessions_.all_behind();
}

Result<std::vector<RailWay>> Engine::ways(SessionKey peer, RegionId ours, RegionId theirs,
                                          bool converts) const {
  if (sessions_.find(peer) == nullptr) return sessions_.lost_status(peer);
  const Region* const local = regions_.find(ours);
  const PeerRegion* const remote = peer_regions_.find(peer, theirs);
  if (local == nullptr || remote == nullptr)
    return Status(Code::kUnknownRegion, "region " + std::to_string(local == nullptr ? ours : theirs) +
                                            " is not registered (any more)");
  return peer_regions_.ways(peer, *local, *remote, converts);
}

void Engine::add_note(RegionId id, std::string note) {
  if (Region* const region = regions_.find(id); region != nullptr) region->notes.push_back(std::move(note));
}

Status Engine::deregister_region(Time now, RegionId id) {
  context_.now = now;
  const Region* region = regions_.find(id);
  if (region == nullptr)
    return {Code::kUnknownRegion, "region " + std::to_string(id) + " is not registered (any more)"};
  const Status why{Code::kRegionGone, "region " + quoted(region->name) + " was deregistered"};
  for (const LeaseId lease : leases_.of_region(id)) end_lease(lease, LeaseEvent::kRegionGone, why);
  end_expectations(expectations_.of_region(id), why);
  for (const TransferKey& key : sources_.all().of_region(id))
    context_.serve(key.first, [&] { sources_.fail(key, TransferEvent::kFail, why, true); });
  for (const TransferKey& key : destinations_.all().of_region(id))
    context_.serve(key.first, [&] { destinations_.fail(key, TransferEvent::kFail, why, true); });
  leases_.ended().forget_region(id);
  // The rest of its transfers drains.
  regions_.remove(id, sources_.all().of_region(id).size() + destinations_.all().of_region(id).size());
  sessions_.for_each([&](Peer& peer) { programs_.forget(peer.key(), id, false); });
  sessions_.all_behind();
  rails_.cancel_stopped();
  end_starved();
  return {};
}

// ---- transfers and rights of this end's callers --------------------------------------------------

Result<std::uint32_t> Engine::install_program(Time now, SessionKey key, bool write, RegionId src,
                                              RegionId dst, CopyProgram program) {
  context_.now = now;
  Peer* peer = sessions_.find_open(key);
  if (peer == nullptr) return sessions_.lost_status(key);
  if (Status status = sessions_.check_room(*peer, program.loops.size() * sizeof(CopyLoop)); !status.ok())
    return status;
  tell_regions(*peer, SIZE_MAX);
  Result<std::uint32_t> id = programs_.install(*peer, write, src, dst, std::move(program));
  if (id.ok()) sessions_.flush(*peer);
  return id;
}

Result<std::shared_ptr<Handle>> Engine::post(Time now, TransferRequest request) {
  context_.now = now;
  if (closed_) return Status(Code::kClosed, "the agent is closed");
  return posting_.post(std::move(request));
}

// Layers never become unready. A source tells the peer how far it is; a destination asks for no more than it
// may.
void Engine::layers_ready(Time now, std::uint64_t handle, std::uint32_t layers) {
  context_.now = now;
  const std::optional<Handles::Meant> meant = handles_.find(handle);
  if (!meant) return;
  serve(now, meant->key.first, [&] {
    if (meant->is_destination)
      destinations_.layers_ready(meant->key, layers);
    else
      sources_.layers_ready(meant->key, layers);
  });
}

void Engine::cancel(Time now, std::uint64_t handle) {
  context_.now = now;
  const Status why{Code::kCancelled, "cancelled by the caller"};
  if (expectations_.contains(handle)) {
    expectations_.give_up(handle, why);
    destinations_.end_expectation(handle, TransferState::kCancelled, why);
  } else if (const std::optional<Handles::Meant> meant = handles_.find(handle)) {
    serve(now, meant->key.first, [&] {
      if (meant->is_destination)
        destinations_.fail(meant->key, TransferEvent::kCancel, why, true);
      else
        sources_.fail(meant->key, TransferEvent::kCancel, why, true);
    });
  }
  rails_.cancel_stopped();
}

bool Engine::cancel_transfer(Time now, TransferKey key, bool is_source) {
  context_.now = now;
  const auto end = [&](auto& part) {
    const auto* const transfer = part.all().find(key);
    if (transfer == nullptr || outcome_of(transfer->state) != Outcome::kPending) return false;
    const Status why(Code::kCancelled, "cancelled by its transfer number");
    serve(now, key.first, [&] { part.fail(key, TransferEvent::kCancel, why, true); });
    rails_.cancel_stopped();
    return true;
  };
  return is_source ? end(sources_) : end(destinations_);
}

Result<std::shared_ptr<Handle>> Engine::expect(Time now, wire::Bytes tag, RegionId region,
                                               std::vector<std::uint32_t> blocks, std::uint32_t first_layer,
                                               std::uint32_t num_layers, const Needed& needed,
                                               std::optional<SessionKey> from, Time timeout_ns,
                                               wire::Bytes context) {
  context_.now = now;
  if (closed_) return Status(Code::kClosed, "the agent is closed");
  const std::vector<TransferKey> parked = destinations_.parked_for(tag);
  const Result<std::shared_ptr<Expectation>> added =
      expectations_.add(std::move(tag), region, std::move(blocks), first_layer, num_layers, needed, from,
                        timeout_ns, std::move(context));
  if (!added.ok()) return added.status();
  Expectation& expectation = *added.value();
  std::shared_ptr<Handle> handle = expectation.handle();
  try {
    destinations_.let_in(expectation, parked);
    if (expectation.complete())  // it names no blocks
      destinations_.end_expectation(handle->id(), TransferState::kDone, {});
  } catch (...) {
    if (expectations_.contains(handle->id())) expectations_.withdraw(expectation);
    throw;
  }
  end_starved();
  return handle;
}

Result<LeaseId> Engine::grant(Time now, LeaseTerms terms) {
  context_.now = now;
  if (closed_) return Status(Code::kClosed, "the agent is closed");
  Peer* peer = terms.holder ? sessions_.find_open(*terms.holder) : nullptr;
  if (terms.holder && peer == nullptr) return sessions_.lost_status(*terms.holder);
  if (peer == nullptr) return leases_.grant(peer, terms);
  tell_regions(*peer, SIZE_MAX);
  std::vector<TransferKey> parked;
  if (terms.mode == wire::LeaseMode::kWrite) parked = destinations_.parked_for(terms);
  Result<LeaseId> id = leases_.grant(peer, terms);
  if (!id.ok()) return id;
  destinations_.let_in(parked);
  sessions_.flush(*peer);
  end_starved();
  return id;
}

bool Engine::extend(Time now, LeaseId lease, Time ttl_ns) {
  context_.now = now;
  return leases_.extend(lease, ttl_ns);
}

void Engine::revoke(Time now, LeaseId lease) {
  context_.now = now;
  end_lease(lease, LeaseEvent::kRevoke, {Code::kLeaseEnded, "the lease was revoked"});
  rails_.cancel_stopped();
}

bool Engine::await_acknowledged(Time now, LeaseId lease) {
  context_.now = now;
  return leases_.await_acknowledged(lease);
}

Status Engine::limit_peer(Time now, const std::string& name, const PeerLimit& limit) {
  context_.now = now;
  const Result<std::vector<SessionKey>> sessions = limits_.set(name, limit);
  if (!sessions.ok()) return sessions.status();
  for (const SessionKey key : sessions.value()) context_.serve(key, [&] { destinations_.apply_limit(key); });
  end_starved();
  return {};
}

Status Engine::send_message(Time now, SessionKey key, wire::Bytes payload) {
  context_.now = now;
  if (closed_) return Status(Code::kClosed, "the agent is closed");
  Peer* peer = sessions_.find_open(key);
  if (peer == nullptr || !peer->is_up()) return sessions_.lost_status(key);
  tell_regions(*peer, SIZE_MAX);
  Status status = messages_.send(*peer, std::move(payload));
  if (status.ok()) sessions_.flush(*peer);
  return status;
}

Result<bool> Engine::has_room(Time now, SessionKey key, std::uint64_t nbytes) {
  context_.now = now;
  const Peer* peer = sessions_.find_open(key);
  if (peer == nullptr || !peer->is_up()) return sessions_.lost_status(key);
  return messages_.has_room(*peer, nbytes);
}

void Engine::message_taken(Time now, SessionKey key) {
  context_.now = now;
  Peer* peer = sessions_.find_open(key);
  if (peer == nullptr) return;
  messages_.taken(*peer);
  sessions_.flush(*peer);
}

}  // namespace kvxfer
