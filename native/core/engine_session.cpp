// Sessions with peers: how they begin, what their frames say, and how peers are lost.
#include <type_traits>

#include "core/engine.h"

namespace kvxfer {
namespace {

// Enough for callers that ask why a peer went; a thousand reconnects must not grow an agent.
constexpr std::size_t kMaxLost = 64;

}  // namespace

SessionKey Engine::add_session(Time now, SessionRole role) {
  now_ = now;
  auto peer = std::make_unique<Peer>();
  peer->key = next_session_++;
  peer->session = std::make_unique<Session>(role, config_.session, now,
                                            [this](std::span<std::byte> bytes) { host_.random(bytes); });
  peer->budget = std::make_shared<Budget>(config_.peer_budget);
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

std::shared_ptr<Budget> Engine::budget(SessionKey key) const {
  const Peer* peer = find_peer(key);
  return peer == nullptr ? nullptr : peer->budget;
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

}  // namespace kvxfer
