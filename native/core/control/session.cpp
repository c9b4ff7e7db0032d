#include "core/control/session.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "core/control/sha256.h"

namespace kvxfer {
namespace {

using State = SessionState;
using Event = SessionEvent;

constexpr SessionTransition kTransitions[] = {
    // The acceptor's way
    {State::kAwaitHello, Event::kHello, State::kAwaitProof},
    {State::kAwaitProof, Event::kProof, State::kOpen},
    // The initiator's way
    {State::kAwaitChallenge, Event::kChallenge, State::kOpen},
    // Both
    {State::kOpen, Event::kMessage, State::kOpen},
    // How it ends
    {State::kAwaitHello, Event::kViolation, State::kClosed},
    {State::kAwaitHello, Event::kHandshakeTimeout, State::kClosed},
    {State::kAwaitHello, Event::kConnectionLost, State::kClosed},
    {State::kAwaitHello, Event::kClose, State::kClosed},
    {State::kAwaitProof, Event::kViolation, State::kClosed},
    {State::kAwaitProof, Event::kHandshakeTimeout, State::kClosed},
    {State::kAwaitProof, Event::kConnectionLost, State::kClosed},
    {State::kAwaitProof, Event::kClose, State::kClosed},
    {State::kAwaitChallenge, Event::kViolation, State::kClosed},
    {State::kAwaitChallenge, Event::kHandshakeTimeout, State::kClosed},
    {State::kAwaitChallenge, Event::kConnectionLost, State::kClosed},
    {State::kAwaitChallenge, Event::kClose, State::kClosed},
    {State::kOpen, Event::kViolation, State::kClosed},
    {State::kOpen, Event::kSilence, State::kClosed},
    {State::kOpen, Event::kConnectionLost, State::kClosed},
    {State::kOpen, Event::kClose, State::kClosed},
};

// The event that a frame's arrival is for the state machine; nothing for frames of rails, which have sockets
// of their own.
std::optional<Event> event_of(wire::FrameType type) noexcept {
  switch (type) {
    case wire::FrameType::kHello: return Event::kHello;
    case wire::FrameType::kChallenge: return Event::kChallenge;
    case wire::FrameType::kProof: return Event::kProof;
    case wire::FrameType::kRailHello:
    case wire::FrameType::kRailWelcome: return std::nullopt;
    default: return Event::kMessage;
  }
}

wire::ByteSpan bytes_of(std::string_view text) noexcept {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

SipHashKey first_half(const wire::Digest& digest) noexcept {
  SipHashKey key;
  std::copy_n(digest.begin(), key.size(), key.begin());
  return key;
}

wire::ByteSpan body_of(const wire::Bytes& frame) noexcept {
  return wire::ByteSpan(frame).subspan(wire::kHeaderNbytes,
                                       frame.size() - wire::kHeaderNbytes - wire::kMacNbytes);
}

// CHALLENGE's body ends with its extensions, the session and the proof.
wire::ByteSpan up_to_proof(wire::ByteSpan challenge) noexcept {
  return challenge.first(challenge.size() - sizeof(wire::Challenge::proof));
}

// Covers CHALLENGE's body without either proof. The proof of the second secret ends the extensions.
wire::Digest second_proof(std::string_view secret, wire::ByteSpan hello, wire::ByteSpan challenge) noexcept {
  const wire::ByteSpan rest = up_to_proof(challenge);
  const wire::ByteSpan session = rest.last(sizeof(wire::Challenge::session));
  const wire::ByteSpan before =
      rest.first(rest.size() - session.size() - sizeof(wire::Features::second_proof));
  return hmac_sha256(bytes_of(secret),
                     {bytes_of("kvxfer/1 acceptor, second"), sha256({hello, before, session})});
}

std::string milliseconds(Time duration_ns) { return std::to_string(duration_ns / 1'000'000) + " ms"; }

// The sum, or kNever if the sum is too large.
Time after(Time start, Time duration_ns) noexcept {
  return duration_ns > kNever - std::max<Time>(start, 0) ? kNever : start + duration_ns;
}

}  // namespace

std::span<const SessionTransition> session_transitions() noexcept { return kTransitions; }

std::string_view name_of(SessionState state) noexcept {
  switch (state) {
    case State::kAwaitHello: return "await-hello";
    case State::kAwaitChallenge: return "await-challenge";
    case State::kAwaitProof: return "await-proof";
    case State::kOpen: return "open";
    case State::kClosed: return "closed";
  }
  return "unknown";
}

std::string_view name_of(SessionEvent event) noexcept {
  switch (event) {
    case Event::kHello: return "hello";
    case Event::kChallenge: return "challenge";
    case Event::kProof: return "proof";
    case Event::kMessage: return "message";
    case Event::kViolation: return "violation";
    case Event::kHandshakeTimeout: return "handshake-timeout";
    case Event::kSilence: return "silence";
    case Event::kConnectionLost: return "connection-lost";
    case Event::kClose: return "close";
  }
  return "unknown";
}

Session::Session(SessionRole role, const SessionConfig& config, Time now, const RandomSource& random)
    : role_(role),
      state_(role == SessionRole::kInitiator ? State::kAwaitChallenge : State::kAwaitHello),
      config_(config),
      last_heard_at_(now),
      give_up_at_(after(now, config.handshake_timeout_ns)),
      acked_sent_at_(now),  // an initiator's: CHALLENGE will acknowledge HELLO like a heartbeat
      interval_(config.heartbeat_ns) {
  random(nonce_);
  if (role == SessionRole::kAcceptor) {
    random(session_);
    return;
  }
  queue(wire::Hello{.nonce = nonce_, .identity = config_.self, .extensions = wire::encode(config_.features)});
  const wire::ByteSpan body = body_of(output_.back());
  assert(body.size() <= wire::kMaxHandshakeBody && "an identity that no peer accepts");
  hello_body_.assign(body.begin(), body.end());
}

bool Session::step(SessionEvent event) noexcept { return kvxfer::step(session_transitions(), state_, event); }

Status Session::end(SessionEvent event, Code code, std::string text) {
  if (step(event)) reason_ = Status(code, std::move(text));
  return reason_;
}

Status Session::violate(Code code, std::string text) {
  was_violated_ = true;
  say_goodbye(code, text);
  return end(Event::kViolation, code, peer_in_words() + ": " + std::move(text));
}

void Session::say_goodbye(Code code, std::string text) {
  if (state_ == State::kOpen) queue(wire::Goodbye{code, std::move(text)});
}

std::string Session::peer_in_words() const {
  if (!peer_.name.empty()) return "peer \"" + wire::on_one_line(peer_.name) + "\"";
  if (!claimed_.name.empty()) return "a peer that calls itself \"" + wire::on_one_line(claimed_.name) + "\"";
  return role_ == SessionRole::kInitiator ? "the called agent" : "a calling agent";
}

// Numbers, seals (where keys exist) and queues one frame. The number is taken last: if memory is lacking, the
// next frame has it, and the peer misses none.
void Session::queue(const wire::Message& message) {
  wire::Bytes frame = wire::encode(message, next_to_send_);
  if (state_ == State::kOpen) {
    const wire::ByteSpan sealed = wire::ByteSpan(frame).first(frame.size() - wire::kMacNbytes);
    const SipHashMac mac = siphash128(send_key_, sealed);
    std::ranges::copy(mac, frame.end() - wire::kMacNbytes);
  }
  output_.push_back(std::move(frame));
  ++next_to_send_;
}

Result<std::optional<wire::Message>> Session::receive(Time now, wire::ByteSpan frame) {
  std::optional<wire::Message> message;
  Status status = receive(now, frame, message);
  if (!status.ok()) return status;
  return message;
}

// Leaves `message` empty where it is the session's own.
Status Session::receive(Time now, wire::ByteSpan frame, std::optional<wire::Message>& message) {
  if (state_ == State::kClosed) return reason_;
  const Result<wire::Header> header_result = wire::decode_header(frame, max_body());
  if (!header_result.ok()) return violate(Code::kProtocol, header_result.status().message());
  const wire::Header& header = header_result.value();
  if (frame.size() != header.frame_nbytes())
    return violate(Code::kProtocol, "a frame of " + std::to_string(frame.size()) +
                                        " bytes, but its header announces " +
                                        std::to_string(header.frame_nbytes()));
  if (Status status = check_number_and_mac(header, frame); !status.ok()) return status;

  const std::optional<Event> event = event_of(header.type);
  const SessionTransition* const transition =
      event ? find_transition(session_transitions(), state_, *event) : nullptr;
  if (transition == nullptr)
    return violate(Code::kProtocol,
                   std::string(wire::name_of(header.type)) + " in state " + std::string(name_of(state_)));

  const wire::ByteSpan body = frame.subspan(wire::kHeaderNbytes, header.body_nbytes);
  if (Status decoded = wire::decode(header, body, message.emplace()); !decoded.ok()) {
    answer_unknown_version(header, body);
    return violate(Code::kProtocol, decoded.message());
  }
  last_heard_at_ = now;
  if (state_ == State::kOpen) give_up_at_ = after(now, config_.silent_ns);
  stood_still_ns_ = 0;
  num_standstills_ = 0;

  Status status;
  if (const auto* hello = std::get_if<wire::Hello>(&*message)) {
    status = on_hello(now, *hello, body);
  } else if (const auto* challenge = std::get_if<wire::Challenge>(&*message)) {
    status = on_challenge(now, *challenge, body);
  } else if (const auto* proof = std::get_if<wire::Proof>(&*message)) {
    status = on_proof(now, *proof);
  } else if (const auto* goodbye = std::get_if<wire::Goodbye>(&*message)) {
    status = on_goodbye(*goodbye);
  } else {
    state_ = transition->to;
    if (const auto* heartbeat = std::get_if<wire::Heartbeat>(&*message)) {
      status = on_heartbeat(now, *heartbeat);
    } else if (const auto* ack = std::get_if<wire::HeartbeatAck>(&*message)) {
      status = on_heartbeat_ack(now, *ack);
    } else {
      stir(now);
      return {};
    }
  }
  message.reset();
  return status;
}

Status Session::check_number_and_mac(const wire::Header& header, wire::ByteSpan frame) {
  const wire::ByteSpan mac = frame.last(wire::kMacNbytes);
  if (state_ == State::kOpen) {
    const SipHashMac expected = siphash128(receive_key_, frame.first(frame.size() - wire::kMacNbytes));
    if (!equal_in_constant_time(mac, expected))
      return violate(Code::kAuthFailed,
                     std::string(wire::name_of(header.type)) +
                         " with a wrong mac: it was altered on the way, or the peer did not send it");
  } else if (std::ranges::any_of(mac, [](std::byte b) { return b != std::byte{0}; })) {
    return violate(Code::kProtocol, std::string(wire::name_of(header.type)) + " with a mac in the handshake");
  }
  if (header.sequence != next_to_receive_) {
    const char* const why = header.sequence < next_to_receive_ ? ": repeated" : ": frames are missing";
    return violate(Code::kProtocol, std::string(wire::name_of(header.type)) + " with sequence number " +
                                        std::to_string(header.sequence) + ", expected " +
                                        std::to_string(next_to_receive_) + why);
  }
  ++next_to_receive_;
  return Status();
}

// An acceptor sends a caller of another release its own versions, in a CHALLENGE that proves nothing. So the
// caller's operator reads about versions, and not about a connection that ended.
void Session::answer_unknown_version(const wire::Header& header, wire::ByteSpan body) {
  std::uint16_t versions[2] = {wire::kProtocolVersion, wire::kOldestProtocolVersion};  // newest, oldest
  if (body.size() >= sizeof versions) std::memcpy(versions, body.data(), sizeof versions);
  const bool common = versions[0] >= wire::kOldestProtocolVersion && versions[1] <= wire::kProtocolVersion;
  if (header.type != wire::FrameType::kHello || common) return;
  wire::Challenge answer;
  answer.identity.name = config_.self.name;
  queue(answer);
}

// Also refuses our own HELLO or CHALLENGE if a third party without the secret relays it back to us.
Status Session::check_is_another(const wire::Identity& identity) const {
  if (identity.name != config_.self.name || identity.incarnation != config_.self.incarnation) return Status();
  return Status(Code::kInvalidArgument, "that is this agent's own address: use the address of another agent");
}

void Session::certify(Certified certified) {
  config_.secret = std::move(certified.secret);
  config_.second_secret.clear();
  certified_ = std::move(certified);
}

Status Session::admit(std::string_view name) {
  if (!config_.needs_certificate) return Status();
  if (!certified_)
    return Status(Code::kAuthFailed,
                  "it did not prove its identity by a certificate, which this agent requires");
  Result<std::string> identity = certified_->admit(name);
  if (!identity.ok()) return identity.status();
  identity_ = std::move(identity).value();
  return Status();
}

Status Session::on_hello(Time now, const wire::Hello& hello, wire::ByteSpan body) {
  if (const Status self = check_is_another(hello.identity); !self.ok()) {
    // Proves nothing. The caller is this agent itself; the answer tells it why the connection ends.
    wire::Challenge answer;
    answer.identity = config_.self;
    queue(answer);
    return violate(self.code(), self.message());
  }
  if (const Status status = admit(hello.identity.name); !status.ok())
    return violate(status.code(), status.message());
  claimed_ = hello.identity;
  protocol_ = std::min(hello.version, wire::kProtocolVersion);
  peer_features_ = wire::decode_features(hello.extensions);
  wire::Challenge challenge{.nonce = nonce_, .identity = config_.self, .extensions = {}, .session = session_};
  wire::Features features = config_.features;
  const auto encoded = [&] {
    challenge.extensions = wire::encode(features);
    return wire::encode(challenge, 0);
  };
  if (!config_.second_secret.empty()) {
    // Reserves the place of the proof first; the bytes there are no part of what it proves.
    features.second_proof.fill(std::byte{0xff});
    features.second_proof = second_proof(config_.second_secret, body, body_of(encoded()));
  }
  transcript_ = sha256({body, up_to_proof(body_of(encoded()))});
  challenge.proof = prove("kvxfer/1 acceptor");
  if (!config_.second_secret.empty()) second_transcript_ = sha256({body, body_of(encoded())});
  queue(challenge);
  acked_sent_at_ = now;  // the PROOF will acknowledge this CHALLENGE like a heartbeat
  step(Event::kHello);
  return Status();
}

// The initiator's: keeps the secret that CHALLENGE proves; false if CHALLENGE proves none.
bool Session::choose_secret(const wire::Challenge& challenge, wire::ByteSpan body) {
  const auto is_of_ours = [&](const wire::Digest& proof, const auto& prove) {
    if (equal_in_constant_time(proof, prove())) return true;
    if (config_.second_secret.empty()) return false;
    std::swap(config_.secret, config_.second_secret);
    return equal_in_constant_time(proof, prove());
  };
  const wire::Digest& second = peer_features_.second_proof;
  transcript_ = sha256({hello_body_, up_to_proof(body)});
  bool proved = is_of_ours(challenge.proof, [&] { return prove("kvxfer/1 acceptor"); });
  if (!proved && second != wire::Digest{} &&
      is_of_ours(second, [&] { return second_proof(config_.secret, hello_body_, body); })) {
    proved = true;
    transcript_ = sha256({hello_body_, body});
  }
  config_.second_secret.clear();
  return proved;
}

Status Session::on_challenge(Time now, const wire::Challenge& challenge, wire::ByteSpan body) {
  if (const Status self = check_is_another(challenge.identity); !self.ok())
    return violate(self.code(), self.message());
  if (const Status status = admit(challenge.identity.name); !status.ok())
    return violate(status.code(), status.message());
  claimed_ = challenge.identity;
  protocol_ = std::min(challenge.version, wire::kProtocolVersion);
  peer_features_ = wire::decode_features(challenge.extensions);
  if (!choose_secret(challenge, body))
    return violate(Code::kAuthFailed,
                   "it has another secret (the proof in its CHALLENGE is wrong); " + config_.other_secret);
  session_ = challenge.session;
  queue(wire::Proof{prove("kvxfer/1 initiator")});
  step(Event::kChallenge);
  open(now, challenge.identity);
  return Status();
}

Status Session::on_proof(Time now, const wire::Proof& proof) {
  const auto is_proved = [&] { return equal_in_constant_time(proof.proof, prove("kvxfer/1 initiator")); };
  bool proved = is_proved();
  if (!proved && !config_.second_secret.empty()) {
    config_.secret = config_.second_secret;
    transcript_ = second_transcript_;
    proved = is_proved();
  }
  config_.second_secret.clear();
  if (!proved)
    return violate(Code::kAuthFailed, "it has another secret (its PROOF is wrong); " + config_.other_secret);
  step(Event::kProof);
  open(now, std::move(claimed_));
  return Status();
}

void Session::open(Time now, wire::Identity peer) {
  peer_ = std::move(peer);
  const SipHashKey initiator_key = first_half(prove("kvxfer/1 keys i->r"));
  const SipHashKey acceptor_key = first_half(prove("kvxfer/1 keys r->i"));
  const bool initiator = role_ == SessionRole::kInitiator;
  send_key_ = initiator ? initiator_key : acceptor_key;
  receive_key_ = initiator ? acceptor_key : initiator_key;
  rails_key_ = prove("kvxfer/1 keys rails");
  give_up_at_ = after(now, config_.silent_ns);
  last_heartbeat_at_ = heartbeat_left_at_ = now;  // both ends have just answered a nonce
  heartbeat_due_at_ = next_heartbeat_due(now);
}

// An acceptor's heartbeats of all its sessions are due at the same times, a little early, so that it wakes
// once for many. An initiator sends its heartbeat with its answer to the acceptor's, and by itself if none
// comes.
Time Session::next_heartbeat_due(Time now) const noexcept {
  const Time step = config_.heartbeat_ns / kHeartbeatSteps;
  const Time latest = std::min(after(now, interval_), renewal_due_at());
  if (role_ == SessionRole::kInitiator || step == 0 || latest == kNever) return latest;
  return latest - step - (latest - step) % step;
}

Time Session::renewal_due_at() const noexcept { return after(heartbeat_left_at_, renewal_ns_); }

// An exchange is one heartbeat, of whichever end, and its answer. The intervals of both ends grow alike, so
// that the end that leads goes on leading.
void Session::count_exchange(Time now) noexcept {
  if (now - exchanged_at_ < config_.heartbeat_ns / 2) return;  // both ends' heartbeats are one exchange
  exchanged_at_ = now;
  is_quiet_ = !std::exchange(is_stirred_, false) && renewal_ns_ > config_.heartbeat_ns;
  const Time longest = std::max(config_.heartbeat_ns, config_.silent_ns / 8 * 3);
  interval_ = is_quiet_ ? interval_ + std::min(interval_ / 4, longest - interval_) : config_.heartbeat_ns;
}

// A heartbeat that is late by the shorter interval goes out before what ends the quiet: so each right that
// the peer checks or grants from now on is counted from a heartbeat no older than in any busy session.
void Session::stir(Time now) {
  is_stirred_ = true;
  if (!is_quiet_) return;
  is_quiet_ = false;
  interval_ = config_.heartbeat_ns;
  heartbeat_due_at_ = std::min(heartbeat_due_at_, after(heartbeat_left_at_, interval_));
  if (heartbeat_due_at_ <= now) send_heartbeat(now);
}

Status Session::on_heartbeat(Time now, const wire::Heartbeat& heartbeat) {
  if (heartbeat.number != last_heard_heartbeat_ + 1)
    return violate(Code::kProtocol, "HEARTBEAT.number: " + std::to_string(heartbeat.number) + ", expected " +
                                        std::to_string(last_heard_heartbeat_ + 1));
  last_heard_heartbeat_ = heartbeat.number;
  last_heartbeat_at_ = now;
  queue(wire::HeartbeatAck{heartbeat.number});
  count_exchange(now);
  // The answer alone shows that this end lives; the peer would have to answer a heartbeat.
  const bool is_answer_enough = is_quiet_ && renewal_due_at() > after(now, interval_);
  // Our heartbeat goes with that answer if it would be due before long: the two ends then wake twice for
  // both heartbeats, and not three times.
  if (is_answer_enough)
    heartbeat_due_at_ = next_heartbeat_due(now);
  else if (is_quiet_ || heartbeat_due_at_ <= after(now, config_.heartbeat_ns / 2))
    send_heartbeat(now);
  return Status();
}

Status Session::on_heartbeat_ack(Time now, const wire::HeartbeatAck& ack) {
  if (ack.number != last_acked_heartbeat_ + 1 || ack.number > last_sent_heartbeat_)
    return violate(Code::kProtocol, "HEARTBEAT_ACK.number: " + std::to_string(ack.number) + " of " +
                                        std::to_string(last_sent_heartbeat_) + " sent, " +
                                        std::to_string(last_acked_heartbeat_) + " already acknowledged");
  last_acked_heartbeat_ = ack.number;
  if (last_sent_heartbeat_ - ack.number < kNumHeartbeatTimes)
    acked_sent_at_ = heartbeat_sent_at_[ack.number % kNumHeartbeatTimes];
  if (hurried_) hurry_heartbeat(now);
  return Status();
}

void Session::hurry_heartbeat(Time now) {
  if (state_ != State::kOpen) return;
  hurried_ = true;
  if (last_acked_heartbeat_ == last_sent_heartbeat_) send_heartbeat(now);
}

void Session::send_heartbeat(Time now) {
  queue(wire::Heartbeat{last_sent_heartbeat_ + 1});
  hurried_ = false;
  ++last_sent_heartbeat_;
  heartbeat_left_at_ = now;
  heartbeat_sent_at_[last_sent_heartbeat_ % kNumHeartbeatTimes] = now;
  heartbeat_due_at_ = next_heartbeat_due(now);
}

Status Session::on_goodbye(const wire::Goodbye& goodbye) {
  const Code code = goodbye.code == Code::kAuthFailed ? Code::kAuthFailed : Code::kPeerLost;
  std::string text = peer_in_words() + " said goodbye (" + std::string(name_of(goodbye.code)) + ")";
  if (!goodbye.text.empty()) text += ": " + wire::on_one_line(goodbye.text);
  return end(Event::kClose, code, std::move(text));
}

void Session::send(Time now, const wire::Message& message) {
  assert(event_of(wire::type_of(message)) == Event::kMessage && "the session sends its handshake itself");
  // Closed: the sender has not heard of it yet, and the frame has nowhere to go.
  if (state_ != State::kOpen) return;
  stir(now);
  queue(message);
}

// If this call comes later than the agent asked for, the agent has not run meanwhile: it was stopped or
// starved, or its machine was paused. That is not the peer's silence. What the peer sent may still be
// unread. The peer may have stood still, too, and may come back a little later, so it has at least half the
// limit left.
void Session::allow_for_standstill(Time now) {
  const Time limit = limit_ns(), late = now - std::max(next_deadline(), last_heard_at_);
  if (late < limit / 4 || num_standstills_ == kMaxStandstills) return;
  ++num_standstills_;
  stood_still_ns_ += late;
  give_up_at_ = std::max(after(give_up_at_, late), after(now, limit / 2));
}

Status Session::on_time(Time now) {
  if (state_ == State::kClosed) return Status();
  allow_for_standstill(now);
  if (state_ != State::kOpen) {
    if (now < give_up_at_) return Status();
    return end(Event::kHandshakeTimeout, Code::kNoAnswer,
               peer_in_words() + ": no " + std::string(awaited_frame()) + " within " +
                   milliseconds(config_.handshake_timeout_ns) +
                   " of the connection (handshake_timeout_s); is the other end a kvxfer agent?");
  }
  if (now >= give_up_at_) {
    std::string text = "nothing heard for " + milliseconds(now - last_heard_at_) + ", the limit is " +
                       milliseconds(config_.silent_ns);
    if (stood_still_ns_ > 0)
      text += " plus the " + milliseconds(stood_still_ns_) + " in which this agent itself stood still";
    say_goodbye(Code::kPeerSilent, text);
    return end(Event::kSilence, Code::kPeerSilent, peer_in_words() + ": " + text);
  }
  // Sent even while other frames go out: only a HEARTBEAT renews leases.
  if (now >= heartbeat_due_at_) {
    count_exchange(now);
    send_heartbeat(now);
  }
  return Status();
}

Time Session::next_deadline() const noexcept {
  if (state_ == State::kClosed) return kNever;
  return std::min(heartbeat_due_at_, give_up_at_);  // no heartbeat is due in the handshake
}

Time Session::limit_ns() const noexcept {
  return state_ == State::kOpen ? config_.silent_ns : config_.handshake_timeout_ns;
}

std::string_view Session::awaited_frame() const noexcept {
  switch (state_) {
    case State::kAwaitHello: return "HELLO";
    case State::kAwaitChallenge: return "CHALLENGE";
    case State::kAwaitProof: return "PROOF";
    default: return "frame";
  }
}

void Session::connecting() noexcept {
  if (state_ == State::kAwaitChallenge) give_up_at_ = kNever;
}

void Session::connection_lost() {
  const std::string text = peer_in_words() + ": the connection ended";
  const std::string before = text + " before " + std::string(awaited_frame());
  switch (state_) {
    case State::kAwaitHello: (void)end(Event::kConnectionLost, Code::kPeerLost, before); break;
    case State::kAwaitChallenge:
      (void)end(Event::kConnectionLost, Code::kPeerLost,
                before +
                    "; is the other end a kvxfer agent? If so, its log says why it closed the connection, "
                    "for example because its handshake_timeout_s was over");
      break;
    case State::kAwaitProof:
      // The peer does not tell a stranger what it found wrong. It may also have ended, or given up.
      (void)end(Event::kConnectionLost, Code::kPeerLost,
                before + ": it ended, gave up, or has another secret (see its log); " + config_.other_secret);
      break;
    case State::kOpen: (void)end(Event::kConnectionLost, Code::kPeerLost, text); break;
    case State::kClosed: break;
  }
}

void Session::close([[maybe_unused]] Time now, Code code, std::string text) {
  if (code == Code::kOk || code == Code::kAgain) code = Code::kClosed;  // neither is a reason to end
  say_goodbye(code, text);
  (void)end(Event::kClose, code, std::move(text));
}

std::vector<wire::Bytes> Session::take_output() { return std::exchange(output_, {}); }

void Session::take_output(std::vector<wire::Bytes>& into) {
  into.clear();
  std::swap(into, output_);
}

std::uint32_t Session::max_body() const noexcept {
  return state_ == State::kOpen ? wire::kMaxBody : wire::kMaxHandshakeBody;
}

wire::Digest Session::prove(std::string_view label) const {
  return hmac_sha256(bytes_of(config_.secret), {bytes_of(label), transcript_});
}

// `transport` is last, so its length need not be hashed.
wire::Digest Session::prove_rail(std::string_view label, const wire::RailName& rail,
                                 std::string_view transport, std::uint16_t instance,
                                 std::string_view channel) const {
  std::array<std::byte, 8> name;
  for (std::size_t i = 0; i < 2; ++i) {
    name[i] = static_cast<std::byte>(rail.index >> 8 * i);
    name[2 + i] = static_cast<std::byte>(instance >> 8 * i);
  }
  for (std::size_t i = 0; i < 4; ++i) name[4 + i] = static_cast<std::byte>(rail.attempt >> 8 * i);
  return hmac_sha256(rails_key_, {bytes_of(label), session_, name, bytes_of(channel), bytes_of(transport)});
}

wire::Bytes Session::rail_hello(const wire::RailName& rail, std::string_view transport,
                                std::uint16_t instance, std::string_view channel) const {
  assert(state_ == State::kOpen && role_ == SessionRole::kInitiator && rail.index != wire::kNoRail);
  const wire::Digest proof = prove_rail("kvxfer/1 rail hello", rail, transport, instance, channel);
  return wire::encode(wire::RailHello{session_, rail, std::string(transport), instance, proof}, 0);
}

bool Session::verify_rail_hello(const wire::RailHello& hello, std::string_view channel) {
  if (state_ != State::kOpen || role_ != SessionRole::kAcceptor || hello.rail.index == wire::kNoRail)
    return false;
  if (hello.session != session_) return false;
  const wire::Digest expected =
      prove_rail("kvxfer/1 rail hello", hello.rail, hello.transport, hello.instance, channel);
  if (!equal_in_constant_time(hello.proof, expected)) return false;
  if (hello.rail.index >= next_attempts_.size()) next_attempts_.resize(hello.rail.index + std::size_t{1});
  if (hello.rail.attempt < next_attempts_[hello.rail.index]) return false;
  next_attempts_[hello.rail.index] = hello.rail.attempt + std::uint64_t{1};
  return true;
}

wire::Bytes Session::rail_welcome(const wire::RailName& rail, std::uint16_t instance,
                                  std::string_view channel) const {
  assert(state_ == State::kOpen && role_ == SessionRole::kAcceptor);
  const wire::Digest proof = prove_rail("kvxfer/1 rail welcome", rail, "", instance, channel);
  return wire::encode(wire::RailWelcome{instance, proof}, 0);
}

bool Session::verify_rail_welcome(const wire::RailName& rail, const wire::RailWelcome& welcome,
                                  std::string_view channel) const {
  return state_ == State::kOpen && role_ == SessionRole::kInitiator &&
         equal_in_constant_time(welcome.proof,
                                prove_rail("kvxfer/1 rail welcome", rail, "", welcome.instance, channel));
}

}  // namespace kvxfer
