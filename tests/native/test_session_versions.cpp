// The session: agents of different versions understand each other, or say why not.
#include <algorithm>
#include <span>

#include "core/control/sha256.h"
#include "session_pair.h"

namespace {

using namespace session_pair;

// A handshake frame with these versions.
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
    {1, 0x7a31, "the peer speaks protocol version 1 at most, this agent 6; upgrade kvxfer at the peer"},
    {1, 1, "the peer speaks protocol version 1 at most, this agent 6; upgrade kvxfer at the peer"},
    {0, 0, "the peer speaks protocol version 0 at most, this agent 6; upgrade kvxfer at the peer"},
    {7, 7, "the peer speaks protocol version 7, this agent 6; upgrade kvxfer here"},
    {5, 5, "the peer speaks protocol version 5 at most, this agent 6; upgrade kvxfer at the peer"},
    {9, 7, "the peer speaks protocol version 7 to 9, this agent 6; upgrade kvxfer here"},
};

TEST(versions_without_a_common_one_are_refused_in_words_at_both_ends) {
  for (const auto& [newest, oldest, words] : kNoneInCommon) {
    Pair pair;
    const Bytes hello = pair.initiator.take_output().at(0);
    const auto at_acceptor = pair.acceptor.receive(kStart, as_of(hello, newest, oldest));
    CHECK_EQ(at_acceptor.status().code(), Code::kProtocol);
    CHECK(says(at_acceptor.status(), "HELLO.version: " + std::string(words)));
    CHECK(pair.acceptor.state() == State::kClosed);

    // The answer tells a caller of any version: the newest version is always its first field.
    const std::vector<Bytes> answer = pair.acceptor.take_output();
    REQUIRE_EQ(answer.size(), 1);
    CHECK_EQ(decode_header(answer[0], kMaxHandshakeBody).value().type, FrameType::kChallenge);
    CHECK(answer[0][kHeaderNbytes] == std::byte{kProtocolVersion});
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

// A later release, written by hand: newer versions, and extensions that this release does not know.
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
  for (const std::uint16_t oldest : {std::uint16_t{0}, std::uint16_t{1}, kProtocolVersion}) {
    Pair pair;
    Newer newer;
    const Bytes hello = encode(Hello{9, oldest, Digest{}, newer.identity, newer.extensions}, 0);
    REQUIRE_OK(pair.acceptor.receive(kStart, hello));
    CHECK_EQ(pair.acceptor.protocol(), kProtocolVersion);
    const std::vector<Bytes> answer = pair.acceptor.take_output();
    REQUIRE_EQ(answer.size(), 1);
    const ByteSpan challenge = body_of(answer[0]);
    newer.transcript = sha256({body_of(hello), challenge.first(challenge.size() - sizeof(Digest))});
    REQUIRE_OK(pair.acceptor.receive(kStart, encode(Proof{newer.prove("kvxfer/1 initiator")}, 1)));
    CHECK(pair.acceptor.state() == State::kOpen);
    CHECK_EQ(pair.acceptor.peer().name, "newer");
    CHECK_EQ(pair.acceptor.protocol(), kProtocolVersion);
  }
}

TEST(a_newer_agent_that_is_called_is_welcome_where_it_speaks_our_version_too) {
  Pair pair;
  Newer newer;
  const Bytes hello = pair.initiator.take_output().at(0);
  Challenge challenge{9, kProtocolVersion, Digest{}, newer.identity, newer.extensions, Id128{}, Digest{}};
  const Bytes unproved = encode(challenge, 0);
  newer.transcript =
      sha256({body_of(hello), body_of(unproved).first(body_of(unproved).size() - sizeof(Digest))});
  challenge.proof = newer.prove("kvxfer/1 acceptor");
  REQUIRE_OK(pair.initiator.receive(kStart, encode(challenge, 0)));
  CHECK(pair.initiator.state() == State::kOpen);
  CHECK_EQ(pair.initiator.protocol(), kProtocolVersion);
}

TEST(each_end_knows_what_the_other_has_and_skips_what_it_does_not_know) {
  SessionConfig some = config_of("prefill-0"), none = config_of("decode-0");
  some.features.eager_nbytes = 4096;
  none.features = {};
  for (const bool initiator_has : {true, false}) {
    Pair pair(check::seed(), initiator_has ? some : none, initiator_has ? none : some);
    REQUIRE_OK(pair.handshake());
    CHECK_EQ((initiator_has ? pair.acceptor : pair.initiator).peer_features().eager_nbytes, 4096);
    CHECK_EQ((initiator_has ? pair.initiator : pair.acceptor).peer_features().eager_nbytes, 0);
  }
  const Bytes known = encode(some.features);
  Bytes later(4 + 3, std::byte{3});  // kind 0x303, of three bytes
  later[2] = std::byte{3}, later[3] = std::byte{0};
  Bytes cut = later;
  cut.pop_back();
  const auto joined = [](Bytes first, const Bytes& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
  };
  CHECK_EQ(decode_features(joined(later, known)).eager_nbytes, 4096);
  CHECK_EQ(decode_features(joined(known, cut)).eager_nbytes, 4096);
  CHECK_EQ(decode_features(joined(cut, known)).eager_nbytes, 0);
  some.features.second_proof.fill(std::byte{7});
  const Bytes both = encode(some.features);
  const Features begun = decode_features(ByteSpan(both).first(both.size() - 1));
  CHECK_EQ(begun.eager_nbytes, 4096);
  CHECK(begun.second_proof == Digest{});
  CHECK_EQ(decode_features({}).eager_nbytes, 0);
}

// An older release looks only at the first proof.
TEST(an_older_caller_is_proved_the_first_secret) {
  for (const bool knows_first : {true, false}) {
    Pair pair(check::seed(), config_of("unused"),
              knows_first ? config_of("decode-0", "open sesame", "another")
                          : config_of("decode-0", "another", "open sesame"));
    Newer older;
    older.extensions = encode(Features{.eager_nbytes = 4096});
    const Bytes hello = encode(Hello{.identity = older.identity, .extensions = older.extensions}, 0);
    REQUIRE_OK(pair.acceptor.receive(kStart, hello));
    const std::vector<Bytes> answer = pair.acceptor.take_output();
    REQUIRE_EQ(answer.size(), 1);
    const ByteSpan challenge = body_of(answer[0]);
    older.transcript = sha256({body_of(hello), challenge.first(challenge.size() - sizeof(Digest))});
    const Digest proof = older.prove("kvxfer/1 acceptor");
    CHECK_EQ(std::ranges::equal(challenge.last(sizeof(Digest)), proof), knows_first);
    const auto result = pair.acceptor.receive(kStart, encode(Proof{older.prove("kvxfer/1 initiator")}, 1));
    CHECK_EQ(result.status().code(), knows_first ? Code::kOk : Code::kAuthFailed);
  }
}

TEST(versions_and_extensions_that_were_changed_on_the_way_show_in_the_transcript) {
  for (const bool of_hello : {true, false}) {
    Pair pair;
    Bytes hello = pair.initiator.take_output().at(0);
    if (of_hello) hello = as_of(hello, 9, 1);
    REQUIRE_OK(pair.acceptor.receive(kStart, hello));
    Bytes challenge = pair.acceptor.take_output().at(0);
    if (!of_hello) challenge = as_of(challenge, kProtocolVersion + 1, kProtocolVersion);
    CHECK_EQ(pair.initiator.receive(kStart, challenge).status().code(), Code::kAuthFailed);
  }
}

TEST(both_ends_speak_the_newest_common_version) {
  Pair pair;
  REQUIRE_OK(pair.handshake());
  CHECK_EQ(pair.initiator.protocol(), kProtocolVersion);
  CHECK_EQ(pair.acceptor.protocol(), kProtocolVersion);
}

}  // namespace
