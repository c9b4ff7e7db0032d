// The session: who may speak, in which order, under which key, and when it ends.
#include <algorithm>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "check.h"
#include "core/session.h"
#include "core/sha256.h"
#include "wire_samples.h"

namespace {

using namespace wire_samples;
using State = SessionState;
using Event = SessionEvent;

constexpr Time kMs = 1'000'000;
constexpr Time kStart = 1'000'000 * kMs;

RandomSource random_source(std::uint64_t seed) {
  return [random = check::Random(seed)](std::span<std::byte> out) mutable {
    random.fill(out.data(), out.size());
  };
}

SessionConfig config_of(std::string name, std::string secret = "open sesame") {
  SessionConfig config;
  config.secret = std::move(secret);
  config.self.name = std::move(name);
  config.self.incarnation.fill(std::byte{static_cast<unsigned char>(config.self.name[0])});
  config.self.unix_name = "kvxfer-" + config.self.name;
  config.self.transports = {"shm", "tcp"};
  return config;
}

struct Pair {
  explicit Pair(std::uint64_t seed = check::seed(), SessionConfig a = config_of("prefill-0"),
                SessionConfig b = config_of("decode-0"))
      : initiator(SessionRole::kInitiator, a, now, random_source(2 * seed)),
        acceptor(SessionRole::kAcceptor, b, now, random_source(2 * seed + 1)) {}

  Session& other(Session& one) { return &one == &initiator ? acceptor : initiator; }

  // Carries what `from` has to say; the first error ends it.
  Status carry(Session& from) {
    for (const Bytes& frame : from.take_output()) {
      Result<std::optional<Message>> result = other(from).receive(now, frame);
      if (!result.ok()) return result.status();
      if (result.value()) (&from == &initiator ? at_acceptor : at_initiator).push_back(*result.value());
    }
    return Status();
  }
  Status handshake() {
    if (Status status = carry(initiator); !status.ok()) return status;
    if (Status status = carry(acceptor); !status.ok()) return status;
    return carry(initiator);
  }

  Time now = kStart;
  Session initiator, acceptor;
  std::vector<Message> at_initiator, at_acceptor;
};

bool says(const Status& status, std::string_view words) {
  if (status.message().find(words) != std::string::npos) return true;
  std::printf("  it says: %s\n", status.message().c_str());
  return false;
}

// A session of either role in any state that it can be in, and the peer that brought it there.
struct Scene {
  SessionRole role;
  State state;
};
constexpr Scene kScenes[] = {
    {SessionRole::kAcceptor, State::kAwaitHello},
    {SessionRole::kAcceptor, State::kAwaitProof},
    {SessionRole::kAcceptor, State::kOpen},
    {SessionRole::kAcceptor, State::kClosed},
    {SessionRole::kInitiator, State::kAwaitChallenge},
    {SessionRole::kInitiator, State::kOpen},
    {SessionRole::kInitiator, State::kClosed},
};
Session& enter(Pair& pair, const Scene& scene) {
  Session& session = scene.role == SessionRole::kAcceptor ? pair.acceptor : pair.initiator;
  if (scene.state == State::kAwaitProof) REQUIRE_OK(pair.carry(pair.initiator));
  if (scene.state == State::kOpen) REQUIRE_OK(pair.handshake());
  if (scene.state == State::kClosed) session.connection_lost();
  REQUIRE_EQ(session.state(), scene.state);
  return session;
}

Message any_message(check::Random& random) {
  // Of those that the layer above sends: REGION and all after it.
  static const std::size_t first = Message(Region()).index();
  return Sampler(random, 6).message(random.between(first, kNumKinds - 1));
}

// ---- how it should go

TEST(two_agents_open_a_session_and_know_each_other) {
  Pair pair;
  CHECK_EQ(pair.initiator.state(), State::kAwaitChallenge);
  CHECK_EQ(pair.acceptor.state(), State::kAwaitHello);
  CHECK_EQ(pair.initiator.max_body(), kMaxHandshakeBody);
  REQUIRE_OK(pair.carry(pair.initiator));
  CHECK_EQ(pair.acceptor.state(), State::kAwaitProof);
  CHECK_EQ(pair.acceptor.max_body(), kMaxHandshakeBody);
  CHECK_EQ(pair.acceptor.peer().name, "");  // it has proved nothing yet
  REQUIRE_OK(pair.carry(pair.acceptor));
  CHECK_EQ(pair.initiator.state(), State::kOpen);
  REQUIRE_OK(pair.carry(pair.initiator));
  CHECK_EQ(pair.acceptor.state(), State::kOpen);

  CHECK(same(pair.initiator.peer(), config_of("decode-0").self));
  CHECK(same(pair.acceptor.peer(), config_of("prefill-0").self));
  CHECK(pair.initiator.id() == pair.acceptor.id());
  CHECK(pair.initiator.id() != Id128{});
  CHECK_EQ(pair.initiator.max_body(), kMaxBody);
  CHECK_EQ(pair.acceptor.max_body(), kMaxBody);
  CHECK(pair.at_initiator.empty() && pair.at_acceptor.empty());
}

TEST(an_empty_secret_runs_the_same_steps) {
  Pair pair(1, config_of("a", ""), config_of("b", ""));
  CHECK_OK(pair.handshake());
  CHECK_EQ(pair.acceptor.state(), State::kOpen);
}

TEST(messages_arrive_as_sent_and_in_order_both_ways) {
  check::Random random(check::seed());
  Pair pair;
  REQUIRE_OK(pair.handshake());
  std::vector<Message> from_initiator, from_acceptor;
  for (int i = 0; i < 3000; ++i) {
    pair.now += static_cast<Time>(random.below(static_cast<std::uint64_t>(200 * kMs)));
    switch (random.below(6)) {
      case 0:
      case 1:
        from_initiator.push_back(any_message(random));
        pair.initiator.send(pair.now, from_initiator.back());
        break;
      case 2:
      case 3:
        from_acceptor.push_back(any_message(random));
        pair.acceptor.send(pair.now, from_acceptor.back());
        break;
      case 4: REQUIRE_OK(pair.carry(pair.initiator)); break;
      default: REQUIRE_OK(pair.carry(pair.acceptor)); break;
    }
    if (random.chance(30)) {
      REQUIRE_OK(pair.carry(pair.initiator));
      REQUIRE_OK(pair.carry(pair.acceptor));
      REQUIRE_OK(pair.initiator.on_time(pair.now));
      REQUIRE_OK(pair.acceptor.on_time(pair.now));
    }
  }
  REQUIRE_OK(pair.carry(pair.initiator));
  REQUIRE_OK(pair.carry(pair.acceptor));
  CHECK(same(pair.at_acceptor, from_initiator));
  CHECK(same(pair.at_initiator, from_acceptor));
}

// ---- secrets

TEST(the_initiator_refuses_a_peer_with_another_secret) {
  Pair pair(1, config_of("prefill-0"), config_of("decode-0", "other"));
  REQUIRE_OK(pair.carry(pair.initiator));
  const Status status = pair.carry(pair.acceptor);
  CHECK_EQ(status.code(), Code::kAuthFailed);
  CHECK(says(status, "\"decode-0\": the peer's secret differs"));
  CHECK(says(status, "give both agents the same secret"));
  CHECK_EQ(pair.initiator.state(), State::kClosed);
  CHECK(pair.initiator.take_output().empty());  // nothing is proved to a stranger

  pair.acceptor.connection_lost();  // all that the acceptor sees
  CHECK_EQ(pair.acceptor.reason().code(), Code::kAuthFailed);
  CHECK(says(pair.acceptor.reason(), "before PROOF"));
}

TEST(the_acceptor_refuses_a_peer_that_cannot_prove_the_secret) {
  for (const char* secret : {"other", "", "open sesam", "open sesame "}) {
    Pair pair;
    REQUIRE_OK(pair.carry(pair.initiator));
    // An initiator that has another secret and does not mind that ours differs.
    Pair liar(check::seed(), config_of("prefill-0", secret), config_of("decode-0", secret));
    REQUIRE_OK(liar.carry(liar.initiator));
    REQUIRE_OK(liar.carry(liar.acceptor));
    const std::vector<Bytes> proof = liar.initiator.take_output();
    REQUIRE_EQ(proof.size(), 1);
    const auto result = pair.acceptor.receive(pair.now, proof[0]);
    CHECK_EQ(result.status().code(), Code::kAuthFailed);
    CHECK(says(result.status(), "\"prefill-0\": the peer's secret differs: its PROOF is wrong"));
    CHECK_EQ(pair.acceptor.state(), State::kClosed);
    CHECK_EQ(pair.acceptor.peer().name, "");
  }
}

TEST(a_recorded_session_opens_nothing_later) {
  Pair first(10);
  std::vector<Bytes> recorded;
  const auto record = [&](Session& from) {
    for (const Bytes& frame : from.take_output()) {
      if (&from == &first.initiator) recorded.push_back(frame);
      REQUIRE_OK(first.other(from).receive(first.now, frame));
    }
  };
  record(first.initiator);
  record(first.acceptor);
  record(first.initiator);
  REQUIRE_EQ(recorded.size(), 2);
  REQUIRE_EQ(first.acceptor.state(), State::kOpen);

  Pair second(11);
  REQUIRE_OK(second.acceptor.receive(kStart, recorded[0]));
  CHECK_EQ(second.acceptor.receive(kStart, recorded[1]).status().code(), Code::kAuthFailed);
}

TEST(keys_differ_by_session_and_direction) {
  Pair one(20), two(21);
  REQUIRE_OK(one.handshake());
  REQUIRE_OK(two.handshake());
  one.initiator.send(kStart, Done{1});
  one.acceptor.send(kStart, Done{1});
  two.initiator.send(kStart, Done{1});
  two.acceptor.send(kStart, Done{1});
  std::set<std::string> macs;
  for (Session* session : {&one.initiator, &one.acceptor, &two.initiator, &two.acceptor}) {
    const Bytes frame = session->take_output().at(0);
    std::string mac;
    for (const std::byte b : ByteSpan(frame).last(kMacNbytes)) mac += static_cast<char>(b);
    macs.insert(mac);
  }
  CHECK_EQ(macs.size(), 4);
}

TEST(an_agent_does_not_talk_to_itself) {
  Pair pair(1, config_of("prefill-0"), config_of("prefill-0"));
  const Status status = pair.handshake();
  CHECK_EQ(status.code(), Code::kInvalidArgument);
  CHECK(says(status, "this agent itself"));
}

// ---- altered, repeated, lost, exchanged and reflected frames, in every state

// Frames of a conversation: 0 HELLO, 1 CHALLENGE, 2 PROOF, then messages of both ends in turn.
constexpr int kNumFrames = 9;

// Plays the conversation through `meddle`, which gives for the frame to deliver those that arrive
// instead. Returns the pair as the first error left it.
template <class Meddle>
std::unique_ptr<Pair> play(Meddle meddle) {
  auto pair = std::make_unique<Pair>();
  for (int index = 0; index < kNumFrames; ++index) {
    Session& from = index % 2 == 0 ? pair->initiator : pair->acceptor;
    if (index >= 3) from.send(pair->now, Done{static_cast<TransferId>(index)});
    for (const Bytes& frame : from.take_output()) {
      for (const Bytes& arrived : meddle(index, frame)) {
        const auto result = pair->other(from).receive(pair->now, arrived);
        if (!result.ok()) return pair;
        if (result.value())
          (&from == &pair->initiator ? pair->at_acceptor : pair->at_initiator).push_back(*result.value());
      }
    }
  }
  return pair;
}

// What was delivered is a prefix of what was sent.
void check_only_true_messages(const Pair& pair) {
  for (const bool acceptor : {false, true}) {
    TransferId next = acceptor ? 4 : 3;
    for (const Message& message : acceptor ? pair.at_acceptor : pair.at_initiator) {
      REQUIRE(std::holds_alternative<Done>(message));
      CHECK_EQ(std::get<Done>(message).transfer, next);
      next += 2;
    }
  }
}

TEST(an_honest_conversation_plays_to_its_end) {
  const auto pair = play([](int, const Bytes& frame) { return std::vector<Bytes>{frame}; });
  CHECK_EQ(pair->initiator.state(), State::kOpen);
  CHECK_EQ(pair->acceptor.state(), State::kOpen);
  CHECK_EQ(pair->at_acceptor.size() + pair->at_initiator.size(), kNumFrames - 3);
}

TEST(one_flipped_bit_anywhere_ends_the_session) {
  for (int index = 0; index < kNumFrames; ++index) {
    std::size_t num_bits = 1;
    for (std::size_t bit = 0; bit < num_bits; ++bit) {
      const auto pair = play([&](int at, Bytes frame) {
        if (at == index) {
          num_bits = 8 * frame.size();
          frame[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
        }
        return std::vector<Bytes>{frame};
      });
      // A HELLO that was altered and still is a HELLO shows in the transcript: CHALLENGE is refused.
      CHECK(pair->initiator.state() == State::kClosed || pair->acceptor.state() == State::kClosed);
      const bool at_initiator = pair->initiator.state() == State::kClosed;
      const Status& reason = at_initiator ? pair->initiator.reason() : pair->acceptor.reason();
      CHECK(reason.code() == Code::kProtocol || reason.code() == Code::kAuthFailed);
      check_only_true_messages(*pair);
    }
  }
}

TEST(a_truncated_or_extended_frame_ends_the_session) {
  for (int index = 0; index < kNumFrames; ++index) {
    for (const int change : {-1000, -17, -1, 1, 40}) {
      const auto pair = play([&](int at, Bytes frame) {
        if (at == index)
          frame.resize(static_cast<std::size_t>(std::max<std::ptrdiff_t>(0, std::ssize(frame) + change)));
        return std::vector<Bytes>{frame};
      });
      const Session& receiver = index % 2 == 0 ? pair->acceptor : pair->initiator;
      CHECK_EQ(receiver.state(), State::kClosed);
      CHECK_EQ(receiver.reason().code(), Code::kProtocol);
      check_only_true_messages(*pair);
    }
  }
}

TEST(a_duplicated_frame_ends_the_session) {
  for (int index = 0; index < kNumFrames; ++index) {
    const auto pair = play([&](int at, const Bytes& frame) {
      return at == index ? std::vector<Bytes>{frame, frame} : std::vector<Bytes>{frame};
    });
    const Session& receiver = index % 2 == 0 ? pair->acceptor : pair->initiator;
    CHECK_EQ(receiver.state(), State::kClosed);
    // A handshake frame has no mac, which is what is missed first once the session is open.
    const bool without_mac = index == 1 || index == 2;
    CHECK_EQ(receiver.reason().code(), without_mac ? Code::kAuthFailed : Code::kProtocol);
    if (!without_mac) CHECK(says(receiver.reason(), "repeated"));
    check_only_true_messages(*pair);
  }
}

TEST(a_frame_replayed_later_ends_the_session) {
  for (int index = 0; index < kNumFrames; ++index) {
    for (int later = index + 2; later < kNumFrames; later += 2) {
      Bytes recorded;
      const auto pair = play([&](int at, const Bytes& frame) {
        if (at == index) recorded = frame;
        return std::vector<Bytes>{at == later ? recorded : frame};
      });
      CHECK_EQ((index % 2 == 0 ? pair->acceptor : pair->initiator).state(), State::kClosed);
      check_only_true_messages(*pair);
    }
  }
}

TEST(a_lost_frame_is_noticed_at_the_next) {
  for (int index = 3; index + 2 < kNumFrames; ++index) {
    const auto pair = play([&](int at, const Bytes& frame) {
      return at == index ? std::vector<Bytes>{} : std::vector<Bytes>{frame};
    });
    const Session& receiver = index % 2 == 0 ? pair->acceptor : pair->initiator;
    CHECK_EQ(receiver.reason().code(), Code::kProtocol);
    CHECK(says(receiver.reason(), "frames are missing"));
    check_only_true_messages(*pair);
  }
}

TEST(two_exchanged_frames_end_the_session) {
  for (int index = 2; index + 2 < kNumFrames; ++index) {
    Bytes held;
    const auto pair = play([&](int at, const Bytes& frame) {
      if (at == index) held = frame;
      if (at == index) return std::vector<Bytes>{};
      return at == index + 2 ? std::vector<Bytes>{frame, held} : std::vector<Bytes>{frame};
    });
    CHECK_EQ((index % 2 == 0 ? pair->acceptor : pair->initiator).state(), State::kClosed);
    check_only_true_messages(*pair);
  }
}

TEST(a_frame_sent_back_to_its_sender_ends_the_session) {
  for (int index = 0; index < kNumFrames; ++index) {
    Pair pair;
    for (int at = 0; at <= index; ++at) {
      Session& from = at % 2 == 0 ? pair.initiator : pair.acceptor;
      if (at >= 3) from.send(pair.now, Done{1});
      const std::vector<Bytes> frames = from.take_output();
      REQUIRE_EQ(frames.size(), 1);
      if (at < index) {
        REQUIRE_OK(pair.other(from).receive(pair.now, frames[0]));
        continue;
      }
      CHECK(!from.receive(pair.now, frames[0]).ok());
      CHECK_EQ(from.state(), State::kClosed);
    }
  }
}

// Someone without the secret relays an initiator's HELLO to the same agent's own listener.
TEST(an_agent_does_not_answer_its_own_relayed_hello) {
  Session initiator(SessionRole::kInitiator, config_of("prefill-0"), kStart, random_source(1));
  Session listener(SessionRole::kAcceptor, config_of("prefill-0"), kStart, random_source(2));
  CHECK(!listener.receive(kStart, initiator.take_output().at(0)).ok());
  CHECK(listener.take_output().empty());
}

TEST(a_frame_that_its_state_does_not_allow_ends_the_session) {
  check::Random random(check::seed());
  for (const Scene& scene : kScenes) {
    for (std::size_t kind = 0; kind < kNumKinds; ++kind) {
      const Message message = Sampler(random, 3).message(kind);
      const FrameType type = type_of(message);
      if (scene.state == State::kAwaitHello && type == FrameType::kHello) continue;  // welcome
      Pair pair;
      Session& session = enter(pair, scene);
      // The right number, so that only the type (and a proof or mac) can be wrong.
      const std::uint64_t sequence = scene.state == State::kAwaitProof ? 1 : 0;
      const auto result = session.receive(pair.now, encode(message, sequence));
      CHECK(!result.ok());
      CHECK_EQ(session.state(), State::kClosed);
      const bool proof = (scene.state == State::kAwaitProof && type == FrameType::kProof) ||
                         (scene.state == State::kAwaitChallenge && type == FrameType::kChallenge);
      if (scene.state == State::kClosed) continue;
      CHECK_EQ(result.status().code(),
               proof || scene.state == State::kOpen ? Code::kAuthFailed : Code::kProtocol);
      if (!proof && scene.state != State::kOpen)
        CHECK(says(result.status(),
                   std::string(name_of(type)) + " in state " + std::string(name_of(scene.state))));
    }
  }
}

TEST(an_oversized_frame_is_refused_by_its_header) {
  for (const Scene& scene : kScenes) {
    if (scene.state == State::kClosed) continue;
    Pair pair;
    Session& session = enter(pair, scene);
    Bytes frame = encode(Done{1}, 0);
    const std::uint32_t body_nbytes = session.max_body() + 1;
    std::memcpy(frame.data(), &body_nbytes, sizeof body_nbytes);
    // This is what whoever reads the socket asks before it makes room for a body.
    CHECK_EQ(decode_header(frame, session.max_body()).status().code(), Code::kProtocol);
    const auto result = session.receive(pair.now, frame);
    CHECK_EQ(result.status().code(), Code::kProtocol);
    CHECK(says(result.status(), "at most " + std::to_string(body_nbytes - 1)));
  }
}

// A handshake frame that says these versions.
Bytes as_of(Bytes frame, std::uint16_t newest, std::uint16_t oldest) {
  std::memcpy(frame.data() + kHeaderNbytes, &newest, sizeof newest);
  std::memcpy(frame.data() + kHeaderNbytes + sizeof newest, &oldest, sizeof oldest);
  return frame;
}

struct Versions {
  std::uint16_t newest, oldest;
  std::string_view words;
};
constexpr Versions kNoneInCommon[] = {
    {1, 0x7a31, "the peer speaks protocol version 1 at most, this agent 2; upgrade kvxfer at the peer"},
    {1, 1, "the peer speaks protocol version 1 at most, this agent 2; upgrade kvxfer at the peer"},
    {0, 0, "the peer speaks protocol version 0 at most, this agent 2; upgrade kvxfer at the peer"},
    {3, 3, "the peer speaks protocol version 3, this agent 2; upgrade kvxfer here"},
    {9, 4, "the peer speaks protocol version 4 to 9, this agent 2; upgrade kvxfer here"},
};

TEST(versions_without_a_common_one_are_refused_in_words_at_both_ends) {
  for (const auto& [newest, oldest, words] : kNoneInCommon) {
    Pair pair;
    const Bytes hello = pair.initiator.take_output().at(0);
    const auto at_acceptor = pair.acceptor.receive(kStart, as_of(hello, newest, oldest));
    CHECK_EQ(at_acceptor.status().code(), Code::kProtocol);
    CHECK(says(at_acceptor.status(), "HELLO.version: " + std::string(words)));
    CHECK(pair.acceptor.state() == State::kClosed);

    // Its answer tells the caller, whichever version that speaks: the newest comes first for ever.
    const std::vector<Bytes> answer = pair.acceptor.take_output();
    REQUIRE_EQ(answer.size(), 1);
    CHECK_EQ(decode_header(answer[0], kMaxHandshakeBody).value().type, FrameType::kChallenge);
    CHECK(answer[0][kHeaderNbytes] == std::byte{2});
    CHECK(answer[0][kHeaderNbytes + 1] == std::byte{0});

    const auto at_initiator = pair.initiator.receive(kStart, as_of(answer[0], newest, oldest));
    CHECK_EQ(at_initiator.status().code(), Code::kProtocol);
    CHECK(says(at_initiator.status(), "CHALLENGE.version: " + std::string(words)));
  }
}

TEST(a_hello_that_is_broken_in_other_ways_is_answered_nothing) {
  Pair pair;
  Bytes hello = pair.initiator.take_output().at(0);
  hello[kHeaderNbytes + 4 + 32] = std::byte{0xff};  // the name's length
  CHECK_EQ(pair.acceptor.receive(kStart, hello).status().code(), Code::kProtocol);
  CHECK(pair.acceptor.take_output().empty());
}

// A release to come, on the wire by hand: newer versions, and extensions that nobody here knows.
struct Newer {
  Digest prove(std::string_view label) const {
    const std::string_view secret = "open sesame";
    return hmac_sha256(std::as_bytes(std::span(secret)), {std::as_bytes(std::span(label)), transcript});
  }
  Identity identity = config_of("newer").self;
  Bytes extensions = Bytes(200, std::byte{0xe7});
  Digest transcript{};
};

TEST(a_newer_caller_that_speaks_our_version_too_is_welcome_and_its_extensions_are_skipped) {
  for (const std::uint16_t oldest : {0, 1, 2}) {
    Pair pair;
    Newer newer;
    const Bytes hello = encode(Hello{9, oldest, Digest{}, newer.identity, newer.extensions}, 0);
    REQUIRE_OK(pair.acceptor.receive(kStart, hello));
    CHECK_EQ(pair.acceptor.protocol(), 2);
    const std::vector<Bytes> answer = pair.acceptor.take_output();
    REQUIRE_EQ(answer.size(), 1);
    const ByteSpan challenge = body_of(answer[0]);
    newer.transcript = sha256({body_of(hello), challenge.first(challenge.size() - sizeof(Digest))});
    REQUIRE_OK(pair.acceptor.receive(kStart, encode(Proof{newer.prove("kvxfer/1 initiator")}, 1)));
    CHECK(pair.acceptor.state() == State::kOpen);
    CHECK_EQ(pair.acceptor.peer().name, "newer");
    CHECK_EQ(pair.acceptor.protocol(), 2);
  }
}

TEST(a_newer_agent_that_is_called_is_welcome_where_it_speaks_our_version_too) {
  Pair pair;
  Newer newer;
  const Bytes hello = pair.initiator.take_output().at(0);
  Challenge challenge{9, 2, Digest{}, newer.identity, newer.extensions, Id128{}, Digest{}};
  const Bytes unproved = encode(challenge, 0);
  newer.transcript =
      sha256({body_of(hello), body_of(unproved).first(body_of(unproved).size() - sizeof(Digest))});
  challenge.proof = newer.prove("kvxfer/1 acceptor");
  REQUIRE_OK(pair.initiator.receive(kStart, encode(challenge, 0)));
  CHECK(pair.initiator.state() == State::kOpen);
  CHECK_EQ(pair.initiator.protocol(), 2);
}

TEST(versions_and_extensions_that_were_changed_on_the_way_show_in_the_transcript) {
  for (const bool of_hello : {true, false}) {
    Pair pair;
    Bytes hello = pair.initiator.take_output().at(0);
    if (of_hello) hello = as_of(hello, 9, 1);
    REQUIRE_OK(pair.acceptor.receive(kStart, hello));
    Bytes challenge = pair.acceptor.take_output().at(0);
    if (!of_hello) challenge = as_of(challenge, 3, 2);
    CHECK_EQ(pair.initiator.receive(kStart, challenge).status().code(), Code::kAuthFailed);
  }
}

TEST(both_ends_speak_the_newest_common_version) {
  Pair pair;
  REQUIRE_OK(pair.handshake());
  CHECK_EQ(pair.initiator.protocol(), kProtocolVersion);
  CHECK_EQ(pair.acceptor.protocol(), kProtocolVersion);
}

// ---- time

TEST(a_handshake_that_stalls_times_out) {
  for (const Scene& scene : kScenes) {
    if (scene.state == State::kOpen || scene.state == State::kClosed) continue;
    Pair pair;
    Session& session = enter(pair, scene);
    const Time deadline = session.next_deadline();
    CHECK_EQ(deadline, kStart + 2000 * kMs);
    CHECK_OK(session.on_time(deadline - 1));
    const Status status = session.on_time(deadline);
    CHECK_EQ(status.code(), Code::kAuthFailed);
    CHECK(says(status, "within 2000 ms"));
    CHECK_EQ(session.state(), State::kClosed);
    CHECK_EQ(session.next_deadline(), kNever);
    CHECK_OK(session.on_time(deadline + kMs));  // told once
  }
}

TEST(a_handshake_is_not_kept_alive_by_its_own_progress) {
  Pair pair;
  pair.now += 1999 * kMs;
  REQUIRE_OK(pair.carry(pair.initiator));
  CHECK_EQ(pair.acceptor.next_deadline(), kStart + 2000 * kMs);
}

TEST(a_silent_peer_is_lost) {
  for (const SessionRole role : {SessionRole::kInitiator, SessionRole::kAcceptor}) {
    Pair pair;
    Session& session = enter(pair, {role, State::kOpen});
    const Time lost_at = kStart + 2000 * kMs;
    Time now = kStart;
    while (session.next_deadline() < lost_at) {
      now = session.next_deadline();
      REQUIRE_OK(session.on_time(now));  // its own heartbeats are no sign of life of the peer
    }
    CHECK_OK(session.on_time(lost_at - 1));
    session.take_output();
    const Status status = session.on_time(lost_at);
    CHECK_EQ(status.code(), Code::kPeerSilent);
    CHECK(says(status, "nothing heard for 2000 ms, the limit is 2000 ms"));
    CHECK_EQ(session.state(), State::kClosed);
    CHECK_EQ(session.take_output().size(), 1);  // a GOODBYE, in case that it still listens
  }
}

// Asked late, an agent has stood still itself.
TEST(a_standstill_of_its_own_is_not_the_peers_silence) {
  Pair pair;
  REQUIRE_OK(pair.handshake());
  pair.now += 10'000 * kMs;
  CHECK_OK(pair.initiator.on_time(pair.now));
  CHECK_EQ(pair.initiator.take_output().size(), 1);  // the heartbeat that was due
  // It is as if it had been asked in time: half a second of silence, a second and a half is left.
  const Time left = pair.now + 1500 * kMs;
  while (pair.initiator.next_deadline() < left) {
    pair.now = pair.initiator.next_deadline();
    REQUIRE_OK(pair.initiator.on_time(pair.now));
  }
  CHECK_OK(pair.initiator.on_time(left - 1));
  pair.initiator.take_output();
  const Status status = pair.initiator.on_time(left);
  CHECK_EQ(status.code(), Code::kPeerSilent);
  CHECK(says(status,
             "nothing heard for 11500 ms, the limit is 2000 ms beside the 9500 ms that this agent "
             "stood still itself"));
}

TEST(a_peer_that_was_silent_before_a_standstill_has_half_the_limit_left) {
  Pair pair;
  REQUIRE_OK(pair.handshake());
  for (const Time at : {500 * kMs, 1000 * kMs, 1500 * kMs}) REQUIRE_OK(pair.initiator.on_time(kStart + at));
  pair.now = kStart + 5000 * kMs;
  CHECK_OK(pair.initiator.on_time(pair.now));
  CHECK_OK(pair.initiator.on_time(pair.now + 500 * kMs));
  CHECK_OK(pair.initiator.on_time(pair.now + 1000 * kMs - 1));
  CHECK_EQ(pair.initiator.on_time(pair.now + 1000 * kMs).code(), Code::kPeerSilent);
}

TEST(a_peer_that_is_heard_after_a_standstill_has_the_whole_limit) {
  for (const bool clock_first : {false, true}) {
    Pair pair;
    REQUIRE_OK(pair.handshake());
    pair.now += 10'000 * kMs;
    REQUIRE_OK(pair.acceptor.on_time(pair.now));
    if (clock_first) CHECK_OK(pair.initiator.on_time(pair.now));
    REQUIRE_OK(pair.carry(pair.acceptor));
    for (Time at = pair.now; at < pair.now + 2000 * kMs; at = pair.initiator.next_deadline())
      REQUIRE_OK(pair.initiator.on_time(at));
    const Status status = pair.initiator.on_time(pair.now + 2000 * kMs);
    CHECK_EQ(status.code(), Code::kPeerSilent);
    CHECK(!says(status, "stood still"));
  }
}

TEST(standstill_after_standstill_does_not_keep_a_dead_peer) {
  for (const Time standstill : {600 * kMs, 1100 * kMs, 2600 * kMs, 100'000 * kMs}) {
    Pair pair;
    REQUIRE_OK(pair.handshake());
    int num_standstills = 0;
    for (Status status; status.ok(); ++num_standstills) {
      REQUIRE(num_standstills < 12);
      pair.now = pair.initiator.next_deadline() + standstill;
      status = pair.initiator.on_time(pair.now);
      if (!status.ok()) CHECK_EQ(status.code(), Code::kPeerSilent);
    }
    CHECK(num_standstills >= 4);  // the fourth is the first that may count
  }
}

TEST(a_standstill_in_the_handshake_is_not_held_against_the_stranger_either) {
  Pair pair;
  const Time deadline = pair.acceptor.next_deadline();
  pair.now = deadline + 3000 * kMs;
  CHECK_OK(pair.acceptor.on_time(pair.now));
  CHECK_EQ(pair.acceptor.next_deadline(), pair.now + 1000 * kMs);
  REQUIRE_OK(pair.handshake());
  CHECK_EQ(pair.acceptor.state(), State::kOpen);

  Pair other;
  CHECK_OK(other.acceptor.on_time(pair.now));
  CHECK_EQ(other.acceptor.on_time(pair.now + 1000 * kMs).code(), Code::kAuthFailed);
}

TEST(heartbeats_keep_an_idle_session_open) {
  Pair pair;
  REQUIRE_OK(pair.handshake());
  std::size_t num_frames = 0;
  while (pair.now < kStart + 60'000 * kMs) {
    pair.now = std::min(pair.initiator.next_deadline(), pair.acceptor.next_deadline());
    REQUIRE_OK(pair.initiator.on_time(pair.now));
    REQUIRE_OK(pair.acceptor.on_time(pair.now));
    for (int round = 0; round < 2; ++round) {
      for (Session* from : {&pair.initiator, &pair.acceptor}) {
        for (const Bytes& frame : from->take_output()) {
          ++num_frames;
          const auto result = pair.other(*from).receive(pair.now, frame);
          REQUIRE_OK(result);
          CHECK(!result.value().has_value());  // the layer above hears nothing of it
        }
      }
    }
    CHECK_EQ(pair.initiator.acknowledged_heartbeat_sent_at(), pair.now);
    CHECK_EQ(pair.acceptor.last_heartbeat_at(), pair.now);
  }
  // 120 heartbeats each way in 60 s, and their acknowledgements.
  CHECK_EQ(num_frames, 480);
}

TEST(heartbeats_go_out_in_time_under_other_traffic) {
  Pair pair;
  REQUIRE_OK(pair.handshake());
  for (int i = 0; i < 100; ++i) {
    pair.now += 100 * kMs;
    pair.initiator.send(pair.now, Done{1});
    REQUIRE_OK(pair.initiator.on_time(pair.now));
    REQUIRE_OK(pair.carry(pair.initiator));
    REQUIRE_OK(pair.carry(pair.acceptor));
    CHECK(pair.acceptor.last_heartbeat_at() > pair.now - 500 * kMs);
    CHECK(pair.initiator.acknowledged_heartbeat_sent_at() > pair.now - 500 * kMs);
  }
}

// A holder counts from the sending, a grantor from the arrival: the holder's right ends first.
TEST(a_lease_is_counted_from_the_sending_of_the_heartbeat_that_was_acknowledged) {
  Pair pair;
  pair.now += 5 * kMs;
  REQUIRE_OK(pair.carry(pair.initiator));
  pair.now += 10 * kMs;
  REQUIRE_OK(pair.carry(pair.acceptor));
  pair.now += 10 * kMs;
  REQUIRE_OK(pair.carry(pair.initiator));
  CHECK_EQ(pair.initiator.acknowledged_heartbeat_sent_at(), kStart);            // HELLO's
  CHECK_EQ(pair.acceptor.last_heartbeat_at(), kStart + 25 * kMs);               // PROOF's arrival
  CHECK_EQ(pair.acceptor.acknowledged_heartbeat_sent_at(), kStart + 5 * kMs);  // CHALLENGE's
  CHECK_EQ(pair.initiator.last_heartbeat_at(), kStart + 15 * kMs);

  const Time first = pair.initiator.next_deadline(), second = first + 500 * kMs;
  REQUIRE_OK(pair.initiator.on_time(first));
  pair.now = second;
  pair.acceptor.send(second, Done{1});
  REQUIRE_OK(pair.carry(pair.acceptor));
  REQUIRE_OK(pair.initiator.on_time(second));
  const std::vector<Bytes> heartbeats = pair.initiator.take_output();
  REQUIRE_EQ(heartbeats.size(), 2);
  const Time arrival = second + 30 * kMs;
  REQUIRE_OK(pair.acceptor.receive(arrival, heartbeats[0]));
  CHECK_EQ(pair.acceptor.last_heartbeat_at(), arrival);
  CHECK_EQ(pair.initiator.acknowledged_heartbeat_sent_at(), kStart);  // not yet
  REQUIRE_OK(pair.carry(pair.acceptor));
  CHECK_EQ(pair.initiator.acknowledged_heartbeat_sent_at(), first);
  REQUIRE_OK(pair.acceptor.receive(arrival + 1, heartbeats[1]));
  REQUIRE_OK(pair.carry(pair.acceptor));
  CHECK_EQ(pair.initiator.acknowledged_heartbeat_sent_at(), second);
}

TEST(an_acknowledgement_that_comes_after_many_heartbeats_renews_from_no_later_than_its_own) {
  Pair pair;
  REQUIRE_OK(pair.handshake());
  std::vector<Time> sent;
  std::vector<Bytes> heartbeats;
  while (sent.size() < 50) {
    pair.now = pair.initiator.next_deadline();
    pair.acceptor.send(pair.now, Done{1});  // alive, and slow to acknowledge
    REQUIRE_OK(pair.carry(pair.acceptor));
    REQUIRE_OK(pair.initiator.on_time(pair.now));
    for (Bytes& frame : pair.initiator.take_output()) {
      heartbeats.push_back(std::move(frame));
      sent.push_back(pair.now);
    }
  }
  for (std::size_t i = 0; i < heartbeats.size(); ++i) {
    REQUIRE_OK(pair.acceptor.receive(pair.now, heartbeats[i]));
    REQUIRE_OK(pair.carry(pair.acceptor));
    CHECK(pair.initiator.acknowledged_heartbeat_sent_at() <= sent[i]);
  }
  CHECK_EQ(pair.initiator.acknowledged_heartbeat_sent_at(), sent.back());
}

TEST(heartbeat_numbers_that_do_not_follow_are_refused) {
  for (const Message& message :
       {Message(Heartbeat{0}), Message(Heartbeat{2}), Message(Heartbeat{UINT64_MAX}),
        Message(HeartbeatAck{0}), Message(HeartbeatAck{1}), Message(HeartbeatAck{2})}) {
    Pair pair;
    REQUIRE_OK(pair.handshake());
    pair.initiator.send(pair.now, message);
    const Status status = pair.carry(pair.initiator);
    CHECK_EQ(status.code(), Code::kProtocol);
    CHECK(says(status, ".number: "));
  }
}

TEST(endless_durations_do_not_overflow) {
  SessionConfig config = config_of("a");
  config.handshake_timeout_ns = config.heartbeat_ns = config.silent_ns = kNever;
  Pair pair(1, config, config_of("b"));
  CHECK_EQ(pair.initiator.next_deadline(), kNever);
  REQUIRE_OK(pair.handshake());
  CHECK_EQ(pair.initiator.next_deadline(), kNever);
  CHECK_OK(pair.initiator.on_time(kNever - 1));
}

// ---- ends

TEST(a_goodbye_tells_the_peer_why) {
  for (const Code code : {Code::kClosed, Code::kProtocol, Code::kPeerSilent, Code::kAuthFailed, Code::kOk}) {
    Pair pair;
    REQUIRE_OK(pair.handshake());
    pair.initiator.close(pair.now, code, "maintenance\nat noon");
    CHECK_EQ(pair.initiator.state(), State::kClosed);
    CHECK(!pair.initiator.reason().ok());
    const Status status = pair.carry(pair.initiator);
    CHECK_EQ(status.code(), code == Code::kAuthFailed ? Code::kAuthFailed : Code::kPeerLost);
    CHECK(says(status, "peer \"prefill-0\" said goodbye ("));
    CHECK(says(status, "maintenance?at noon"));  // one line of a log, whatever a peer says
    CHECK_EQ(pair.acceptor.state(), State::kClosed);
    CHECK(pair.acceptor.take_output().empty());
  }
}

TEST(a_peer_that_breaks_the_protocol_is_told) {
  Pair pair;
  REQUIRE_OK(pair.handshake());
  pair.initiator.send(pair.now, Heartbeat{77});
  CHECK(!pair.carry(pair.initiator).ok());
  const Status status = pair.carry(pair.acceptor);
  CHECK_EQ(status.code(), Code::kPeerLost);
  CHECK(says(status, "said goodbye (protocol): HEARTBEAT.number: 77, expected 1"));
}

TEST(a_closed_session_stays_closed_and_keeps_its_reason) {
  Pair pair;
  REQUIRE_OK(pair.handshake());
  pair.acceptor.send(pair.now, Done{1});
  const Bytes frame = pair.acceptor.take_output().at(0);
  pair.initiator.connection_lost();
  CHECK_EQ(pair.initiator.reason().code(), Code::kPeerLost);
  CHECK(says(pair.initiator.reason(), "peer \"decode-0\": the connection ended"));
  pair.initiator.close(pair.now, Code::kClosed, "late");
  pair.initiator.connection_lost();
  pair.initiator.send(pair.now, Done{2});
  CHECK_EQ(pair.initiator.receive(pair.now, frame).status().code(), Code::kPeerLost);
  CHECK_EQ(pair.initiator.reason().code(), Code::kPeerLost);
  CHECK(pair.initiator.take_output().empty());
}

TEST(a_connection_lost_in_the_handshake_says_what_was_awaited) {
  for (const Scene& scene : kScenes) {
    if (scene.state == State::kOpen || scene.state == State::kClosed) continue;
    Pair pair;
    Session& session = enter(pair, scene);
    session.connection_lost();
    CHECK_EQ(session.state(), State::kClosed);
    CHECK_EQ(session.reason().code(),
             scene.state == State::kAwaitProof ? Code::kAuthFailed : Code::kPeerLost);
    CHECK(says(session.reason(), "the connection ended before "));
  }
}

// ---- rails

RailHello rail_hello(const Session& session, std::uint16_t rail, std::string_view transport) {
  const Bytes frame = session.rail_hello(rail, transport);
  const Result<Header> header = decode_header(frame, kMaxHandshakeBody);
  REQUIRE_OK(header);
  const Result<Message> message = decode(header.value(), body_of(frame));
  REQUIRE_OK(message);
  return std::get<RailHello>(message.value());
}
RailWelcome rail_welcome(const Session& session, std::uint16_t rail) {
  const Bytes frame = session.rail_welcome(rail);
  const Result<Header> header = decode_header(frame, kMaxHandshakeBody);
  REQUIRE_OK(header);
  const Result<Message> message = decode(header.value(), body_of(frame));
  REQUIRE_OK(message);
  return std::get<RailWelcome>(message.value());
}

TEST(a_rail_is_accepted_once) {
  Pair pair;
  REQUIRE_OK(pair.handshake());
  for (const std::uint16_t rail : {3, 0, 65534}) {
    const RailHello hello = rail_hello(pair.initiator, rail, "tcp");
    CHECK_EQ(hello.rail, rail);
    CHECK_EQ(hello.transport, "tcp");
    CHECK(pair.acceptor.verify_rail_hello(hello));
    CHECK(!pair.acceptor.verify_rail_hello(hello));
    CHECK(!pair.acceptor.verify_rail_hello(rail_hello(pair.initiator, rail, "shm")));
    CHECK(pair.initiator.verify_rail_welcome(rail, rail_welcome(pair.acceptor, rail)));
  }
}

TEST(a_rail_of_another_session_index_or_transport_is_refused) {
  Pair pair(30), stranger(31);
  REQUIRE_OK(pair.handshake());
  REQUIRE_OK(stranger.handshake());
  const RailHello hello = rail_hello(pair.initiator, 1, "tcp");
  const auto with = [&](auto change) {
    RailHello changed = hello;
    change(changed);
    return pair.acceptor.verify_rail_hello(changed);
  };
  CHECK(!with([](RailHello& m) { m.session[0] ^= std::byte{1}; }));
  CHECK(!with([](RailHello& m) { m.rail = 2; }));
  CHECK(!with([](RailHello& m) { m.rail = kNoRail; }));
  CHECK(!with([](RailHello& m) { m.transport = "shm"; }));
  CHECK(!with([](RailHello& m) { m.transport.clear(); }));
  for (std::size_t bit = 0; bit < 256; ++bit)
    CHECK(!with([&](RailHello& m) { m.proof[bit / 8] ^= static_cast<std::byte>(1 << bit % 8); }));
  CHECK(!pair.acceptor.verify_rail_hello(rail_hello(stranger.initiator, 1, "tcp")));
  CHECK(!with([&](RailHello& m) { m.proof = rail_hello(stranger.initiator, 1, "tcp").proof; }));
  CHECK(!pair.initiator.verify_rail_hello(hello));  // sent back to who sent it
  CHECK(with([](RailHello&) {}));                   // none of these used it up

  CHECK(!pair.initiator.verify_rail_welcome(1, rail_welcome(stranger.acceptor, 1)));
  CHECK(!pair.initiator.verify_rail_welcome(1, rail_welcome(pair.acceptor, 2)));
  CHECK(!pair.initiator.verify_rail_welcome(1, RailWelcome{hello.proof}));
}

TEST(a_rail_is_refused_before_and_after_the_session) {
  Pair pair;
  REQUIRE_OK(pair.carry(pair.initiator));
  REQUIRE_OK(pair.carry(pair.acceptor));
  const RailHello hello = rail_hello(pair.initiator, 1, "tcp");
  CHECK(!pair.acceptor.verify_rail_hello(hello));  // PROOF has not arrived
  REQUIRE_OK(pair.carry(pair.initiator));
  pair.acceptor.connection_lost();
  CHECK(!pair.acceptor.verify_rail_hello(hello));
}

// ---- the table

constexpr State kStates[] = {State::kAwaitHello, State::kAwaitChallenge, State::kAwaitProof, State::kOpen,
                             State::kClosed};
constexpr Event kEvents[] = {Event::kHello,   Event::kChallenge,      Event::kProof,
                             Event::kMessage, Event::kViolation,      Event::kHandshakeTimeout,
                             Event::kSilence, Event::kConnectionLost, Event::kClose};

TEST(the_table_names_each_pair_once_and_leads_to_closed) {
  std::set<std::pair<State, Event>> pairs;
  for (const SessionTransition& t : session_transitions()) {
    CHECK(pairs.insert({t.from, t.event}).second);
    CHECK(t.from != State::kClosed);
    CHECK(name_of(t.event) != "unknown" && name_of(t.from) != "unknown");
  }
  for (const State state : kStates) {
    if (state == State::kClosed) continue;
    for (const Event event : {Event::kViolation, Event::kConnectionLost, Event::kClose})
      CHECK(pairs.contains({state, event}));
    CHECK(pairs.contains({state, Event::kHandshakeTimeout}) != pairs.contains({state, Event::kSilence}));
  }
}

// Brings about `event` for `session`; false where nothing outside the session can.
bool cause(Event event, Pair& pair, Session& session) {
  Session& peer = pair.other(session);
  switch (event) {
    case Event::kHello:
    case Event::kChallenge:
    case Event::kProof: {
      // The true frame where it is due, else one of its kind.
      const FrameType type = event == Event::kHello       ? FrameType::kHello
                             : event == Event::kChallenge ? FrameType::kChallenge
                                                          : FrameType::kProof;
      if (session.state() == State::kAwaitChallenge && event == Event::kChallenge) {
        REQUIRE_OK(pair.carry(session));
      } else if (session.state() == State::kAwaitProof && event == Event::kProof) {
        REQUIRE_OK(pair.carry(session));
      }
      const std::vector<Bytes> frames = peer.take_output();
      if (!frames.empty() && decode_header(frames[0], kMaxBody).value().type == type) {
        (void)session.receive(pair.now, frames[0]);
      } else {
        const Message message = type == FrameType::kHello       ? Message(Hello())
                                : type == FrameType::kChallenge ? Message(Challenge())
                                                                : Message(Proof());
        (void)session.receive(pair.now, encode(message, session.state() == State::kAwaitProof ? 1 : 0));
      }
      return true;
    }
    case Event::kMessage:
      if (peer.state() == State::kOpen && session.state() == State::kOpen) {
        peer.send(pair.now, Done{1});
        (void)session.receive(pair.now, peer.take_output().at(0));
      } else {
        (void)session.receive(pair.now, encode(Done{1}, session.state() == State::kAwaitProof ? 1 : 0));
      }
      return true;
    case Event::kViolation: (void)session.receive(pair.now, Bytes(40, std::byte{0xee})); return true;
    case Event::kHandshakeTimeout:
      // The same clock serves both timers; which one runs is the state's to say.
    case Event::kSilence:
      for (int i = 0; i < 10 && session.state() != State::kClosed; ++i)
        (void)session.on_time(session.next_deadline());
      return true;
    case Event::kConnectionLost: session.connection_lost(); return true;
    case Event::kClose: session.close(pair.now, Code::kClosed, "enough"); return true;
  }
  return false;
}

TEST(every_pair_of_state_and_event_does_what_the_table_says) {
  for (const Scene& scene : kScenes) {
    for (const Event event : kEvents) {
      const bool timer = event == Event::kHandshakeTimeout || event == Event::kSilence;
      const auto transitions = session_transitions();
      const auto listed = [&](Event e) {
        return std::ranges::find_if(
            transitions, [&](const SessionTransition& t) { return t.from == scene.state && t.event == e; });
      };
      // One clock stands for both timers.
      auto found = listed(event);
      if (timer && found == transitions.end())
        found = listed(event == Event::kSilence ? Event::kHandshakeTimeout : Event::kSilence);
      // A pair that is not listed: a frame is a violation, and in kClosed nothing happens at all.
      const State expected = found != transitions.end() ? found->to : State::kClosed;

      Pair pair;
      Session& session = enter(pair, scene);
      const Code reason_before = session.reason().code();
      REQUIRE(cause(event, pair, session));
      if (session.state() != expected)
        FAIL(std::string(name_of(scene.state)) + " and " + std::string(name_of(event)) + " lead to " +
             std::string(name_of(session.state())) + ", the table says " + std::string(name_of(expected)));
      CHECK_EQ(session.reason().ok(), expected != State::kClosed);
      if (scene.state == State::kClosed) CHECK_EQ(session.reason().code(), reason_before);
    }
  }
}

}  // namespace
