// Rights: leases that this agent grants, and expectations, which are rights to one tag's writes.
#include <algorithm>
#include <bit>

#include "core/engine.h"

namespace kvxfer {
namespace {

std::string text_of(const wire::Bytes& tag) {
  return {reinterpret_cast<const char*>(tag.data()), tag.size()};
}

}  // namespace

Result<LeaseId> Engine::grant(Time now, std::optional<SessionKey> holder, RegionId region_id,
                              wire::LeaseMode mode, bool all_blocks, std::span<const std::uint32_t> blocks,
                              Time ttl_ns, bool renewable, LeaseId bearer_id) {
  now_ = now;
  if (closed_) return Status(Code::kClosed, "the agent is closed");
  Peer* peer = holder ? open_peer(*holder) : nullptr;
  if (holder && peer == nullptr) return lost_status(*holder);
  if (!holder && mode == wire::LeaseMode::kWrite)
    return Status(Code::kInvalidArgument,
                  "a lease to write is of one peer, since several that name it could write over each other: "
                  "name the peer, or use expect(tag, blocks) where the writer is not known yet");
  const Region* local = region(region_id);
  if (local == nullptr)
    return Status(Code::kUnknownRegion,
                  "region " + std::to_string(region_id) + " is not registered (any more)");
  if (Status status = check_blocks(blocks, local->num_blocks, false, "blocks", local->name); !status.ok())
    return status;
  if (ttl_ns <= 0) return Status(Code::kInvalidArgument, "a lease lasts more than 0 s");
  if (blocks.size() > wire::kMaxBlocks)
    return Status(Code::kInvalidArgument, "a lease names up to " + std::to_string(wire::kMaxBlocks) +
                                              " blocks; leave them out for all");
  if (bearer_id != 0 && (holder || bearer_id < kBearerBit || bearer_id >= 2 * kBearerBit))
    return Status(Code::kInvalidArgument,
                  "lease id " + std::to_string(bearer_id) +
                      " cannot be given: a lease of no peer takes one, random and in 2**62 to 2**63 - 1");
  if (leases_.contains(bearer_id) || ending_leases_.contains(bearer_id) || ended_leases_.contains(bearer_id))
    return Status(Code::kInvalidArgument,
                  "lease id " + std::to_string(bearer_id) + " was granted before: draw another");
  const LeaseId id = holder ? next_lease_++ : bearer_id != 0 ? bearer_id : draw_bearer_id();
  leases_.emplace(
      id, Lease(id, holder, region_id, mode, all_blocks, blocks, local->num_blocks, ttl_ns, renewable, now));
  arm(time_after(now, ttl_ns), TimerKind::kLease, id, 0, lease_timers_[id]);
  if (peer == nullptr) return id;
  peer->leases.push_back(id);
  send(*peer, wire::Lease{id,
                          region_id,
                          mode,
                          renewable,
                          static_cast<std::uint64_t>(ttl_ns),
                          all_blocks,
                          {blocks.begin(), blocks.end()}});
  if (mode == wire::LeaseMode::kWrite) unpark(*peer);
  flush(*peer);
  return id;
}

LeaseId Engine::draw_bearer_id() {
  for (;;) {
    std::array<std::byte, sizeof(LeaseId)> bytes;
    host_.random(bytes);
    const LeaseId id = (std::bit_cast<LeaseId>(bytes) & (kBearerBit - 1)) | kBearerBit;
    if (!leases_.contains(id) && !ending_leases_.contains(id) && !ended_leases_.contains(id)) return id;
  }
}

void Engine::revoke(Time now, LeaseId id) {
  now_ = now;
  auto found = leases_.find(id);
  if (found == leases_.end()) return;
  end_lease(found->second, LeaseEvent::kRevoke, {Code::kLeaseEnded, "the lease was revoked"});
}

std::optional<LeaseState> Engine::lease_state(LeaseId id) const {
  if (auto found = leases_.find(id); found != leases_.end()) return found->second.state();
  if (ending_leases_.contains(id)) return LeaseState::kEnding;
  if (auto ended = ended_leases_.find(id); ended != ended_leases_.end()) return ended->second;
  return std::nullopt;
}

void Engine::end_lease(Lease& live, LeaseEvent event, const Status& why) {
  if (!live.step(event)) return;
  const Lease lease = std::move(live);
  const LeaseId id = lease.id();
  leases_.erase(id);
  if (auto timer = lease_timers_.find(id); timer != lease_timers_.end()) {
    timers_.erase(timer->second);
    lease_timers_.erase(timer);
  }

  // Its holder's, or every peer's: session keys begin at 1.
  const Key first{lease.holder().value_or(0), 0};
  const auto uses = [&](const Transfer& transfer) {
    return std::find(transfer.leases.begin(), transfer.leases.end(), id) != transfer.leases.end();
  };
  std::vector<Source*> sources;
  for (auto it = sources_.lower_bound(first); it != sources_.end() && lease.admits(it->first.first); ++it)
    if (uses(*it->second)) sources.push_back(it->second.get());
  std::vector<Destination*> destinations;
  for (auto it = destinations_.lower_bound(first); it != destinations_.end() && lease.admits(it->first.first);
       ++it)
    if (uses(*it->second)) destinations.push_back(it->second.get());
  // Those that had ended before and drain are waited for as well.
  const std::size_t num_draining = sources.size() + destinations.size();
  if (num_draining != 0)
    ending_leases_.emplace(id, EndingLease{lease.holder(), lease.state(), why, num_draining});
  for (Source* source : sources) fail_source(*source, TransferEvent::kFail, why, true);
  for (Destination* destination : destinations)
    fail_destination(*destination, TransferEvent::kFail, why, true);
  // That is about the right, and says nothing of bytes.
  if (Peer* peer = lease.holder() ? find_peer(*lease.holder()) : nullptr) {
    std::erase(peer->leases, id);
    peer->ended_on[{lease.region(), lease.mode()}].insert(lease.blocks());
    send(*peer, wire::LeaseEnded{id, why.code()});
    flush(*peer);
  }
  if (num_draining == 0) lease_fenced(id, lease.holder(), lease.state(), why);
}

void Engine::end_leases(RegionId region, const Status& why) {
  std::vector<LeaseId> ids;
  for (const auto& [id, lease] : leases_)
    if (lease.region() == region) ids.push_back(id);
  for (const LeaseId id : ids)
    if (auto lease = leases_.find(id); lease != leases_.end())
      end_lease(lease->second, LeaseEvent::kRegionGone, why);
}

void Engine::renew_leases(Peer& peer) {
  for (LeaseId id : peer.leases)
    if (auto lease = leases_.find(id); lease != leases_.end()) lease->second.renew(now_);
}

void Engine::on(Peer& peer, const wire::Lease& lease) {
  peer.newest_lease_told = std::max(peer.newest_lease_told, lease.id);
  host_.emit({.kind = EventKind::kLeaseGranted,
              .peer = peer.key,
              .region = lease.region,
              .lease = lease.id,
              .held = true});
}

void Engine::on(Peer& peer, const wire::LeaseEnded& ended) {
  host_.emit({.kind = EventKind::kLeaseEnded,
              .peer = peer.key,
              .lease = ended.id,
              .held = true,
              .code = ended.code});
}

// The leases that together cover what the transfer touches here: of the peer's, or the one that it names.
Status Engine::find_leases(const Peer& peer, Transfer& transfer, wire::LeaseMode mode) const {
  const bool write = mode == wire::LeaseMode::kWrite;
  const auto what = [&] { return "of region " + quoted(region(transfer.region)->name); };
  transfer.leases.clear();
  std::vector<const Lease*> candidates;
  const auto consider = [&](LeaseId id) {
    if (auto found = leases_.find(id); found != leases_.end() && found->second.region() == transfer.region &&
                                       found->second.mode() == mode && found->second.admits(peer.key))
      candidates.push_back(&found->second);
  };
  if (transfer.lease_named)
    consider(transfer.lease);
  else
    for (const LeaseId id : peer.leases) consider(id);
  if (transfer.lease_named && candidates.empty())
    return {Code::kLeaseEnded, "lease " + std::to_string(transfer.lease) + " ended, or never let you " +
                                   (write ? "write to blocks " : "read blocks ") + what()};
  auto ended_on = peer.ended_on.find({transfer.region, mode});
  // Blocks of one request mostly share a lease, and mostly one that its poster knew.
  const Lease* last = nullptr;
  for (std::uint32_t pair = 0; pair < transfer.move->grid.num_pairs; ++pair) {
    const std::uint32_t block = write ? transfer.move->dst_block(pair) : transfer.move->src_block(pair);
    if (last != nullptr && last->covers(block)) continue;
    bool came_later = false;
    auto found = std::find_if(candidates.begin(), candidates.end(), [&](const Lease* lease) {
      if (!lease->covers(block)) return false;
      const bool later = !transfer.lease_named && lease->id() > transfer.lease &&
                         ended_on != peer.ended_on.end() && ended_on->second.contains(block);
      came_later = came_later || later;
      return !later;
    });
    if (found == candidates.end()) {
      const std::string named = "block " + std::to_string(block) + " " + what();
      if (came_later)
        return {Code::kLeaseEnded,
                named + " was let to you again after this was posted: post it again, or name the lease"};
      if (transfer.lease_named)
        return {Code::kNotPermitted, "lease " + std::to_string(transfer.lease) + " does not cover " + named};
      return {Code::kNotPermitted,
              write ? "no write lease of yours covers " + named +
                          ": its owner lets you write by region.grant(peer, mode=\"write\") or, for one "
                          "tag, by expect(); what you had may have ended"
                    : "no read lease of yours covers " + named +
                          ": its owner lets you read by region.grant(peer, mode=\"read\"); what you had may "
                          "have ended"};
    }
    if (std::find(transfer.leases.begin(), transfer.leases.end(), (*found)->id()) == transfer.leases.end())
      transfer.leases.push_back((*found)->id());
    const bool known =
        transfer.lease_named || (*found)->id() <= transfer.lease || ended_on == peer.ended_on.end();
    last = known ? *found : nullptr;
  }
  return {};
}

// A write may go ahead under an expectation of its tag, or under leases.
Status Engine::authorize(Peer& peer, Destination& destination) {
  const Move& move = *destination.move;
  Status unlike;
  if (auto tag = tags_.empty() ? tags_.end() : tags_.find(text_of(destination.notify));
      !destination.notify.empty() && tag != tags_.end()) {
    const std::shared_ptr<Expectation>& expectation = expectations_.at(tag->second);
    if (expectation->concerns(peer.key, destination.region)) {
      unlike = expectation->covers(move);
      if (unlike.ok()) {
        if (Status status = expectation->follow(move); !status.ok()) return status;
        destination.expectation = expectation;
        return {};
      }
    }
  }
  Status found = find_leases(peer, destination, wire::LeaseMode::kWrite);
  return found.ok() || unlike.ok() ? found : unlike;
}

void Engine::unpark(Peer& peer) {
  std::vector<Key> parked;
  for (auto it = destinations_.lower_bound({peer.key, 0});
       it != destinations_.end() && it->first.first == peer.key; ++it)
    if (it->second->state == TransferState::kParked) parked.push_back(it->first);
  for (const Key& key : parked) {
    Destination* destination = find_destination(key);
    if (destination == nullptr || destination->state != TransferState::kParked) continue;
    if (Status status = authorize(peer, *destination); status.ok())
      begin_moving(peer, *destination);
    else if (!may_come_true(status))
      fail_destination(*destination, TransferEvent::kFail, std::move(status), true);
  }
}

// Whether a write that is not allowed now may be later: a lease or an expectation may still come. One
// that does not fit what is expected never will.
bool Engine::may_come_true(const Status& refusal) {
  return refusal.code() == Code::kNotPermitted || refusal.code() == Code::kLeaseEnded;
}

Result<std::shared_ptr<Handle>> Engine::expect(Time now, wire::Bytes tag, RegionId region_id,
                                               std::vector<std::uint32_t> blocks, std::uint32_t first_layer,
                                               std::uint32_t num_layers, const Needed& needed,
                                               std::optional<SessionKey> from, Time timeout_ns) {
  now_ = now;
  if (closed_) return Status(Code::kClosed, "the agent is closed");
  const Region* local = region(region_id);
  if (local == nullptr)
    return Status(Code::kUnknownRegion,
                  "region " + std::to_string(region_id) + " is not registered (any more)");
  if (tag.empty() || tag.size() > wire::kMaxNotify)
    return Status(Code::kInvalidArgument, "a tag has 1 to " + std::to_string(wire::kMaxNotify) + " bytes");
  if (tags_.contains(text_of(tag)))
    return Status(Code::kInvalidArgument, "that tag is expected already: use one for each request");
  if (num_layers == 0 || num_layers > wire::kMaxLayers || first_layer > wire::kMaxLayers)
    return Status(Code::kOutOfRange, "an expectation names at least one layer of its region");
  if (blocks.size() > wire::kMaxBlocks)
    return Status(Code::kInvalidArgument,
                  "an expectation names up to " + std::to_string(wire::kMaxBlocks) + " blocks");
  if (timeout_ns <= 0) return Status(Code::kInvalidArgument, "an expectation's timeout is more than 0 s");
  if (from && open_peer(*from) == nullptr) return lost_status(*from);
  if (Status status = check_blocks(blocks, local->num_blocks, true, "blocks", local->name); !status.ok())
    return status;
  auto handle = new_handle(first_layer, num_layers);
  auto expectation = std::make_shared<Expectation>(handle, tag, region_id, from, std::move(blocks),
                                                   first_layer, num_layers, needed);
  expectations_.emplace(handle->id(), expectation);
  tags_.emplace(text_of(tag), handle->id());
  arm(time_after(now, timeout_ns), TimerKind::kExpectation, handle->id(), 0,
      expectation_timers_[handle->id()]);
  std::vector<SessionKey> keys;
  for (const auto& [key, peer] : peers_) keys.push_back(key);
  for (SessionKey key : keys)
    if (Peer* peer = find_peer(key)) unpark(*peer);
  if (expectation->complete() && expectations_.contains(handle->id()))  // of no blocks
    end_expectation(handle->id(), TransferState::kDone, {});
  return handle;
}

void Engine::end_expectation(std::uint64_t id, TransferState state, Status why) {
  auto found = expectations_.find(id);
  if (found == expectations_.end()) return;
  const std::shared_ptr<Expectation> expectation = std::move(found->second);
  expectations_.erase(found);
  tags_.erase(text_of(expectation->tag()));
  if (auto timer = expectation_timers_.find(id); timer != expectation_timers_.end()) {
    timers_.erase(timer->second);
    expectation_timers_.erase(timer);
  }
  BlockSet blocks(region(expectation->region())->num_blocks);
  for (const std::uint32_t block : expectation->blocks()) blocks.insert(block);
  for (auto& [key, peer] : peers_)
    if (!expectation->from() || expectation->from() == key)
      peer->ended_on[{expectation->region(), wire::LeaseMode::kWrite}].insert(blocks);
  if (state != TransferState::kDone) expectation->handle()->let_streams_go(outcome_of(state));
  // Whatever still writes under it loses its right; the handle ends when the last of it has drained.
  std::vector<Destination*> writers;
  for (auto& [key, destination] : destinations_)
    if (destination->expectation == expectation) writers.push_back(destination.get());
  if (writers.empty()) return expectation_fenced(*expectation, state, std::move(why));
  ending_expectations_.emplace(id, EndingExpectation{expectation, state, why, writers.size()});
  for (Destination* writer : writers) {
    Status reason = state == TransferState::kDone
                        ? Status(Code::kRefused, "its blocks had all arrived by other transfers")
                        : why;
    fail_destination(*writer, TransferEvent::kFail, std::move(reason), true);
  }
}

}  // namespace kvxfer
