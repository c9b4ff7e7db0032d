// One authenticated conversation between two agents. No I/O, no clock, no threads: whole frames
// and the time come in, frames to send and messages come out.
//
// Handshake (mutual challenge-response over a shared secret; an empty secret runs the same
// steps and proves nothing: agents always have one, given or their user's):
//   initiator  HELLO{nonce_i, identity_i}
//   acceptor   CHALLENGE{nonce_r, identity_r, session, proof_r}
//   initiator  PROOF{proof_i}
// transcript = sha256(HELLO body || CHALLENGE body without its proof)
// proof_r = hmac(secret, "kvxfer/1 acceptor" || transcript), proof_i with "initiator";
// keys = hmac(secret, "kvxfer/1 keys <i->r | r->i | rails>" || transcript).
// Afterwards every frame carries the next sequence number and a mac under its direction's key.
// Anything else - a gap, a repetition, a bad mac, a frame that its state does not allow - closes
// the session with kProtocol or kAuthFailed.
//
// While one secret is replaced by another, an end accepts two. An acceptor with two proves both: its first
// as above, its second in the last of CHALLENGE's extensions,
//   second_proof_r = hmac(second secret, "kvxfer/1 acceptor, second" ||
//                                        sha256(HELLO body || CHALLENGE body without both proofs)).
// The initiator accepts the first of the two proofs that matches one of its own secrets. PROOF and keys use
// that secret, so the acceptor tries both of its secrets on PROOF. If the acceptor's second secret is used,
// the transcript covers the whole CHALLENGE body: an attacker that spoils the first proof on its way, so
// that the second is taken, ends the handshake. An initiator proves nothing before the acceptor has, and
// HELLO does not depend on a secret. An acceptor gives every caller proofs against which guesses can be
// checked; for that reason a secret has at least 128 bits. An older initiator skips the second proof.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/control/siphash.h"
#include "core/control/wire.h"
#include "core/state_table.h"

namespace kvxfer {

using Time = std::int64_t;  // monotonic nanoseconds
inline constexpr Time kNever = INT64_MAX;

using RandomSource = std::function<void(std::span<std::byte>)>;

struct SessionConfig {
  std::string secret;
  std::string second_secret;  // accepted as well; "": none
  // Advice for an operator whose peer has another secret.
  std::string other_secret = "give both agents the same secret";
  // Used instead of a secret: no session opens before certify() has said what the connection's
  // certificates proved.
  bool needs_certificate = false;
  wire::Identity self;
  wire::Features features;
  Time handshake_timeout_ns = 2'000'000'000;
  // The longest time between two heartbeats while anything else comes or goes, whatever it is. In a quiet
  // session it grows, up to half of silent_ns.
  Time heartbeat_ns = 500'000'000;
  Time silent_ns = 2'000'000'000;  // nothing heard for this long: the peer is lost
};

// What certificates have proved about a connection, before its first frame came.
struct Certified {
  std::string secret;  // known to both ends of the connection, and to no one else
  // Returns the identity of a peer that uses this name, or why this agent refuses the peer.
  std::function<Result<std::string>(std::string_view name)> admit;
};

enum class SessionRole : std::uint8_t { kInitiator, kAcceptor };

enum class SessionState : std::uint8_t { kAwaitHello, kAwaitChallenge, kAwaitProof, kOpen, kClosed };
// kMessage: any frame that is allowed once open. kClose: our close(), or the peer's GOODBYE.
enum class SessionEvent : std::uint8_t {
  kHello,
  kChallenge,
  kProof,
  kMessage,
  kViolation,
  kHandshakeTimeout,
  kSilence,
  kConnectionLost,
  kClose
};
std::string_view name_of(SessionState state) noexcept;  // "await-hello"
std::string_view name_of(SessionEvent event) noexcept;

using SessionTransition = Transition<SessionState, SessionEvent>;
// All transitions. A pair that is not listed is a violation (frames) or is ignored (timers).
std::span<const SessionTransition> session_transitions() noexcept;

class Session {
 public:
  // An initiator has its HELLO in take_output() at once. `config.self` fits a HELLO: its names
  // are UTF-8, and all together stay well below wire::kMaxHandshakeBody.
  Session(SessionRole role, const SessionConfig& config, Time now, const RandomSource& random);

  // Consumes one whole frame (header, body, mac). Returns the message for the layer above, or nothing if
  // the session handled the frame itself (handshake, heartbeats). An error means that the session closed,
  // and says why; output that is left should still be flushed.
  Result<std::optional<wire::Message>> receive(Time now, wire::ByteSpan frame);

  // Seals one message for the peer. Only while open.
  void send(Time now, const wire::Message& message);

  // Puts due heartbeats into the output. kPeerSilent or kNoAnswer (handshake) if time ran out. If the
  // call comes much later than next_deadline(), this agent stood still, and the peer is given more time.
  Status on_time(Time now);
  Time next_deadline() const noexcept;

  // The number of the next HEARTBEAT. Once the peer has acknowledged that one, it has read everything that
  // was sent to it before. The heartbeat goes out at its interval. If a caller waits for it, it goes out
  // sooner: at once, or when the one under way is acknowledged. So there is one a round trip, however many
  // callers wait.
  std::uint64_t next_heartbeat() const noexcept { return last_sent_heartbeat_ + 1; }
  std::uint64_t acknowledged_heartbeat() const noexcept { return last_acked_heartbeat_; }
  void hurry_heartbeat(Time now);
  // Ends the quiet: something else than heartbeats comes or goes, or the peer is to show soon that it lives.
  void stir(Time now);
  // What this end holds of the peer is renewed by heartbeats, and needs one at least so often. kNever: it
  // holds nothing.
  void renew_within(Time longest_ns) noexcept { renewal_ns_ = std::max(longest_ns, config_.heartbeat_ns); }

  void certify(Certified certified);  // before the peer's first frame

  // For an initiator whose dialler has its own limit, for connection and handshake together.
  void connecting() noexcept;
  void connection_lost();  // end of the socket
  void close(Time now, Code code, std::string text);  // sends GOODBYE where open

  // Frames to write to the connection, in order; empties the queue.
  std::vector<wire::Bytes> take_output();
  // The same for frequent calls: discards the contents of `into` and reuses its memory for the new frames.
  void take_output(std::vector<wire::Bytes>& into);
  // Frames that were taken and could not be sent are the next ones again.
  void give_back(std::vector<wire::Bytes>& frames) noexcept { output_.swap(frames); }

  SessionState state() const noexcept { return state_; }
  const Status& reason() const noexcept { return reason_; }  // why it closed; ok before
  bool was_violated() const noexcept { return was_violated_; }  // it closed because it refused a frame
  SessionRole role() const noexcept { return role_; }
  const wire::Identity& peer() const noexcept { return peer_; }  // once open (acceptor: once PROOF is in)
  const std::string& identity() const noexcept { return identity_; }  // the peer's, by certificate; "": none
  const wire::Id128& id() const noexcept { return session_; }
  std::uint16_t protocol() const noexcept { return protocol_; }  // that both ends speak, once open
  const wire::Features& peer_features() const noexcept { return peer_features_; }  // once open
  std::uint32_t max_body() const noexcept;  // of the next frame: small until authenticated

  // Renewals: when the newest HEARTBEAT that the peer has acknowledged was sent. The holder of a lease
  // counts its ttl from here.
  Time acknowledged_heartbeat_sent_at() const noexcept { return acked_sent_at_; }
  // The newest time at which the peer proved with a HEARTBEAT that it is alive. That renews the peer's
  // leases.
  Time last_heartbeat_at() const noexcept { return last_heartbeat_at_; }

  // Rail sockets are bound to the session: the initiator's first frame; the acceptor's check of it (it
  // accepts each attempt at a rail once, and none before that one); the acceptor's answer; the initiator's
  // check of the answer. `channel`: a key that only the two ends of an encrypted socket have, so no third
  // party stands between them.
  wire::Bytes rail_hello(const wire::RailName& rail, std::string_view transport, std::uint16_t instance = 0,
                         std::string_view channel = {}) const;
  bool verify_rail_hello(const wire::RailHello& hello, std::string_view channel = {});
  wire::Bytes rail_welcome(const wire::RailName& rail, std::uint16_t instance = 0,
                           std::string_view channel = {}) const;
  bool verify_rail_welcome(const wire::RailName& rail, const wire::RailWelcome& welcome,
                           std::string_view channel = {}) const;

 private:
  // The newest heartbeats that are not acknowledged yet and whose times are kept. 16 = 8 s at the default
  // heartbeat, and a peer that is silent for 2 s is lost. The acknowledgement of an older one renews
  // nothing.
  static constexpr std::uint64_t kNumHeartbeatTimes = 16;
  // An acceptor's heartbeats are due at multiples of the interval divided by this: 30 ms of 500. In that
  // time an initiator's answer comes before the initiator's own heartbeat is due.
  static constexpr Time kHeartbeatSteps = 16;
  // How many standstills of this agent, while it hears nothing of a peer, are not held against that peer.
  // Each standstill may have any length, but the fourth counts against the peer.
  static constexpr int kMaxStandstills = 3;

  // Takes the table's transition for `event`; false, and nothing changes, where there is none.
  bool step(SessionEvent event) noexcept;
  Status end(SessionEvent event, Code code, std::string text);
  // end(kViolation), and a GOODBYE with the reason if the peer can check it.
  Status violate(Code code, std::string text);
  void say_goodbye(Code code, std::string text);
  void allow_for_standstill(Time now);
  Time limit_ns() const noexcept;  // of the handshake, or of silence

  Status receive(Time now, wire::ByteSpan frame, std::optional<wire::Message>& message);
  Status check_number_and_mac(const wire::Header& header, wire::ByteSpan frame);
  Status on_hello(Time now, const wire::Hello& hello, wire::ByteSpan body);
  Status on_challenge(Time now, const wire::Challenge& challenge, wire::ByteSpan body);
  Status on_proof(Time now, const wire::Proof& proof);
  Status on_heartbeat(Time now, const wire::Heartbeat& heartbeat);
  Status on_heartbeat_ack(Time now, const wire::HeartbeatAck& ack);
  void send_heartbeat(Time now);
  Time next_heartbeat_due(Time now) const noexcept;
  Time renewal_due_at() const noexcept;
  void count_exchange(Time now) noexcept;  // of heartbeats
  Status on_goodbye(const wire::Goodbye& goodbye);
  void answer_unknown_version(const wire::Header& header, wire::ByteSpan body);
  bool choose_secret(const wire::Challenge& challenge, wire::ByteSpan body);
  Status check_is_another(const wire::Identity& identity) const;
  void open(Time now, wire::Identity peer);
  void queue(const wire::Message& message);

  wire::Digest prove(std::string_view label) const;
  wire::Digest prove_rail(std::string_view label, const wire::RailName& rail, std::string_view transport,
                          std::uint16_t instance, std::string_view channel) const;
  Status admit(std::string_view name);
  std::string peer_in_words() const;
  std::string_view awaited_frame() const noexcept;

  SessionRole role_;
  SessionState state_;
  SessionConfig config_;
  Status reason_;
  bool was_violated_ = false;

  wire::Digest nonce_{};  // ours
  wire::Bytes hello_body_;  // initiator: kept until CHALLENGE completes the transcript
  wire::Digest transcript_{}, second_transcript_{};
  wire::Identity claimed_;  // acceptor: the peer's until its PROOF is in
  wire::Identity peer_;
  std::optional<Certified> certified_;
  std::string identity_;
  wire::Id128 session_{};
  std::uint16_t protocol_ = wire::kProtocolVersion;
  wire::Features peer_features_;

  SipHashKey send_key_{}, receive_key_{};
  wire::Digest rails_key_{};
  std::uint64_t next_to_send_ = 0, next_to_receive_ = 0;  // sequence numbers
  std::vector<wire::Bytes> output_;

  Time last_heard_at_ = 0;
  Time give_up_at_ = 0;
  Time stood_still_ns_ = 0;  // how long this agent stood still since it heard the peer
  int num_standstills_ = 0;  // the number of those standstills
  Time heartbeat_due_at_ = kNever;
  std::uint64_t last_sent_heartbeat_ = 0, last_acked_heartbeat_ = 0, last_heard_heartbeat_ = 0;
  std::array<Time, kNumHeartbeatTimes> heartbeat_sent_at_{};
  Time acked_sent_at_ = 0;
  Time last_heartbeat_at_ = 0;
  bool hurried_ = false;  // a caller waits for the next heartbeat
  // Nothing but heartbeats comes and goes. The first such exchange after something else counts for that.
  bool is_quiet_ = false, is_stirred_ = true;
  Time interval_;  // the longest time between two signs of life of this end
  Time exchanged_at_ = 0;
  Time heartbeat_left_at_ = 0;  // the newest one
  Time renewal_ns_ = kNever;

  std::vector<std::uint64_t> next_attempts_;  // by index, for rails that were accepted; at most 512 KiB
};

}  // namespace kvxfer
