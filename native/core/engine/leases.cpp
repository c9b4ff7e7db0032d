#include "core/engine/leases.h"

#include <algorithm>
#include <array>
#include <bit>

namespace kvxfer {
namespace {

constexpr std::size_t kMaxEnded = 4096;

}  // namespace

Result<LeaseId> Leases::grant(Peer* holder, RegionId region_id, wire::LeaseMode mode, bool all_blocks,
                              std::span<const std::uint32_t> blocks, Time ttl_ns, bool renewable,
                              LeaseId bearer_id) {
  if (holder == nullptr && mode == wire::LeaseMode::kWrite)
    return Status(Code::kInvalidArgument,
                  "a lease to write is of one peer, since several that name it could write over each other: "
                  "name the peer, or use expect(tag, blocks) where the writer is not known yet");
  const Region* local = regions_.find(region_id);
  if (local == nullptr)
    return Status(Code::kUnknownRegion,
                  "region " + std::to_string(region_id) + " is not registered (any more)");
  if (Status status = check_blocks(blocks, local->num_blocks, false, "blocks", local->name); !status.ok())
    return status;
  if (ttl_ns <= 0) return Status(Code::kInvalidArgument, "a lease lasts more than 0 s");
  if (blocks.size() > wire::kMaxBlocks)
    return Status(Code::kInvalidArgument, "a lease names up to " + std::to_string(wire::kMaxBlocks) +
                                              " blocks; leave them out for all");
  if (bearer_id != 0 && (holder != nullptr || bearer_id < kBearerBit || bearer_id >= 2 * kBearerBit))
    return Status(Code::kInvalidArgument,
                  "lease id " + std::to_string(bearer_id) +
                      " cannot be given: a lease of no peer takes one, random and in 2**62 to 2**63 - 1");
  if (is_known(bearer_id))
    return Status(Code::kInvalidArgument,
                  "lease id " + std::to_string(bearer_id) + " was granted before: draw another");
  const LeaseId id = holder != nullptr ? next_++ : bearer_id != 0 ? bearer_id : draw_bearer_id();
  const std::optional<SessionKey> key = holder != nullptr ? std::optional(holder->key()) : std::nullopt;
  Granted& granted = leases_
                         .emplace(id, Granted{Lease(id, key, region_id, mode, all_blocks, blocks,
                                                    local->num_blocks, ttl_ns, renewable, context_.now),
                                              {}})
                         .first->second;
  context_.timers.set(granted.timer, time_after(context_.now, ttl_ns), TimerKind::kLease, id);
  if (holder == nullptr) return id;
  holders_[holder->key()].leases.push_back(id);
  sessions_.send(*holder, wire::Lease{id,
                                      region_id,
                                      mode,
                                      renewable,
                                      static_cast<std::uint64_t>(ttl_ns),
                                      all_blocks,
                                      {blocks.begin(), blocks.end()}});
  return id;
}

LeaseId Leases::draw_bearer_id() {
  for (;;) {
    std::array<std::byte, sizeof(LeaseId)> bytes;
    context_.host.random(bytes);
    const LeaseId id = (std::bit_cast<LeaseId>(bytes) & (kBearerBit - 1)) | kBearerBit;
    if (!is_known(id)) return id;
  }
}

std::optional<LeaseState> Leases::state(LeaseId id) const {
  if (const Lease* lease = find(id)) return lease->state();
  if (ending_.contains(id)) return LeaseState::kEnding;
  if (auto ended = ended_.find(id); ended != ended_.end()) return ended->second;
  return std::nullopt;
}

// ---- rights -------------------------------------------------------------------------------------

std::vector<const Lease*> Leases::candidates(const TransferEnd& transfer, wire::LeaseMode mode) const {
  std::vector<const Lease*> candidates;
  const SessionKey peer = transfer.key.first;
  const auto consider = [&](LeaseId id) {
    if (const Lease* lease = find(id); lease != nullptr && lease->region() == transfer.region &&
                                       lease->mode() == mode && lease->admits(peer))
      candidates.push_back(lease);
  };
  if (transfer.lease_named)
    consider(transfer.lease);
  else if (const auto holder = holders_.find(peer); holder != holders_.end())
    for (const LeaseId id : holder->second.leases) consider(id);
  return candidates;
}

Status Leases::none_covers(const TransferEnd& transfer, wire::LeaseMode mode, const std::string& what) const {
  const bool write = mode == wire::LeaseMode::kWrite;
  const std::string named = what + "of region " + quoted(regions_.find(transfer.region)->name);
  if (transfer.lease_named)
    return {Code::kLeaseEnded, "lease " + std::to_string(transfer.lease) + " ended, or never let you " +
                                   (write ? "write to " : "read ") + named};
  return {Code::kNotPermitted,
          write ? "no write lease of yours covers " + named +
                      ": its owner lets you write by region.grant(peer, mode=\"write\") or, for one "
                      "tag, by expect(); what you had may have ended"
                : "no read lease of yours covers " + named +
                      ": its owner lets you read by region.grant(peer, mode=\"read\"); what you had may "
                      "have ended"};
}

Status Leases::find_any(const TransferEnd& transfer, wire::LeaseMode mode) const {
  if (transfer.move->grid.num_pairs == 0 && !transfer.lease_named) return {};
  return candidates(transfer, mode).empty() ? none_covers(transfer, mode, "blocks ") : Status();
}

Status Leases::find(TransferEnd& transfer, wire::LeaseMode mode) const {
  const bool write = mode == wire::LeaseMode::kWrite;
  const std::vector<const Lease*> candidates = this->candidates(transfer, mode);
  transfer.leases.clear();
  if (transfer.lease_named && candidates.empty()) return none_covers(transfer, mode, "blocks ");
  const auto holder = holders_.find(transfer.key.first);
  const BitSet* ended_on = nullptr;
  if (holder != holders_.end())
    if (auto found = holder->second.ended_on.find({transfer.region, mode});
        found != holder->second.ended_on.end())
      ended_on = &found->second;
  // Blocks of one request mostly share a lease, and mostly one that its poster knew.
  const Lease* last = nullptr;
  for (std::uint32_t pair = 0; pair < transfer.move->grid.num_pairs; ++pair) {
    const std::uint32_t block = write ? transfer.move->dst_block(pair) : transfer.move->src_block(pair);
    if (last != nullptr && last->covers(block)) continue;
    bool came_later = false;
    auto found = std::find_if(candidates.begin(), candidates.end(), [&](const Lease* lease) {
      if (!lease->covers(block)) return false;
      const bool later = !transfer.lease_named && lease->id() > transfer.lease && ended_on != nullptr &&
                         ended_on->contains(block);
      came_later = came_later || later;
      return !later;
    });
    if (found == candidates.end()) {
      const std::string block_in_words = "block " + std::to_string(block) + " ";
      const std::string named = block_in_words + "of region " + quoted(regions_.find(transfer.region)->name);
      if (came_later)
        return {Code::kLeaseEnded,
                named + " was let to you again after this was posted: post it again, or name the lease"};
      if (transfer.lease_named)
        return {Code::kNotPermitted, "lease " + std::to_string(transfer.lease) + " does not cover " + named};
      return none_covers(transfer, mode, block_in_words);
    }
    if (std::find(transfer.leases.begin(), transfer.leases.end(), (*found)->id()) == transfer.leases.end())
      transfer.leases.push_back((*found)->id());
    const bool known = transfer.lease_named || (*found)->id() <= transfer.lease || ended_on == nullptr;
    last = known ? *found : nullptr;
  }
  return {};
}

Leases::Window Leases::window(const TransferEnd& transfer) const {
  Time whole = kNever, left = kNever;
  bool renewable = true;
  for (const LeaseId id : transfer.leases) {
    const Lease& lease = *find(id);
    whole = std::min(whole, lease.ttl_ns());
    left = std::min(left, lease.expires_at() - context_.now);
    renewable = renewable && lease.renewable();
  }
  return {std::max<Time>(0, renewable ? whole : left), renewable};
}

void Leases::renew(SessionKey holder) {
  auto found = holders_.find(holder);
  if (found == holders_.end()) return;
  for (const LeaseId id : found->second.leases)
    if (auto granted = leases_.find(id); granted != leases_.end()) granted->second.lease.renew(context_.now);
}

// ---- ends ---------------------------------------------------------------------------------------

std::vector<LeaseId> Leases::of_region(RegionId region) const {
  std::vector<LeaseId> ids;
  for (const auto& [id, granted] : leases_)
    if (granted.lease.region() == region) ids.push_back(id);
  return ids;
}

std::vector<LeaseId> Leases::of_holder(SessionKey holder) const {
  auto found = holders_.find(holder);
  return found == holders_.end() ? std::vector<LeaseId>{} : found->second.leases;
}

bool Leases::has_expired(LeaseId id, Status& why) {
  auto found = leases_.find(id);
  if (found == leases_.end()) return false;
  Granted& granted = found->second;
  granted.timer.reset();
  if (granted.lease.expires_at() > context_.now) {
    context_.timers.set(granted.timer, granted.lease.expires_at(), TimerKind::kLease, id);
    return false;
  }
  why = {Code::kLeaseEnded,
         granted.lease.renewable() ? "the lease expired: its holder did not renew it" : "the lease expired"};
  return true;
}

std::optional<Lease> Leases::take(LeaseId id, LeaseEvent event, const Status& why, std::size_t num_draining) {
  auto found = leases_.find(id);
  if (found == leases_.end()) return std::nullopt;
  // First what waits for its works, which takes memory.
  Ending& ending =
      ending_.emplace(id, Ending{found->second.lease.holder(), LeaseState::kEnding, why, num_draining})
          .first->second;
  const bool has_ended = !found->second.lease.step(event);
  ending.state = found->second.lease.state();
  if (has_ended || num_draining == 0) ending_.erase(id);
  if (has_ended) return std::nullopt;
  context_.timers.clear(found->second.timer);
  std::optional<Lease> lease(std::move(found->second.lease));
  leases_.erase(found);
  return lease;
}

void Leases::tell_ended(const Lease& lease, const Status& why, std::size_t num_draining) {
  if (Peer* peer = lease.holder() ? sessions_.find(*lease.holder()) : nullptr)
    context_.serve(peer->key(), [&] {
      std::erase(holders_[peer->key()].leases, lease.id());
      remember_ended(peer->key(), lease.region(), lease.mode(), lease.blocks());
      sessions_.send(*peer, wire::LeaseEnded{lease.id(), why.code()});
      sessions_.flush(*peer);
    });
  if (num_draining == 0) fenced(lease.id(), lease.holder(), lease.state(), why);
}

void Leases::drained(const TransferEnd& transfer) {
  if (ending_.empty()) return;
  for (const LeaseId id : transfer.leases)
    if (auto found = ending_.find(id); found != ending_.end() && --found->second.num_draining == 0) {
      const Ending lease = std::move(found->second);
      ending_.erase(found);
      fenced(id, lease.holder, lease.state, lease.why);
    }
}

void Leases::fenced(LeaseId id, std::optional<SessionKey> holder, LeaseState state, const Status& why) {
  context_.serve(kNobody, [&] {  // memory that is not there for the news is nothing to the fence
    ended_[id] = state;
    ended_ids_.push_back(id);
    if (ended_ids_.size() > kMaxEnded) {
      ended_.erase(ended_ids_.front());
      ended_ids_.pop_front();
    }
    context_.host.emit({.kind = EventKind::kLeaseEnded,
                        .peer = holder.value_or(0),
                        .lease = id,
                        .code = why.code(),
                        .message = why.message()});
  });
}

// ---- what peers know and told --------------------------------------------------------------------

void Leases::forget_region(SessionKey holder, RegionId region) {
  auto found = holders_.find(holder);
  if (found == holders_.end()) return;
  found->second.ended_on.erase({region, wire::LeaseMode::kRead});
  found->second.ended_on.erase({region, wire::LeaseMode::kWrite});
}

void Leases::told(const Peer& peer, const wire::Lease& lease) {
  LeaseId& newest = holders_[peer.key()].newest_told;
  newest = std::max(newest, lease.id);
}

LeaseId Leases::newest_told(SessionKey grantor) const {
  auto found = holders_.find(grantor);
  return found == holders_.end() ? 0 : found->second.newest_told;
}

}  // namespace kvxfer
