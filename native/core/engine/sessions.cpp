#include "core/engine/sessions.h"

#include <algorithm>

#include "core/lease.h"

namespace kvxfer {
namespace {

// Enough for callers that ask why a peer was lost; a thousand reconnects must not make an agent grow.
constexpr std::size_t kMaxLost = 64;

}  // namespace

std::vector<std::string> Peer::notes() const {
  std::vector<std::string> all = notes_;
  for (const auto& [index, words] : rail_notes_) all.push_back(words);
  return all;
}

void Sessions::set_secrets(std::string first, std::string second) {
  config_.secret = std::move(first);
  config_.second_secret = std::move(second);
}

Peer& Sessions::add(SessionRole role) {
  const SessionKey key = next_key_++;
  auto session =
      std::make_unique<Session>(role, config_, context_.now,
                                [&host = context_.host](std::span<std::byte> bytes) { host.random(bytes); });
  const auto added =
      peers_.emplace(key, std::make_unique<Peer>(key, std::move(session), context_.config.peer_budget)).first;
  try {
    flush(*added->second);
  } catch (...) {
    context_.timers.clear(added->second->timer_);
    peers_.erase(added);
    throw;
  }
  return *added->second;
}

void Sessions::remove(SessionKey key, const Status& why) {
  auto found = peers_.find(key);
  const Peer& last = *found->second;
  PeerView view;
  static_cast<Sender&>(view) = last.described();
  view.state = "lost";
  view.notes = last.notes();
  view.reason = why;
  lost_.insert_or_assign(key, std::move(view));
  context_.make_room();
  // From here on nothing takes memory.
  std::unique_ptr<Peer> peer = std::move(found->second);
  peers_.erase(found);
  forget_names(*peer);
  context_.timers.clear(peer->timer_);
  admit(*peer);
  if (lost_.size() > kMaxLost) lost_.erase(lost_.begin());
  context_.keep_for_this_round(std::move(peer));
}

Status Sessions::lost_status(SessionKey key) const {
  if (find(key) != nullptr) return {Code::kPeerLost, "the session with the peer is not open yet"};
  auto lost = lost_.find(key);
  if (lost != lost_.end()) return lost->second.reason;
  return {Code::kPeerLost, "there is no peer " + std::to_string(key) + " (any more)"};
}

Session* Sessions::find_session(const wire::Id128& id, SessionKey& key) {
  const auto found = by_id_.find(id);
  Peer* const peer = found == by_id_.end() ? nullptr : find_open(found->second);
  if (peer == nullptr) return nullptr;
  key = peer->key();
  return &peer->session();
}

std::vector<SessionKey> Sessions::keys() const {
  std::vector<SessionKey> keys;
  keys.reserve(peers_.size());
  for (const auto& [key, peer] : peers_) keys.push_back(key);
  return keys;
}

std::vector<SessionKey> Sessions::up() const {
  std::vector<SessionKey> keys;
  for (const auto& [key, peer] : peers_)
    if (peer->up_) keys.push_back(key);
  return keys;
}

std::vector<SessionKey> Sessions::named(const std::string& name) const {
  std::vector<SessionKey> keys;
  for (auto named = names_.lower_bound({name, 0}); named != names_.end() && named->first == name; ++named)
    keys.push_back(named->second);
  return keys;
}

std::vector<SessionKey> Sessions::older_namesakes(const Peer& peer) const {
  const wire::Identity& identity = peer.session().peer();
  std::vector<SessionKey> older;
  for (auto named = names_.lower_bound({identity.name, 0});
       named != names_.end() && named->first == identity.name; ++named) {
    const Peer* const other = find(named->second);
    if (other->key() != peer.key() && !is_held(*other) &&
        other->session().peer().incarnation != identity.incarnation)
      older.push_back(other->key());
  }
  return older;
}

// An old session that lives acknowledges one of four heartbeats; one that does not is lost. If the limit of
// silence is long, for example for processes that may be stopped, a new peer need not wait as long.
void Sessions::hold(Peer& peer) {
  const SessionConfig& limits = context_.config.session;
  held_.emplace(peer.key_, context_.now);
  context_.timers.set(peer.newcomer_timer_,
                      time_after(context_.now, std::min(limits.silent_ns, 4 * limits.heartbeat_ns)),
                      TimerKind::kNewcomer, peer.key_);
}

void Sessions::admit(Peer& peer) {
  if (held_.erase(peer.key_) != 0) context_.timers.clear(peer.newcomer_timer_);
}

bool Sessions::is_contested(const Peer& peer) const {
  return std::any_of(held_.begin(), held_.end(), [&](const auto& held) {
    return held.first != peer.key() && find(held.first)->name() == peer.name();
  });
}

void Sessions::dialling(Peer& peer) {
  peer.session_->connecting();
  schedule(peer);
}

Result<std::optional<wire::Message>> Sessions::receive(Peer& peer, wire::ByteSpan frame) {
  Result<std::optional<wire::Message>> received = peer.session_->receive(context_.now, frame);
  if (!received.ok() && peer.session_->was_violated()) ++context_.stats.frames_refused;
  return received;
}

bool Sessions::has_opened(Peer& peer) {
  if (peer.was_open_ || !peer.is_open()) return false;
  peer.named_ = names_.emplace(peer.name(), peer.key_).first;
  if (peer.role() == SessionRole::kAcceptor) by_id_.insert_or_assign(peer.session_->id(), peer.key_);
  return peer.was_open_ = true;
}

void Sessions::forget_names(const Peer& peer) noexcept {
  if (peer.named_) names_.erase(*peer.named_);
  if (peer.role() == SessionRole::kAcceptor) by_id_.erase(peer.session_->id());
}

bool Sessions::heard_heartbeat(Peer& peer) {
  const Time heard = peer.session_->last_heartbeat_at();
  return std::exchange(peer.heartbeat_seen_, heard) != heard;
}

bool Sessions::heard_acknowledgement(Peer& peer) {
  const std::uint64_t heard = peer.session_->acknowledged_heartbeat();
  return std::exchange(peer.acknowledgement_seen_, heard) != heard;
}

Status Sessions::disconnected(Peer& peer, const std::string& why) {
  peer.session_->connection_lost();
  if (Status reason = peer.session_->reason(); !reason.ok() && !peer.was_open_) return reason;
  std::string words =
      "the connection to " + (peer.was_open_ ? quoted(peer.name()) : "the peer") + " ended: " + why;
  if (peer.was_open_ && !peer.regions_known_)
    words +=
        ", before it had confirmed the session; its log says why, for example because its "
        "handshake_timeout_s was over";
  return {Code::kPeerLost, std::move(words)};
}

Status Sessions::on_timer(Peer& peer) {
  peer.timer_.reset();
  Status status = peer.session_->on_time(context_.now);
  flush(peer);
  return status;
}

Status Sessions::tell_caller(const Peer& peer, EventKind kind, RegionId region) {
  Charge charge = Charge::take(peer.budget(), Resource::kEvents, 1);
  if (!charge)
    return {Code::kExhausted, "too many changes of your regions are unread by this agent's caller: " +
                                  peer.budget()->in_words(Resource::kEvents)};
  context_.host.emit({.kind = kind, .peer = peer.key(), .region = region, .charge = std::move(charge)});
  return {};
}

void Sessions::send(Peer& peer, const wire::Message& message) {
  if (!peer.is_open()) return;
  if (!peer.stirred_) stirred_.push_back(peer.key_);
  peer.stirred_ = true;
  peer.session_->send(context_.now, message);
}

// A peer hears only of its own transfer. Other losses here, for example of another peer, are this end's
// affair.
void Sessions::refuse(Peer& peer, TransferId transfer, const Status& why, const wire::Bytes& context) {
  const bool is_its = is_of_transfer(why.code());
  const std::string words = is_its ? why.message() : std::string(name_of(why.code())) + ": " + why.message();
  send(peer,
       wire::Fail{transfer, is_its ? why.code() : Code::kRefused, words.substr(0, wire::kMaxText), context});
}

void Sessions::say_goodbye(Peer& peer, Code code, const std::string& text) {
  peer.session_->close(context_.now, code, text);
  flush(peer);
}

void Sessions::hurry_heartbeat(Peer& peer) {
  peer.session_->hurry_heartbeat(context_.now);
  flush(peer);
}

void Sessions::flush(Peer& peer) {
  peer.stirred_ = false;
  peer.session_->take_output(outgoing_);
  for (wire::Bytes& frame : outgoing_) context_.host.send(peer.key_, std::move(frame));
  schedule(peer);
}

void Sessions::flush_stirred() {
  // By index: more may be added, and clearing keeps the vector's memory for the next round.
  for (std::size_t i = 0; i < stirred_.size(); ++i)
    context_.serve(stirred_[i], [&] {
      if (Peer* peer = find(stirred_[i]); peer != nullptr && peer->stirred_) flush(*peer);
    });
  stirred_.clear();
}

// Deadlines move with every frame; a timer that fires early only asks again.
void Sessions::schedule(Peer& peer) {
  const Time at = peer.session_->next_deadline();
  if (peer.timer_ && Timers::at(peer.timer_) <= at) return;
  context_.timers.set(peer.timer_, at, TimerKind::kSession, peer.key_);
}

std::optional<PeerView> Sessions::view(SessionKey key) const {
  const Peer* peer = find(key);
  if (peer == nullptr) {
    auto lost = lost_.find(key);
    return lost == lost_.end() ? std::nullopt : std::optional(lost->second);
  }
  PeerView view;
  static_cast<Sender&>(view) = peer->described();
  view.state = peer->up_ ? "open" : "connecting";
  view.notes = peer->notes();
  view.budget = peer->budget_;
  return view;
}

std::shared_ptr<const Sender> Sessions::sender(SessionKey key) {
  Peer* const peer = find(key);
  if (peer == nullptr) return std::make_shared<const Sender>();
  if (peer->sender_ == nullptr) peer->sender_ = std::make_shared<const Sender>(peer->described());
  return peer->sender_;
}

}  // namespace kvxfer
