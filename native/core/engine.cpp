#include "core/engine.h"

#include <algorithm>
#include <type_traits>

namespace kvxfer {
namespace {

// Enough for callers that ask why a peer went; a thousand reconnects must not grow an agent.
constexpr std::size_t kMaxLost = 64;
constexpr std::size_t kMaxPeerPrograms = 4096;  // a pair of layouts each
constexpr std::size_t kMaxPeerRegions = 4096;
// Of a process that dies the kernel ends one socket after the other, within a millisecond unless the machine
// is busy: only later is a rail that went down the rail's loss and not the peer's.
constexpr Time kAfterRailDown = 100'000'000;

std::string unreleased(const Move& move, std::uint32_t layers_ready, const char* where) {
  return std::to_string(move.grid.num_layers - layers_ready) + " of its " +
         std::to_string(move.grid.num_layers) + " layers had not been released " + where +
         " when the transfer's time was over";
}

}  // namespace

Engine::Engine(EngineConfig config, EngineHost& host) : config_(std::move(config)), host_(host) {
  free_slots_.reserve(FenceTable::kNumSlots);
  for (std::uint32_t slot = FenceTable::kNumSlots; slot-- > 0;) free_slots_.push_back(slot);
}

Engine::~Engine() = default;

// ---- connections ------------------------------------------------------------------------------

SessionKey Engine::add_session(Time now, SessionRole role) {
  now_ = now;
  auto peer = std::make_unique<Peer>();
  peer->key = next_session_++;
  peer->session = std::make_unique<Session>(role, config_.session, now,
                                            [this](std::span<std::byte> bytes) { host_.random(bytes); });
  // Both ends number transfers in one space: the initiator of the session takes the even numbers.
  peer->next_transfer = role == SessionRole::kInitiator ? 2 : 1;
  Peer& added = *peers_.emplace(peer->key, std::move(peer)).first->second;
  flush(added);
  return added.key;
}

void Engine::on_dialling(Time now, SessionKey key) {
  now_ = now;
  Peer* peer = find_peer(key);
  if (peer == nullptr) return;
  peer->session->connecting();
  schedule_session(*peer);
}

void Engine::on_connected(Time now, SessionKey key) {
  now_ = now;
  Peer* peer = find_peer(key);
  if (peer == nullptr) return;
  peer->session->connected(now);
  schedule_session(*peer);
}

void Engine::on_frame(Time now, SessionKey key, wire::ByteSpan frame) {
  now_ = now;
  Peer* peer = find_peer(key);
  if (peer == nullptr) return;
  Result<std::optional<wire::Message>> received = peer->session->receive(now, frame);
  if (!received.ok()) {
    ++stats_.frames_refused;
    flush(*peer);
    lose(key, received.status());
    return;
  }
  if (!peer->was_open && peer->session->state() == SessionState::kOpen) opened(*peer);
  if (Time heard = peer->session->last_heartbeat_at(); heard != peer->heartbeat_seen) {
    peer->heartbeat_seen = heard;
    renew_leases(*peer);
  }
  if (std::optional<wire::Message> message = std::move(received).value())
    on_message(*peer, std::move(*message));
  if ((peer = find_peer(key)) != nullptr) flush(*peer);
}

void Engine::on_disconnected(Time now, SessionKey key, std::string why) {
  now_ = now;
  Peer* peer = find_peer(key);
  if (peer == nullptr) return;
  const bool known = peer->was_open;
  peer->session->connection_lost();
  Status reason = peer->session->reason();
  if (reason.ok() || known)
    reason = {
        Code::kPeerLost,
        "the connection to " + (known ? quoted(peer->session->peer().name) : "the peer") + " ended: " + why};
  lose(key, std::move(reason));
}

void Engine::on_unreachable(Time now, SessionKey key, std::string why) {
  now_ = now;
  Peer* peer = find_peer(key);
  if (peer == nullptr) return;
  peer->session->connection_lost();
  lose(key, {Code::kUnreachable, std::move(why)});
}

void Engine::end_session(Time now, SessionKey key, Code code, std::string text) {
  now_ = now;
  Peer* peer = find_peer(key);
  if (peer == nullptr) return;
  peer->session->close(now, code, text);
  flush(*peer);
  lose(key, {code, std::move(text)});
}

std::uint32_t Engine::max_body(SessionKey key) const {
  const Peer* peer = find_peer(key);
  return peer == nullptr ? 0 : peer->session->max_body();
}

Session* Engine::session(SessionKey key) {
  Peer* peer = find_peer(key);
  return peer == nullptr ? nullptr : peer->session.get();
}

Session* Engine::find_session(const wire::Id128& id, SessionKey& key) {
  for (auto& [number, peer] : peers_)
    if (peer->session->state() == SessionState::kOpen && peer->session->id() == id) {
      key = number;
      return peer->session.get();
    }
  return nullptr;
}

void Engine::flush(Peer& peer) {
  peer.stirred = false;
  peer.session->take_output(outgoing_);
  for (wire::Bytes& frame : outgoing_) host_.send(peer.key, std::move(frame));
  schedule_session(peer);
}

void Engine::send(Peer& peer, const wire::Message& message) {
  if (peer.session->state() != SessionState::kOpen) return;
  peer.session->send(now_, message);
  if (!std::exchange(peer.stirred, true)) stirred_.push_back(peer.key);
}

void Engine::schedule_session(Peer& peer) {
  // Deadlines move with every frame; a timer that fires early only asks again.
  const Time at = peer.session->next_deadline();
  if (peer.timer_at != kNever && peer.timer_at <= at) return;
  if (peer.timer_at != kNever) timers_.erase(peer.timer);
  peer.timer_at = at;
  if (at != kNever) arm(at, TimerKind::kSession, peer.key, 0, peer.timer);
}

void Engine::opened(Peer& peer) {
  peer.was_open = true;
  const wire::Identity& identity = peer.session->peer();
  // A restarted process is a new peer, and what the old one held is over.
  std::vector<SessionKey> replaced;
  for (auto& [key, other] : peers_)
    if (key != peer.key && other->was_open && other->session->peer().name == identity.name &&
        other->session->peer().incarnation != identity.incarnation)
      replaced.push_back(key);
  for (SessionKey key : replaced)
    lose(key, {Code::kPeerRestarted,
               "peer " + quoted(identity.name) + " was restarted: it came back as a new process"});
  for (const auto& [id, region] : regions_) send(peer, region->described());
  send(peer, wire::RegionsEnd{});
  if (peer.session->role() == SessionRole::kAcceptor) host_.session_open(peer.key);
}

void Engine::check_up(Peer& peer) {
  if (peer.up || !peer.regions_known || peer.rails_pending != 0) return;
  if (peer.session->role() == SessionRole::kInitiator && peer.rails.empty()) {
    std::string why = "no rail to " + quoted(peer.session->peer().name) + " came up";
    for (const std::string& note : peer.notes) why += "; " + note;
    end_session(now_, peer.key, Code::kUnreachable, why);
    return;
  }
  peer.up = true;
  host_.emit({.kind = EventKind::kPeerUp, .peer = peer.key});
}

void Engine::lose(SessionKey key, Status reason) {
  auto found = peers_.find(key);
  if (found == peers_.end()) return;
  std::unique_ptr<Peer> peer = std::move(found->second);
  peers_.erase(found);
  if (peer->timer_at != kNever) timers_.erase(peer->timer);

  PeerView view;
  view.name = peer->session->peer().name;
  view.incarnation = peer->session->peer().incarnation;
  view.state = "lost";
  view.notes = peer->notes;
  view.reason = reason;
  lost_[key] = std::move(view);
  if (lost_.size() > kMaxLost) lost_.erase(lost_.begin());

  // Local fences first: from here on nothing begins for this session, and what is under way ends.
  std::vector<Source*> sources;
  for (auto it = sources_.lower_bound({key, 0}); it != sources_.end() && it->first.first == key; ++it)
    sources.push_back(it->second.get());
  for (Source* source : sources) fail_source(*source, TransferEvent::kFail, reason, false);
  std::vector<Destination*> destinations;
  for (auto it = destinations_.lower_bound({key, 0}); it != destinations_.end() && it->first.first == key;
       ++it)
    destinations.push_back(it->second.get());
  for (Destination* destination : destinations)
    fail_destination(*destination, TransferEvent::kFail, reason, false);
  for (LeaseId id : peer->leases)
    if (auto lease = leases_.find(id); lease != leases_.end())
      end_lease(lease->second, LeaseEvent::kPeerLost, reason);
  std::vector<std::uint64_t> awaited;
  for (auto& [handle, expectation] : expectations_)
    if (expectation->from() == key) awaited.push_back(handle);
  for (std::uint64_t handle : awaited) end_expectation(handle, TransferState::kFailed, reason);

  // In this order: a peer that listens still hears why before its rails end.
  host_.close_session(key);
  for (RailId rail : peer->rails) {
    host_.drop_rail(rail);
    forget_rail(rail);
  }
  host_.emit({.kind = EventKind::kPeerLost, .peer = key, .code = reason.code(), .message = reason.message()});
  bury(std::move(peer));
}

void Engine::on_message(Peer& peer, wire::Message message) {
  std::visit(
      [&](auto& body) {
        using T = std::decay_t<decltype(body)>;
        if constexpr (std::is_same_v<T, wire::RegionsEnd>) {
          // Only now is the acceptor sure to know the session: a rail's RAIL_HELLO runs on a socket
          // of its own and would overtake our PROOF.
          if (!std::exchange(peer.regions_known, true) && peer.session->role() == SessionRole::kInitiator)
            peer.rails_pending = host_.session_open(peer.key);
          check_up(peer);
        } else if constexpr (requires { this->on(peer, body); }) {
          this->on(peer, body);
        }
        // The rest (handshake, heartbeats) never leaves the session.
      },
      message);
}

// ---- rails --------------------------------------------------------------------------------------

void Engine::rail_up(Time now, SessionKey key, const RailInfo& info) {
  now_ = now;
  Peer* peer = find_peer(key);
  if (peer == nullptr) {
    host_.drop_rail(info.id);
    return;
  }
  Rail& rail = rails_[info.id];
  rail.info = info;
  rail.session = key;
  peer->rails.push_back(info.id);
  for (auto& [id, remote] : peer->regions) attach(*peer, remote, info.id);
  if (peer->rails_pending > 0) --peer->rails_pending;
  check_up(*peer);
}

void Engine::rail_failed(Time now, SessionKey key, std::string note) {
  now_ = now;
  Peer* peer = find_peer(key);
  if (peer == nullptr) return;
  peer->notes.push_back(std::move(note));
  if (peer->rails_pending > 0) --peer->rails_pending;
  end_pathless(*peer);
  check_up(*peer);
}

void Engine::rail_down(Time now, RailId id, std::string why) {
  now_ = now;
  auto found = rails_.find(id);
  if (found == rails_.end()) return;
  const SessionKey key = found->second.session;
  const std::uint16_t index = found->second.info.index;
  Peer* peer = find_peer(key);
  const std::string words = std::string(found->second.info.capabilities.name) + " rail " +
                            std::to_string(found->second.info.index) + " went down: " + why;
  std::string transport(found->second.info.capabilities.name);
  forget_rail(id);
  if (peer == nullptr) return;
  peer->notes.push_back(words);
  peer->lost_rails.insert(std::move(transport));
  for (const Key& sending : sending_)
    if (Source* source = sending.first == key ? find_source(sending) : nullptr)
      std::erase_if(source->to_send, [&](const auto& entry) { return entry.first == index; });
  std::erase(peer->rails, id);
  for (auto& [region, remote] : peer->regions) {
    std::erase(remote.reach, id);
    std::erase_if(remote.unable, [id](const auto& entry) { return entry.first == id; });
  }
  // Control frames may still flow, but no page ever will: the peer is lost, say so at once.
  if (peer->rails.empty())
    end_session(now, key, Code::kPeerLost,
                "the last rail to " + quoted(peer->session->peer().name) + " is gone: " + words);
  else {
    Timers::iterator unused;
    arm(time_after(now_, kAfterRailDown), TimerKind::kPath, key, 0, unused);
  }
}

void Engine::forget_rail(RailId id) {
  auto found = rails_.find(id);
  if (found == rails_.end()) return;
  if (found->second.watch) timers_.erase(*found->second.watch);
  rails_.erase(found);
}

void Engine::said_again(Rail& rail) {
  rail.again = true;
  again_rails_.push_back(rail.info.id);
}

// A piece that we wait for is on its way.
void Engine::count_posted(Rail& rail) {
  ++outstanding_pieces_;
  if (rail.outstanding++ == 0) {
    rail.moved_at = now_;
    rail.forgiven = false;
  }
  if (!rail.watch) watch_rail(rail.info.id);
}

// A rail that is silent for as long as would end a session is given up while others live that could
// bring the same, though nobody said that it broke: a router between may forget a connection. The last one
// is kept; its transfers have their deadlines.
void Engine::watch_rail(RailId id, Time late) {
  Rail& rail = rails_.at(id);
  rail.watch.reset();
  if (rail.outstanding == 0) return;
  const Time silent = config_.session.silent_ns;
  Time at = time_after(rail.moved_at, silent);
  if (at <= now_) {
    const Peer* peer = find_peer(rail.session);
    // What came while this agent stood still it has not looked at yet; once, as in a session.
    const bool forgive = late >= silent / 4 && !std::exchange(rail.forgiven, true);
    const bool others =
        peer != nullptr && std::any_of(peer->rails.begin(), peer->rails.end(), [&](RailId other) {
          const auto has = [](const Remote& remote, RailId of) {
            return std::find(remote.reach.begin(), remote.reach.end(), of) != remote.reach.end();
          };
          return other != id &&
                 rails_.at(other).info.capabilities.memory.has(rail.info.capabilities.memory) &&
                 std::all_of(peer->regions.begin(), peer->regions.end(), [&](const auto& entry) {
                   return !has(entry.second, id) || has(entry.second, other);
                 });
        });
    if (!forgive && others) {
      const std::string why = std::to_string(rail.outstanding) + " pieces were due and none came for " +
                              std::to_string(silent / 1'000'000) + " ms";
      host_.drop_rail(id);
      rail_down(now_, id, why);
      return;
    }
    at = time_after(now_, silent);
  }
  arm(at, TimerKind::kRail, id, 0, rail.watch.emplace());
}

void Engine::attach(Peer& peer, Remote& remote, RailId id) {
  const Capabilities& capabilities = rails_.at(id).info.capabilities;
  RemoteRegion region{remote.region.id, remote.region.base, remote.region.spans, {}};
  bool offered = false;
  for (const wire::TransportKeys& keys : remote.region.keys)
    if (keys.transport == capabilities.name) {
      region.keys = keys.keys;
      offered = true;
    }
  if (!offered) return;  // the peer could not register it with that transport
  if (Status status = host_.attach(id, region); !status.ok()) {
    remote.notes.push_back(std::string(capabilities.name) + ": " + status.message());
    return;
  }
  remote.reach.push_back(id);
  // Some may have waited for a path.
  for (auto it = destinations_.lower_bound({peer.key, 0});
       it != destinations_.end() && it->first.first == peer.key; ++it)
    if (it->second->state == TransferState::kMoving && it->second->remote_region == region.id)
      list_ready(peer, *it->second);
}

// ---- time ---------------------------------------------------------------------------------------

void Engine::arm(Time at, TimerKind kind, std::uint64_t a, std::uint64_t b, Timers::iterator& out) {
  out = timers_.emplace(at, TimerKey{kind, a, b});
}

void Engine::set_timer(Transfer& transfer, TimerKind kind, Time at) {
  clear_timer(transfer);
  if (at == kNever) return;
  arm(at, kind, transfer.key.first, transfer.key.second, transfer.timer);
  transfer.timed = true;
}

void Engine::clear_timer(Transfer& transfer) {
  if (transfer.timed) timers_.erase(transfer.timer);
  transfer.timed = false;
}

Time Engine::next_deadline() const { return timers_.empty() ? kNever : timers_.begin()->first; }

void Engine::on_time(Time now) {
  now_ = now;
  const Time late = timers_.empty() ? 0 : now - timers_.begin()->first;
  while (!timers_.empty() && timers_.begin()->first <= now) {
    const TimerKey timer = timers_.begin()->second;
    timers_.erase(timers_.begin());
    const Key key{static_cast<SessionKey>(timer.a), timer.b};
    switch (timer.kind) {
      case TimerKind::kSession:
        if (Peer* peer = find_peer(key.first)) {
          peer->timer_at = kNever;
          Status status = peer->session->on_time(now);
          flush(*peer);
          if (!status.ok()) lose(key.first, std::move(status));
        }
        break;
      case TimerKind::kSource:
        if (Source* source = find_source(key)) {
          source->timed = false;
          if (is_draining(source->state)) {
            tell_draining(*source, timer.kind);
            break;
          }
          std::string why =
              source->layers_ready < source->move->grid.num_layers
                  ? unreleased(*source->move, source->layers_ready, "here")
                  : "the peer had not fetched every page when the transfer's time was over: no lease or "
                    "expectation there let it in so long, or the peer is slow";
          fail_source(*source, TransferEvent::kFail, {Code::kDeadline, std::move(why)}, true);
        }
        break;
      case TimerKind::kDestination:
        if (Destination* destination = find_destination(key)) {
          destination->timed = false;
          if (is_draining(destination->state)) {
            tell_draining(*destination, timer.kind);
            break;
          }
          Status why{Code::kDeadline, std::string("the transfer's time was over while it was ") +
                                          std::string(name_of(destination->state))};
          if (destination->layers_ready < destination->move->grid.num_layers)
            why = {Code::kDeadline, unreleased(*destination->move, destination->layers_ready,
                                               destination->ours ? "here" : "at the source")};
          if (destination->state == TransferState::kParked)
            why = {Code::kNotPermitted,
                   "no lease of the sender covers the blocks and nobody expected its tag in time"};
          fail_destination(*destination, TransferEvent::kFail, std::move(why), true);
        }
        break;
      case TimerKind::kLease:
        if (auto lease = leases_.find(timer.a); lease != leases_.end()) {
          if (lease->second.expires_at() > now) {
            arm(lease->second.expires_at(), TimerKind::kLease, timer.a, 0, lease_timers_[timer.a]);
          } else {
            lease_timers_.erase(timer.a);
            end_lease(lease->second, LeaseEvent::kExpire,
                      {Code::kLeaseEnded, lease->second.renewable()
                                              ? "the lease expired: its holder did not renew it"
                                              : "the lease expired"});
          }
        }
        break;
      case TimerKind::kRail: watch_rail(static_cast<RailId>(timer.a), late); break;
      case TimerKind::kPath:
        if (Peer* peer = find_peer(key.first)) {
          end_pathless(*peer);
          flush(*peer);
        }
        break;
      case TimerKind::kExpectation:
        expectation_timers_.erase(timer.a);
        if (auto found = expectations_.find(timer.a); found != expectations_.end()) {
          const Expectation& expected = *found->second;
          end_expectation(
              timer.a, TransferState::kFailed,
              {Code::kDeadline, std::to_string(expected.incomplete_blocks().size()) + " of the " +
                                    std::to_string(expected.blocks().size()) + " blocks of region " +
                                    quoted(region(expected.region())->name) +
                                    " that were expected had not come whole when its time was over"});
        }
        break;
    }
  }
}

void Engine::pump(Time now) {
  now_ = now;
  graveyard_.clear();
  again_ = false;
  dirty_.merge(retry_);
  retry_.clear();
  for (const RailId id : std::exchange(again_rails_, {}))
    if (auto rail = rails_.find(id); rail != rails_.end()) rail->second.again = false;
  for (const Key& key : std::vector(sending_.begin(), sending_.end()))
    if (Source* source = find_source(key))
      if (Peer* peer = open_peer(key.first)) send_pieces(*peer, *source);
  // One piece for each peer in turn, lowest priority number first among what a peer has.
  for (bool progressed = !ready_peers_.empty(); progressed;) {
    progressed = false;
    turns_.assign(ready_peers_.begin(), ready_peers_.end());
    std::rotate(turns_.begin(), std::upper_bound(turns_.begin(), turns_.end(), last_served_), turns_.end());
    for (const SessionKey key : turns_) {
      Peer* peer = find_peer(key);
      if (peer != nullptr && post_next(*peer, progressed)) last_served_ = key;
      if (peer == nullptr || peer->ready.empty()) ready_peers_.erase(key);
    }
  }
  confirm_dirty();
  for (const SessionKey key : std::vector(backlogged_.begin(), backlogged_.end())) {
    Peer* peer = open_peer(key);
    if (peer != nullptr) start_backlog(*peer);
    if (peer == nullptr || peer->backlog.empty()) backlogged_.erase(key);
  }
  // By index: more may join, and what is cleared keeps its memory for the next round.
  for (std::size_t i = 0; i < stirred_.size(); ++i)
    if (Peer* peer = find_peer(stirred_[i]); peer != nullptr && peer->stirred) flush(*peer);
  stirred_.clear();
}

// ---- regions ------------------------------------------------------------------------------------

Result<RegionId> Engine::register_region(Time now, std::unique_ptr<Region> region) {
  now_ = now;
  const RegionId id = next_region_++;
  region->memory.id = id;
  for (auto& [key, peer] : peers_) send(*peer, region->described());
  regions_.emplace(id, std::move(region));
  return id;
}

Status Engine::deregister_region(Time now, RegionId id) {
  now_ = now;
  auto found = regions_.find(id);
  if (found == regions_.end())
    return {Code::kUnknownRegion, "region " + std::to_string(id) + " is not registered (any more)"};
  const Status why{Code::kRegionGone, "region " + quoted(found->second->name) + " was deregistered"};
  end_leases(id, why);
  std::vector<std::uint64_t> expected;
  for (auto& [handle, expectation] : expectations_)
    if (expectation->region() == id) expected.push_back(handle);
  for (std::uint64_t handle : expected) end_expectation(handle, TransferState::kFailed, why);
  std::vector<Source*> sources;
  for (auto& [key, source] : sources_)
    if (source->region == id) sources.push_back(source.get());
  for (Source* source : sources) fail_source(*source, TransferEvent::kFail, why, true);
  std::vector<Destination*> destinations;
  for (auto& [key, destination] : destinations_)
    if (destination->region == id) destinations.push_back(destination.get());
  for (Destination* destination : destinations)
    fail_destination(*destination, TransferEvent::kFail, why, true);
  for (auto& [key, peer] : peers_) {
    peer->ended_on.erase({id, wire::LeaseMode::kRead});
    peer->ended_on.erase({id, wire::LeaseMode::kWrite});
    send(*peer, wire::RegionGone{id});
    forget_programs(*peer, id, false);
  }
  // What is left of its transfers drains.
  std::size_t num_draining = 0;
  for (const auto& [key, source] : sources_) num_draining += source->region == id;
  for (const auto& [key, destination] : destinations_) num_draining += destination->region == id;
  std::unique_ptr<Region> gone = std::move(found->second);
  regions_.erase(found);
  if (num_draining != 0) {
    leaving_regions_.emplace(id, LeavingRegion{std::move(gone), num_draining});
    return {};
  }
  bury(std::move(gone));
  host_.region_fenced(id);
  return {};
}

const Region* Engine::region(RegionId id) const {
  auto found = regions_.find(id);
  return found == regions_.end() ? nullptr : found->second.get();
}

void Engine::on(Peer& peer, wire::Region& region) {
  const RegionId id = region.id;
  if (peer.regions.size() >= kMaxPeerRegions) {
    end_session(now_, peer.key, Code::kProtocol, "REGION refused: too many");
    return;
  }
  auto [found, fresh] = peer.regions.try_emplace(id);
  if (!fresh) return;  // ids are never reused: a repetition says nothing new
  found->second.region = std::move(region);
  for (RailId rail : peer.rails) attach(peer, found->second, rail);
  host_.emit({.kind = EventKind::kRegion, .peer = peer.key, .region = id});
}

void Engine::on(Peer& peer, const wire::RegionGone& gone) {
  auto found = peer.regions.find(gone.id);
  if (found == peer.regions.end()) return;
  const Status why{Code::kRegionGone,
                   "the peer deregistered its region " + quoted(found->second.region.name)};
  std::vector<Destination*> destinations;
  for (auto it = destinations_.lower_bound({peer.key, 0});
       it != destinations_.end() && it->first.first == peer.key; ++it)
    if (it->second->remote_region == gone.id) destinations.push_back(it->second.get());
  for (Destination* destination : destinations)
    fail_destination(*destination, TransferEvent::kFail, why, false);
  for (RailId rail : found->second.reach) host_.detach(rail, gone.id);
  peer.regions.erase(found);
  forget_programs(peer, gone.id, true);
  // Should it announce that number again, with other bounds, nothing is taken for checked.
  for (auto& [id, told] : peer.peer_programs) told.checked_offer = false;
  host_.emit({.kind = EventKind::kRegionGone, .peer = peer.key, .region = gone.id});
}

// Our programs from or to a region that is gone. Both agents count regions from 1, so an id alone
// does not say whose region it is.
void Engine::forget_programs(Peer& peer, RegionId gone, bool of_peer) {
  std::erase_if(peer.programs, [&](const auto& entry) {
    return (entry.second.write != of_peer ? entry.second.src : entry.second.dst) == gone;
  });
}

void Engine::on(Peer& peer, wire::Program& program) {
  Program entry;
  entry.program = std::make_shared<CopyProgram>(std::move(program.program));
  entry.src = program.src_region;
  entry.dst = program.dst_region;
  // A peer that never stops telling programs is not a user of them. Those whose regions are gone
  // leave only now: which way a program leads is not known before it is used.
  if (peer.peer_programs.size() >= kMaxPeerPrograms)
    std::erase_if(peer.peer_programs, [&](const auto& told) {
      const Program& old = told.second;
      return !(region(old.dst) != nullptr && peer.regions.contains(old.src)) &&
             !(region(old.src) != nullptr && peer.regions.contains(old.dst));
    });
  if (Status status = check_program(*entry.program);
      !status.ok() || peer.peer_programs.size() >= kMaxPeerPrograms) {
    end_session(now_, peer.key, Code::kProtocol,
                "PROGRAM refused: " + (status.ok() ? "too many" : status.message()));
    return;
  }
  peer.peer_programs.insert_or_assign(program.id, std::move(entry));
}

// ---- views --------------------------------------------------------------------------------------

Engine::Peer* Engine::find_peer(SessionKey key) {
  auto found = peers_.find(key);
  return found == peers_.end() ? nullptr : found->second.get();
}

const Engine::Peer* Engine::find_peer(SessionKey key) const {
  auto found = peers_.find(key);
  return found == peers_.end() ? nullptr : found->second.get();
}

Engine::Peer* Engine::open_peer(SessionKey key) {
  Peer* peer = find_peer(key);
  return peer != nullptr && peer->session->state() == SessionState::kOpen ? peer : nullptr;
}

Status Engine::lost_status(SessionKey key) const {
  if (find_peer(key) != nullptr) return {Code::kPeerLost, "the session with the peer is not open yet"};
  auto lost = lost_.find(key);
  if (lost != lost_.end()) return lost->second.reason;
  return {Code::kPeerLost, "there is no peer " + std::to_string(key) + " (any more)"};
}

Engine::Source* Engine::find_source(Key key) {
  auto found = sources_.find(key);
  return found == sources_.end() ? nullptr : found->second.get();
}

Engine::Destination* Engine::find_destination(Key key) {
  auto found = destinations_.find(key);
  return found == destinations_.end() ? nullptr : found->second.get();
}

std::optional<PeerView> Engine::peer(SessionKey key) const {
  const Peer* peer = find_peer(key);
  if (peer == nullptr) {
    auto lost = lost_.find(key);
    return lost == lost_.end() ? std::nullopt : std::optional(lost->second);
  }
  PeerView view;
  view.name = peer->session->peer().name;
  view.incarnation = peer->session->peer().incarnation;
  view.state = peer->up ? "open" : "connecting";
  for (RailId rail : peer->rails) view.rails.emplace_back(rails_.at(rail).info.capabilities.name);
  view.notes = peer->notes;
  return view;
}

std::vector<SessionKey> Engine::open_peers() const {
  std::vector<SessionKey> keys;
  for (const auto& [key, peer] : peers_)
    if (peer->up) keys.push_back(key);
  return keys;
}

Result<std::vector<RemoteRegionView>> Engine::peer_regions(SessionKey key) const {
  const Peer* peer = find_peer(key);
  if (peer == nullptr) return lost_status(key);
  std::vector<RemoteRegionView> views;
  for (const auto& [id, remote] : peer->regions) {
    RemoteRegionView view{remote.region, "", remote.notes};
    std::uint32_t best = UINT32_MAX;
    for (RailId rail : remote.reach) {
      const Capabilities& capabilities = rails_.at(rail).info.capabilities;
      if (capabilities.rank < best) view.path = capabilities.name;
      best = std::min(best, capabilities.rank);
    }
    views.push_back(std::move(view));
  }
  return views;
}

EngineLoad Engine::load() const noexcept {
  return {works_.size(),
          outstanding_pieces_,
          FenceTable::kNumSlots - free_slots_.size(),
          expectations_.size() + ending_expectations_.size(),
          leases_.size() + ending_leases_.size(),
          handles_.size(),
          timers_.size()};
}

void Engine::close(Time now) {
  now_ = now;
  closed_ = true;
  std::vector<SessionKey> keys;
  for (const auto& [key, peer] : peers_) keys.push_back(key);
  const Status why{Code::kClosed, "the agent was closed"};
  let_streams_go();
  for (SessionKey key : keys) end_session(now, key, why.code(), why.message());
  for (const auto& [id, region] : regions_) end_leases(id, why);
  std::vector<std::uint64_t> expected;
  for (const auto& [handle, expectation] : expectations_) expected.push_back(handle);
  for (std::uint64_t handle : expected) end_expectation(handle, TransferState::kFailed, why);
}

void Engine::abandon(Time now) {
  now_ = now;
  while (!sources_.empty()) {
    Source& source = *sources_.begin()->second;
    source.posted.clear();
    drained_source(source);
  }
  while (!destinations_.empty()) {
    Destination& destination = *destinations_.begin()->second;
    destination.posted.clear();
    drained_destination(destination);
  }
}

}  // namespace kvxfer
