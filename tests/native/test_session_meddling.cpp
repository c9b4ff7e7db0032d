// The session: frames that are altered, repeated, lost, exchanged and reflected, in every state.
#include <algorithm>
#include <memory>

#include "session_pair.h"

namespace {

using namespace session_pair;

// The frames of a conversation: 0 HELLO, 1 CHALLENGE, 2 PROOF, then messages of both ends in turn.
constexpr int kNumFrames = 9;

// Plays the conversation. For each frame, `meddle` returns the frames that are delivered in its place.
// Returns the pair as it is after the first error.
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

// Checks that the delivered messages are a prefix of those that were sent.
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
      // An altered HELLO that is still valid differs in the transcript, so CHALLENGE is refused.
      CHECK(pair->initiator.state() == State::kClosed || pair->acceptor.state() == State::kClosed);
      const bool at_initiator = pair->initiator.state() == State::kClosed;
      const Status& reason = at_initiator ? pair->initiator.reason() : pair->acceptor.reason();
      CHECK(reason.code() == Code::kProtocol || reason.code() == Code::kAuthFailed);
      check_only_true_messages(*pair);
    }
  }
}

// If the acceptor has two secrets, the initiator accepts either of two proofs. An altered proof must not make
// it take the other secret.
TEST(a_proof_that_was_altered_on_its_way_ends_the_handshake) {
  struct Case {
    SessionConfig initiator;
    bool of_second;
    SessionState initiator_ends;  // before PROOF, or because the acceptor refuses it
  };
  const SessionConfig acceptor = config_of("decode-0", "new", "old");
  const Case cases[] = {
      {config_of("prefill-0", "old", "new"), false, State::kOpen},
      {config_of("prefill-0", "old", "new"), true, State::kClosed},
      {config_of("prefill-0", "new"), false, State::kClosed},
      {config_of("prefill-0", "new"), true, State::kClosed},
      {config_of("prefill-0", "old"), false, State::kOpen},
      {config_of("prefill-0", "old"), true, State::kClosed},
  };
  for (const auto& [initiator, of_second, initiator_ends] : cases) {
    for (const bool is_erased : {false, true}) {
      Pair pair(check::seed(), initiator, acceptor);
      REQUIRE_OK(pair.acceptor.receive(pair.now, pair.initiator.take_output().at(0)));
      const Bytes sent = pair.acceptor.take_output().at(0);
      auto challenge =
          std::get<Challenge>(decode(decode_header(sent, kMaxHandshakeBody).value(), body_of(sent)).value());
      Features features = decode_features(challenge.extensions);
      REQUIRE(features.second_proof != Digest{});
      Digest& proof = of_second ? features.second_proof : challenge.proof;
      if (is_erased)
        proof = {};
      else
        proof[7] ^= std::byte{1};
      challenge.extensions = encode(features);
      const Status at_initiator = pair.initiator.receive(pair.now, encode(challenge, 0)).status();
      CHECK_EQ(pair.initiator.state(), initiator_ends);
      if (initiator_ends == State::kClosed) {
        CHECK_EQ(at_initiator.code(), Code::kAuthFailed);
        CHECK(says(at_initiator, "the proof in its CHALLENGE is wrong"));
        CHECK(pair.initiator.take_output().empty());
      } else {
        const Status at_acceptor = pair.carry(pair.initiator);
        CHECK_EQ(at_acceptor.code(), Code::kAuthFailed);
        CHECK(says(at_acceptor, "its PROOF is wrong"));
        CHECK_EQ(pair.acceptor.state(), State::kClosed);
      }
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
    // A handshake frame has no mac. In an open session the mac is checked first.
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

// A process without the secret relays an initiator's HELLO to the same agent's own listener.
TEST(an_agent_proves_nothing_to_its_own_relayed_hello) {
  Session initiator(SessionRole::kInitiator, config_of("prefill-0"), kStart, random_source(1));
  Session listener(SessionRole::kAcceptor, config_of("prefill-0"), kStart, random_source(2));
  CHECK(!listener.receive(kStart, initiator.take_output().at(0)).ok());
  CHECK_EQ(listener.state(), State::kClosed);
  const std::vector<Bytes> answers = listener.take_output();
  REQUIRE_EQ(answers.size(), 1);
  const auto header = decode_header(answers[0], kMaxHandshakeBody);
  REQUIRE_OK(header);
  const auto answer =
      decode(header.value(), ByteSpan(answers[0]).subspan(kHeaderNbytes, header.value().body_nbytes));
  REQUIRE_OK(answer);
  CHECK(std::get<Challenge>(answer.value()).proof == Digest{});
}

TEST(a_frame_that_its_state_does_not_allow_ends_the_session) {
  check::Random random(check::seed());
  for (const Scene& scene : kScenes) {
    for (std::size_t kind = 0; kind < kNumKinds; ++kind) {
      const Message message = Sampler(random, 3).message(kind);
      const FrameType type = type_of(message);
      if (scene.state == State::kAwaitHello && type == FrameType::kHello) continue;  // valid here
      Pair pair;
      Session& session = enter(pair, scene);
      // The sequence number is right, so only the type (and a proof or mac) can be wrong.
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
    // The reader of a socket checks this before it makes room for a body.
    CHECK_EQ(decode_header(frame, session.max_body()).status().code(), Code::kProtocol);
    const auto result = session.receive(pair.now, frame);
    CHECK_EQ(result.status().code(), Code::kProtocol);
    CHECK(says(result.status(), "at most " + std::to_string(body_nbytes - 1)));
  }
}

}  // namespace
