// The engine's time, its rounds, and what callers see of it.
#include "core/engine.h"

#include <algorithm>

namespace kvxfer {
namespace {

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
  view.budget = peer->budget;
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
