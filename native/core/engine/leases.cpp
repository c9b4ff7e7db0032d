#include "core/engine/leases.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

namespace kvxfer {
namespace {

constexpr std::size_t kMaxEnded = 4096;

const std::string kUnnamed;

// Names the peers that may use a bearer's lease.
std::string in_words(const Lease& lease) {
  const std::string named = lease.bearer_name().empty() ? "any agent" : quoted(lease.bearer_name());
  return lease.allow().empty() ? named : named + " whose certificate is for " + lease.allow();
}

}  // namespace

Status Leases::check_terms(const LeaseTerms& terms) const {
  if (!terms.holder && terms.mode == wire::LeaseMode::kWrite)
    return {Code::kInvalidArgument,
            "a write lease is for one peer, because several holders could overwrite each other's pages: name "
            "the peer, or use expect(tag, blocks) if the writer is not known yet"};
  const Region* local = regions_.find(terms.region);
  if (local == nullptr)
    return {Code::kUnknownRegion, "region " + std::to_string(terms.region) + " is not registered (any more)"};
  if (Status status = check_blocks(terms.blocks, local->num_blocks, false, "blocks", local->name);
      !status.ok())
    return status;
  if (terms.ttl_ns <= 0) return {Code::kInvalidArgument, "a lease lasts more than 0 s"};
  if (terms.blocks.size() > wire::kMaxBlocks)
    return {Code::kInvalidArgument,
            "a lease names up to " + std::to_string(wire::kMaxBlocks) + " blocks; leave them out for all"};
  if (terms.holder && (terms.bearer_id != 0 || !terms.bearer_name.empty()))
    return {Code::kInvalidArgument, "a lease for one peer takes no drawn token and no other holder"};
  if (terms.bearer_id != 0 && (terms.bearer_id < kBearerBit || terms.bearer_id >= 2 * kBearerBit))
    return {Code::kInvalidArgument, "the lease's number is not one that was drawn for a bearer's lease"};
  if (terms.bearer_name.size() > wire::kMaxName)
    return {Code::kInvalidArgument,
            "a holder's name has at most " + std::to_string(wire::kMaxName) + " bytes"};
  if (!terms.allow.empty()) {
    if (terms.holder)
      return {Code::kInvalidArgument, "a lease for one peer is for that peer only: leave allow out"};
    if (const Result<tls::Pattern> allow = tls::Pattern::parse(terms.allow); !allow.ok())
      return allow.status();
  }
  if (is_known(terms.bearer_id))
    return {Code::kInvalidArgument, "this lease's token was already granted: draw another one"};
  return {};
}

Result<LeaseId> Leases::grant(Peer* holder, LeaseTerms terms) {
  if (Status status = check_terms(terms); !status.ok()) return status;
  if (holder != nullptr)
    if (Status status = sessions_.check_room(*holder, terms.blocks.size_bytes()); !status.ok()) return status;
  const LeaseId id = holder != nullptr ? next_++ : terms.bearer_id != 0 ? terms.bearer_id : draw_bearer_id();
  const std::uint32_t num_blocks = regions_.find(terms.region)->num_blocks;
  Granted& granted =
      leases_.emplace(id, Granted{Lease(id, terms, num_blocks, context_.now), {}, 0, false, {}})
          .first->second;
  try {
    by_region_.emplace(terms.region, id);
    context_.timers.set(granted.timer, granted.lease.expires_at(), TimerKind::kLease, id);
    if (holder == nullptr) return id;
    list(granted, num_blocks, terms.blocks);
    granted.acknowledged_by = holder->session().next_heartbeat();
    sessions_.send(*holder, wire::Lease{id,
                                        terms.region,
                                        terms.mode,
                                        terms.renewable,
                                        static_cast<std::uint64_t>(terms.ttl_ns),
                                        terms.all_blocks,
                                        {terms.blocks.begin(), terms.blocks.end()}});
  } catch (...) {  // its holder has not heard of it
    remove(id);
    throw;
  }
  return id;
}

void Leases::remove(LeaseId id) noexcept {
  const auto found = leases_.find(id);
  context_.timers.clear(found->second.timer);
  unlist(found->second);
  by_region_.erase({found->second.lease.region(), id});
  leases_.erase(found);
}

// Lists its blocks last, when nothing takes memory any more.
void Leases::list(Granted& granted, std::uint32_t num_blocks, std::span<const std::uint32_t> blocks) {
  const Lease& lease = granted.lease;
  Holder& holder = holders_[*lease.holder()];
  holder.leases.insert(lease.id());
  Covering& covering = holder.covering[{lease.region(), lease.mode()}];
  covering.leases.insert(lease.id());
  if (!lease.num_blocks()) {
    covering.of_all_blocks.insert(lease.id());
    return;
  }
  if (covering.of_block.size() == 0) covering.of_block = decltype(covering.of_block)(num_blocks);
  for (const std::uint32_t block : blocks) covering.of_block.at(block);
  granted.of_blocks = std::vector<OfBlock>(blocks.size());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    OfBlock& of_block = granted.of_blocks[i];
    of_block.lease = &lease;
    of_block.among = &covering.of_block.at(blocks[i]);
    of_block.among->push_back(of_block);
  }
}

void Leases::unlist(Granted& granted) noexcept {
  const Lease& lease = granted.lease;
  const auto holder = lease.holder() ? holders_.find(*lease.holder()) : holders_.end();
  if (holder == holders_.end()) return;
  holder->second.leases.erase(lease.id());
  const auto found = holder->second.covering.find({lease.region(), lease.mode()});
  if (found == holder->second.covering.end()) return;
  Covering& covering = found->second;
  for (OfBlock& of_block : granted.of_blocks) of_block.among->remove(of_block);
  granted.of_blocks.clear();
  covering.leases.erase(lease.id());
  covering.of_all_blocks.erase(lease.id());
  if (covering.leases.empty()) holder->second.covering.erase(found);
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

bool Leases::await_acknowledged(LeaseId id) {
  const auto found = leases_.find(id);
  if (found == leases_.end() || !found->second.lease.holder()) return true;
  Granted& granted = found->second;
  Peer& holder = *sessions_.find(*granted.lease.holder());
  if (holder.session().acknowledged_heartbeat() >= granted.acknowledged_by) return true;
  if (!granted.awaited) holders_[holder.key()].awaited.push_back(id);
  granted.awaited = true;
  if (holder.session().next_heartbeat() <= granted.acknowledged_by) sessions_.hurry_heartbeat(holder);
  return false;
}

void Leases::acknowledged(const Peer& holder) {
  const auto found = holders_.find(holder.key());
  if (found == holders_.end() || found->second.awaited.empty()) return;
  std::erase_if(found->second.awaited, [&](LeaseId id) {
    const auto granted = leases_.find(id);
    if (granted == leases_.end()) return true;
    if (granted->second.acknowledged_by > holder.session().acknowledged_heartbeat()) return false;
    granted->second.awaited = false;
    context_.host.emit({.kind = EventKind::kLeaseAcknowledged, .lease = id});
    return true;
  });
}

// ---- rights -------------------------------------------------------------------------------------

const std::string& Leases::name_of(SessionKey peer) const {
  const Peer* const session = sessions_.find(peer);
  return session != nullptr ? session->name() : kUnnamed;
}

std::string Leases::by_certificate(SessionKey peer) const {
  const std::string& identity = identity_of(peer);
  return identity.empty() ? "" : " (" + identity + ")";
}

const std::string& Leases::identity_of(SessionKey peer) const {
  const Peer* const session = sessions_.find(peer);
  return session != nullptr ? session->session().identity() : kUnnamed;
}

const Lease* Leases::newest_known(const TransferEnd& transfer, wire::LeaseMode mode) const {
  if (transfer.lease_named) return nullptr;
  const Lease* const lease = find(transfer.lease);
  return lease != nullptr && lease->holder() == transfer.key.first && lease->region() == transfer.region &&
                 lease->mode() == mode
             ? lease
             : nullptr;
}

const Lease* Leases::named(const TransferEnd& transfer, wire::LeaseMode mode) const {
  const Lease* const lease = transfer.lease_named ? find(transfer.lease) : nullptr;
  return lease != nullptr && lease->region() == transfer.region && lease->mode() == mode &&
                 admits(*lease, transfer.key.first)
             ? lease
             : nullptr;
}

const Leases::Covering* Leases::covering(const TransferEnd& transfer, wire::LeaseMode mode) const {
  const auto holder = transfer.lease_named ? holders_.end() : holders_.find(transfer.key.first);
  if (holder == holders_.end()) return nullptr;
  const auto found = holder->second.covering.find({transfer.region, mode});
  return found == holder->second.covering.end() ? nullptr : &found->second;
}

const Lease* Leases::oldest(const Covering& covering, std::uint32_t block) const {
  const OfBlock* const first = covering.of_block.get(block).first();
  const Lease* const of_block = first == nullptr ? nullptr : first->lease;
  if (covering.of_all_blocks.empty()) return of_block;
  const LeaseId of_all = *covering.of_all_blocks.begin();
  return of_block != nullptr && of_block->id() < of_all ? of_block : find(of_all);
}

Status Leases::none_covers(const TransferEnd& transfer, wire::LeaseMode mode, const std::string& what) const {
  const bool write = mode == wire::LeaseMode::kWrite;
  const std::string named = what + "of region " + quoted(regions_.find(transfer.region)->name);
  if (transfer.lease_named) {
    // A peer that knows a drawn number was given it. A counted number may be a guess, so its sender is
    // told nothing.
    const Lease* lease = find(transfer.lease);
    if (lease != nullptr && !lease->holder() && !admits(*lease, transfer.key.first))
      return {Code::kNotPermitted,
              "the named lease is for " + in_words(*lease) + ", and you are " +
                  quoted(name_of(transfer.key.first)) + by_certificate(transfer.key.first) +
                  ": its owner must grant a lease for your name, or name your certificate in allow="};
    return {Code::kLeaseEnded, std::string("the named lease has ended, or does not permit you to ") +
                                   (write ? "write to " : "read ") + named};
  }
  return {Code::kNotPermitted,
          write ? "no write lease of yours covers " + named +
                      ": its owner permits writes with region.grant(peer, mode=\"write\") "
                      "or, for one tag, with expect(); an earlier lease may have ended"
                : "no read lease of yours covers " + named +
                      ": its owner permits reads with region.grant(). A read uses a lease "
                      "for a name only if it passes the token, as lease=. An earlier lease "
                      "may have ended"};
}

Status Leases::find_any(const TransferEnd& transfer, wire::LeaseMode mode) const {
  if (transfer.move->grid.num_pairs == 0 && !transfer.lease_named) return {};
  if (newest_known(transfer, mode) != nullptr) return {};
  const bool any = named(transfer, mode) != nullptr || covering(transfer, mode) != nullptr;
  return any ? Status() : none_covers(transfer, mode, "blocks ");
}

Status Leases::find(TransferEnd& transfer, wire::LeaseMode mode) const {
  const auto block_of = [&](std::uint32_t pair) {
    return mode == wire::LeaseMode::kWrite ? transfer.move->dst_block(pair) : transfer.move->src_block(pair);
  };
  const std::uint32_t num_pairs = transfer.move->grid.num_pairs;
  transfer.leases.clear();
  if (const Lease* newest = newest_known(transfer, mode); newest != nullptr && num_pairs != 0) {
    std::uint32_t pair = 0;
    while (pair != num_pairs && newest->covers(block_of(pair))) ++pair;
    if (pair == num_pairs) {
      transfer.leases.push_back(newest->id());
      return {};
    }
  }
  const Lease* const only = named(transfer, mode);
  if (transfer.lease_named && only == nullptr) return none_covers(transfer, mode, "blocks ");
  const Covering* const covering = this->covering(transfer, mode);
  const EndedRights::OfSession ended_on = ended_rights_.of(transfer.key.first, transfer.region, mode);
  // Blocks of one request mostly share a lease, and mostly one that the poster knew.
  const Lease* last = nullptr;
  for (std::uint32_t pair = 0; pair < num_pairs; ++pair) {
    const std::uint32_t block = block_of(pair);
    if (last != nullptr && last->covers(block)) continue;
    // If the oldest of those that cover the block came later than the transfer, all of them did.
    const Lease* found = nullptr;
    if (only != nullptr)
      found = only->covers(block) ? only : nullptr;
    else if (covering != nullptr)
      found = oldest(*covering, block);
    const bool came_later =
        found != nullptr && !transfer.lease_named && found->id() > transfer.lease && ended_on.contains(block);
    if (found == nullptr || came_later) {
      transfer.lacks_block = block;
      const std::string block_in_words = "block " + std::to_string(block) + " ";
      const std::string named = block_in_words + "of region " + quoted(regions_.find(transfer.region)->name);
      if (came_later)
        return {
            Code::kLeaseEnded,
            named +
                " was leased to you again after this transfer was posted: post it again, or name the lease"};
      if (transfer.lease_named) return {Code::kNotPermitted, "the named lease does not cover " + named};
      return none_covers(transfer, mode, block_in_words);
    }
    transfer.leases.push_back(found->id());
    const bool known = transfer.lease_named || found->id() <= transfer.lease || !ended_on.any();
    last = known ? found : nullptr;
  }
  std::sort(transfer.leases.begin(), transfer.leases.end());
  transfer.leases.erase(std::unique(transfer.leases.begin(), transfer.leases.end()), transfer.leases.end());
  return {};
}

Leases::Window Leases::window(const TransferEnd& transfer) const {
  Time whole = kNever, left = kNever;
  bool renewable = true;
  for (const LeaseId id : transfer.leases) {
    const Lease& lease = *find(id);
    whole = std::min(whole, lease.ttl_ns());
    const Time renewed = lease.renewable() ? time_after(heard_at(lease), lease.ttl_ns()) : 0;
    left = std::min(left, std::max(lease.expires_at(), renewed) - context_.now);
    renewable = renewable && lease.renewable();
  }
  return {std::max<Time>(0, renewable ? whole : left), renewable};
}

void Leases::renew(SessionKey holder) {
  if (auto found = holders_.find(holder); found != holders_.end()) found->second.heard_at = context_.now;
}

Time Leases::heard_at(const Lease& lease) const {
  const auto found = lease.holder() ? holders_.find(*lease.holder()) : holders_.end();
  return found == holders_.end() ? 0 : found->second.heard_at;
}

// ---- ends ---------------------------------------------------------------------------------------

std::vector<LeaseId> Leases::of_region(RegionId region) const {
  std::vector<LeaseId> ids;
  for (auto each = by_region_.lower_bound({region, 0}); each != by_region_.end() && each->first == region;
       ++each)
    ids.push_back(each->second);
  return ids;
}

void Leases::let_in(const TransferEnd& transfer) {
  for (const LeaseId id : transfer.leases) spare_.insert(transfers_, std::pair(id, transfer.key));
}

std::vector<TransferKey> Leases::transfers_under(LeaseId id) const {
  std::vector<TransferKey> keys;
  for (auto each = transfers_.lower_bound({id, {}}); each != transfers_.end() && each->first == id; ++each)
    keys.push_back(each->second);
  return keys;
}

std::vector<LeaseId> Leases::of_holder(SessionKey holder) const {
  auto found = holders_.find(holder);
  if (found == holders_.end()) return {};
  return {found->second.leases.begin(), found->second.leases.end()};
}

bool Leases::extend(LeaseId id, Time ttl_ns) {
  auto found = leases_.find(id);
  if (found == leases_.end() || !found->second.lease.active()) return false;
  found->second.lease.extend(time_after(context_.now, ttl_ns));
  return true;
}

bool Leases::has_expired(LeaseId id, Status& why) {
  auto found = leases_.find(id);
  if (found == leases_.end()) return false;
  Granted& granted = found->second;
  granted.timer.reset();
  granted.lease.renew(heard_at(granted.lease));
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
  // First makes the entry that waits for its works, which takes memory.
  const Lease& taken = found->second.lease;
  Ending& ending =
      ending_
          .emplace(id, Ending{taken.holder(), LeaseState::kEnding, why, num_draining, taken.region(),
                              taken.mode(), taken.num_blocks(), taken.bearer_name()})
          .first->second;
  const bool has_ended = !found->second.lease.step(event);
  ending.state = found->second.lease.state();
  if (has_ended || num_draining == 0) ending_.erase(id);
  if (has_ended) return std::nullopt;
  const bool awaited = found->second.awaited;
  unlist(found->second);
  std::optional<Lease> lease(std::move(found->second.lease));
  remove(id);
  if (awaited)
    context_.serve(kNobody,
                   [&] { context_.host.emit({.kind = EventKind::kLeaseAcknowledged, .lease = id}); });
  return lease;
}

void Leases::tell_ended(const Lease& lease, const Status& why, std::size_t num_draining) {
  if (Peer* peer = lease.holder() ? sessions_.find(*lease.holder()) : nullptr)
    context_.serve(peer->key(), [&] {
      ended_rights_.add(peer->key(), lease.region(), lease.mode(), lease.blocks());
      sessions_.send(*peer, wire::LeaseEnded{lease.id(), why.code()});
      sessions_.flush(*peer);
    });
  if (num_draining == 0) fenced(lease.id(), lease.holder(), lease.state(), why);
}

void Leases::drained(const TransferEnd& transfer) {
  for (const LeaseId id : transfer.leases) {
    const auto under = transfers_.find({id, transfer.key});
    if (under == transfers_.end()) continue;  // it never began under a lease
    spare_.erase(transfers_, under);
    if (auto found = ending_.find(id); found != ending_.end() && --found->second.num_draining == 0) {
      const Ending lease = std::move(found->second);
      ending_.erase(found);
      fenced(id, lease.holder, lease.state, lease.why);
    }
  }
}

void Leases::fenced(LeaseId id, std::optional<SessionKey> holder, LeaseState state, const Status& why) {
  context_.serve(kNobody, [&] {  // if memory is lacking for the news, the fence is complete all the same
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

void Leases::told(const Peer& peer, const wire::Lease& lease) {
  Holder& grantor = holders_[peer.key()];
  grantor.newest_granted = std::max(grantor.newest_granted, lease.id);
  if (lease.renewable && lease.ttl_ns < static_cast<std::uint64_t>(grantor.shortest_ns))
    grantor.shortest_ns = static_cast<Time>(lease.ttl_ns);
}

Time Leases::renewal_ns(SessionKey grantor) const {
  const auto found = holders_.find(grantor);
  return found == holders_.end() || found->second.shortest_ns == kNever ? kNever
                                                                        : found->second.shortest_ns / 8;
}

LeaseId Leases::newest_granted(SessionKey grantor) const {
  auto found = holders_.find(grantor);
  return found == holders_.end() ? 0 : found->second.newest_granted;
}

// ---- views ---------------------------------------------------------------------------------------

// Both maps are ordered by number: the next lease is the lower of their next ones.
bool Leases::append_views(LeaseId& last, std::size_t most, std::vector<LeaseView>& views) const {
  auto active = leases_.upper_bound(last);
  auto ending = ending_.upper_bound(last);
  for (; most != 0 && (active != leases_.end() || ending != ending_.end()); --most) {
    LeaseView view;
    if (ending == ending_.end() || (active != leases_.end() && active->first < ending->first)) {
      const Lease& lease = active->second.lease;
      Time until = lease.expires_at();
      if (lease.renewable()) until = std::max(until, time_after(heard_at(lease), lease.ttl_ns()));
      view = {
          active->first, lease.holder(),     lease.bearer_name(), lease.region(),
          lease.mode(),  lease.num_blocks(), lease.state(),       std::max<Time>(until - context_.now, 0)};
      ++active;
    } else {
      const Ending& lease = ending->second;
      view = {ending->first, lease.holder,     lease.bearer_name,   lease.region,
              lease.mode,    lease.num_blocks, LeaseState::kEnding, 0};
      ++ending;
    }
    last = view.id;
    if (view.holder) view.name = name_of(*view.holder);
    views.push_back(std::move(view));
  }
  return most == 0;
}

}  // namespace kvxfer
