#include "core/engine/sessions.h"

#include <algorithm>

#include "core/lease.h"

namespace kvxfer {
namespace {

// Enough for callers that ask why a peer was lost; a thousand reconnects must not make an agent grow.
constexpr std::size_t kMaxLost = 64;

// Frames that can wait do so while this much of a session is unsent: a quarter of what its socket may hold
// (frame_socket.h). The rest is for one of the largest frames, and for those that answer.
constexpr std::size_t kMostUnsent = wire::kMaxBody;

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
    put_out(*added->second);
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
  knows_all(*peer);
  context_.timers.clear(peer->timer_);
  context_.timers.clear(peer->newcomer_timer_);
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
  const auto found = names_.find(name);
  if (found == names_.end()) return {};
  std::vector<SessionKey> keys(found->second.owners.begin(), found->second.owners.end());
  for (const auto& [since, key] : found->second.waiting) keys.push_back(key);
  return keys;
}

bool Sessions::take_name(Peer& peer) {
  const wire::Id128& process = peer.session_->peer().incarnation;
  peer.name_ = names_.try_emplace(peer.name()).first;
  PeerName& name = (*peer.name_)->second;
  if (name.owners.empty() ? name.waiting.empty() : name.owner == process) {
    name.owner = process;
    name.owners.insert(peer.key_);
    return true;
  }
  peer.waits_since_ = context_.now;
  name.waiting.emplace(context_.now, peer.key_);
  name.by_process.emplace(process, peer.key_);
  await_answer(peer);
  for (const SessionKey owner : name.owners)
    if (Peer* const old = find(owner)) {
      old->session_->stir(context_.now);
      flush(*old);
    }
  return false;
}

// An old session that lives acknowledges one of four heartbeats; one that does not is lost. If the limit of
// silence is long, for example for processes that may be stopped, a new peer need not wait as long.
void Sessions::await_answer(Peer& peer) {
  const SessionConfig& limits = context_.config.session;
  context_.timers.set(peer.newcomer_timer_,
                      time_after(context_.now, std::min(limits.silent_ns, 4 * limits.heartbeat_ns)),
                      TimerKind::kNewcomer, peer.key_);
}

std::vector<SessionKey> Sessions::waited_enough(Peer& peer) {
  peer.newcomer_timer_.reset();
  if (!is_held(peer)) return {};
  await_answer(peer);
  const PeerName& name = (*peer.name_)->second;
  if (name.answered_at >= *peer.waits_since_) return {};  // it is about to be refused
  return {name.owners.begin(), name.owners.end()};
}

bool Sessions::is_contested(const Peer& peer) const noexcept {
  return peer.name_ && (*peer.name_)->second.waiting.size() > (is_held(peer) ? 1 : 0);
}

void Sessions::answered(const Peer& peer) noexcept {
  if (!peer.name_ || is_held(peer)) return;
  PeerName& name = (*peer.name_)->second;
  name.answered_at = std::max(name.answered_at, peer.session_->acknowledged_heartbeat_sent_at());
  if (!name.waiting.empty()) unsettle(name);
}

void Sessions::unsettle(PeerName& name) noexcept {
  if (!std::exchange(name.is_undecided, true)) undecided_.push_back(name);
}

std::optional<Sessions::Decided> Sessions::next_decided() {
  while (PeerName* const name = undecided_.first()) {
    if (!name->waiting.empty()) {
      const auto [since, first] = *name->waiting.begin();
      if (name->owners.empty()) return Decided{first, true};
      const auto of_owner = name->by_process.lower_bound({name->owner, 0});
      if (of_owner != name->by_process.end() && of_owner->first == name->owner)
        return Decided{of_owner->second, true};
      if (name->answered_at >= since) return Decided{first, false};
    }
    undecided_.remove(*name);
    name->is_undecided = false;
  }
  return std::nullopt;
}

void Sessions::admit(Peer& peer) {
  PeerName& name = (*peer.name_)->second;
  const wire::Id128& process = peer.session_->peer().incarnation;
  name.owners.insert(peer.key_);
  name.owner = process;
  name.waiting.erase({*peer.waits_since_, peer.key_});
  name.by_process.erase({process, peer.key_});
  peer.waits_since_.reset();
  context_.timers.clear(peer.newcomer_timer_);
  answered(peer);
}

void Sessions::forget_names(const Peer& peer) noexcept {
  if (peer.role() == SessionRole::kAcceptor) by_id_.erase(peer.session_->id());
  if (!peer.name_) return;
  PeerName& name = (*peer.name_)->second;
  name.owners.erase(peer.key_);
  if (peer.waits_since_) {
    name.waiting.erase({*peer.waits_since_, peer.key_});
    name.by_process.erase({peer.session_->peer().incarnation, peer.key_});
  }
  if (!name.owners.empty()) return;
  name.answered_at = 0;
  if (!name.waiting.empty()) return unsettle(name);
  if (name.is_undecided) undecided_.remove(name);
  names_.erase(*peer.name_);
}

void Sessions::all_behind() noexcept {
  for (const auto& [key, peer] : peers_)
    if (peer->told_regions_ != 0 && !std::exchange(peer->is_behind_, true)) behind_.push_back(*peer);
}

void Sessions::knows_all(Peer& peer) noexcept {
  if (std::exchange(peer.is_behind_, false)) behind_.remove(peer);
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
  if (peer.role() == SessionRole::kAcceptor) by_id_.insert_or_assign(peer.session_->id(), peer.key_);
  return peer.was_open_ = true;
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

bool Sessions::takes_more(const Peer& peer) {
  const EngineHost::Unsent unsent = context_.host.unsent(peer.key_);
  if (unsent.nbytes < kMostUnsent) return true;
  if (!unsent.is_full) context_.pump_again = true;  // it goes out in this round
  return false;
}

Status Sessions::check_room(const Peer& peer, std::size_t nbytes) {
  if (context_.host.unsent(peer.key_).nbytes + nbytes <= 3 * kMostUnsent) return {};
  return {Code::kExhausted, "peer " + quoted(peer.name()) + " does not read its connection: " +
                                std::to_string(context_.host.unsent(peer.key_).nbytes) +
                                " bytes wait to be sent; try again when it does"};
}

void Sessions::put_out(Peer& peer) {
  peer.stirred_ = false;
  peer.session_->take_output(outgoing_);
  auto frame = outgoing_.begin();
  try {
    for (; frame != outgoing_.end(); ++frame) context_.host.send(peer.key_, std::move(*frame));
  } catch (...) {  // the frames behind it must not go out without it
    outgoing_.erase(outgoing_.begin(), frame);
    peer.session_->give_back(outgoing_);
    throw;
  }
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

// A timer that fires early only asks again. It is moved only if it would be much too early, as after a
// heartbeat: the end of silence moves with every frame.
void Sessions::schedule(Peer& peer) {
  const Time at = peer.session_->next_deadline();
  const Time too_early = at - Timers::at(peer.timer_);  // negative if none is armed
  if (too_early >= 0 && too_early < config_.heartbeat_ns / 4) return;
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
