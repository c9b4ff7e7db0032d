// The session: which frames are valid in which order and under which key, and how it ends.
#include <algorithm>
#include <set>
#include <span>

#include "core/control/sha256.h"
#include "session_pair.h"

namespace {

using namespace session_pair;

// ---- how it should go

TEST(two_agents_open_a_session_and_know_each_other) {
  Pair pair;
  CHECK_EQ(pair.initiator.state(), State::kAwaitChallenge);
  CHECK_EQ(pair.acceptor.state(), State::kAwaitHello);
  CHECK_EQ(pair.initiator.max_body(), kMaxHandshakeBody);
  REQUIRE_OK(pair.carry(pair.initiator));
  CHECK_EQ(pair.acceptor.state(), State::kAwaitProof);
  CHECK_EQ(pair.acceptor.max_body(), kMaxHandshakeBody);
  CHECK_EQ(pair.acceptor.peer().name, "");  // the peer has proved nothing yet
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
  CHECK(says(status, "\"decode-0\": it has another secret"));
  CHECK(says(status, "give both agents the same secret"));
  CHECK_EQ(pair.initiator.state(), State::kClosed);
  CHECK(pair.initiator.take_output().empty());  // a stranger gets no proof

  // The acceptor sees only that, and no wrong proof: the peer may also have given up.
  pair.acceptor.connection_lost();
  CHECK_EQ(pair.acceptor.reason().code(), Code::kPeerLost);
  CHECK(says(pair.acceptor.reason(), "before PROOF"));
  CHECK(says(pair.acceptor.reason(), "or has another secret"));
}

struct Accepted { std::string first, second; };
constexpr std::string_view kSecrets[] = {"old", "new", "third"};

// All pairs of ends of which each accepts one or two of three secrets, in either order.
TEST(two_ends_talk_if_and_only_if_one_accepts_a_secret_that_the_other_accepts) {
  std::vector<Accepted> all;
  for (const std::string_view first : kSecrets) {
    all.push_back({std::string(first), ""});
    for (const std::string_view second : kSecrets)
      if (first != second) all.push_back({std::string(first), std::string(second)});
  }
  std::uint64_t seed = check::seed();
  for (const Accepted& a : all) {
    for (const Accepted& b : all) {
      const bool agree = a.first == b.first || a.first == b.second ||
                         (!a.second.empty() && a.second == b.first) ||
                         (!a.second.empty() && a.second == b.second);
      Pair pair(++seed, config_of("prefill-0", a.first, a.second), config_of("decode-0", b.first, b.second));
      const Status status = pair.handshake();
      CHECK_EQ(status.code(), agree ? Code::kOk : Code::kAuthFailed);
      CHECK_EQ(pair.initiator.state(), agree ? State::kOpen : State::kClosed);
      if (!agree) continue;
      REQUIRE_EQ(pair.acceptor.state(), State::kOpen);
      // Both have the same keys.
      pair.initiator.send(pair.now, Done{2});
      pair.acceptor.send(pair.now, Done{3});
      REQUIRE_OK(pair.carry(pair.initiator));
      REQUIRE_OK(pair.carry(pair.acceptor));
      CHECK_EQ(pair.at_acceptor.size(), 1);
      CHECK_EQ(pair.at_initiator.size(), 1);
    }
  }
}

TEST(the_acceptors_first_secret_is_taken_where_both_know_both) {
  Pair pair(check::seed(), config_of("prefill-0", "old", "new"), config_of("decode-0", "new", "old"));
  const Bytes hello = pair.initiator.take_output().at(0);
  REQUIRE_OK(pair.acceptor.receive(pair.now, hello));
  const Bytes challenge = pair.acceptor.take_output().at(0);
  REQUIRE_OK(pair.initiator.receive(pair.now, challenge));
  const Bytes proof = pair.initiator.take_output().at(0);
  const ByteSpan body = body_of(challenge);
  const Digest transcript = sha256({body_of(hello), body.first(body.size() - sizeof(Digest))});
  const auto prove = [&](std::string_view secret, std::string_view label) {
    return hmac_sha256(std::as_bytes(std::span(secret)), {std::as_bytes(std::span(label)), transcript});
  };
  CHECK(std::ranges::equal(body.last(sizeof(Digest)), prove("new", "kvxfer/1 acceptor")));
  CHECK(std::ranges::equal(body_of(proof), prove("new", "kvxfer/1 initiator")));
}

TEST(the_same_secret_twice_is_one) {
  Pair pair(check::seed(), config_of("prefill-0", "old", "old"), config_of("decode-0", "old"));
  CHECK_OK(pair.handshake());
}

TEST(hello_says_nothing_of_secrets) {
  const auto hello_of = [](const SessionConfig& config) {
    return Session(SessionRole::kInitiator, config, kStart, random_source(check::seed())).take_output().at(0);
  };
  CHECK(hello_of(config_of("prefill-0", "old", "new")) == hello_of(config_of("prefill-0", "third")));
}

TEST(the_acceptor_refuses_a_peer_that_cannot_prove_the_secret) {
  for (const char* secret : {"other", "", "open sesam", "open sesame "}) {
    Pair pair;
    REQUIRE_OK(pair.carry(pair.initiator));
    // An initiator that has another secret, and goes on although ours differs.
    Pair liar(check::seed(), config_of("prefill-0", secret), config_of("decode-0", secret));
    REQUIRE_OK(liar.carry(liar.initiator));
    REQUIRE_OK(liar.carry(liar.acceptor));
    const std::vector<Bytes> proof = liar.initiator.take_output();
    REQUIRE_EQ(proof.size(), 1);
    const auto result = pair.acceptor.receive(pair.now, proof[0]);
    CHECK_EQ(result.status().code(), Code::kAuthFailed);
    CHECK(says(result.status(), "\"prefill-0\": it has another secret (its PROOF is wrong)"));
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
  CHECK(says(status, "this agent's own address"));
}

TEST(an_agent_that_called_itself_is_told_so_at_the_end_that_called) {
  Pair pair(1, config_of("prefill-0"), config_of("prefill-0"));
  for (const Bytes& hello : pair.initiator.take_output())
    CHECK_EQ(pair.acceptor.receive(kStart, hello).status().code(), Code::kInvalidArgument);
  const std::vector<Bytes> answers = pair.acceptor.take_output();
  REQUIRE_EQ(answers.size(), 1);
  const Status told = pair.initiator.receive(kStart, answers[0]).status();
  CHECK_EQ(told.code(), Code::kInvalidArgument);
  CHECK(says(told, "this agent's own address: use the address of another agent"));
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
    CHECK(says(status, "maintenance?at noon"));  // a peer's words are one line of the log
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
    CHECK_EQ(session.reason().code(), Code::kPeerLost);
    CHECK(says(session.reason(), "the connection ended before "));
  }
}

// ---- rails

RailHello rail_hello(const Session& session, RailName rail, std::string_view transport) {
  const Bytes frame = session.rail_hello(rail, transport);
  const Result<Header> header = decode_header(frame, kMaxHandshakeBody);
  REQUIRE_OK(header);
  const Result<Message> message = decode(header.value(), body_of(frame));
  REQUIRE_OK(message);
  return std::get<RailHello>(message.value());
}
RailWelcome rail_welcome(const Session& session, RailName rail) {
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
  for (const RailName rail : {RailName(3), RailName(3, 1), RailName(0, 7), RailName(65534, UINT32_MAX)}) {
    const RailHello hello = rail_hello(pair.initiator, rail, "tcp");
    CHECK(hello.rail == rail);
    CHECK_EQ(hello.transport, "tcp");
    CHECK(pair.acceptor.verify_rail_hello(hello));
    CHECK(!pair.acceptor.verify_rail_hello(hello));
    CHECK(!pair.acceptor.verify_rail_hello(rail_hello(pair.initiator, rail, "shm")));
    CHECK(pair.initiator.verify_rail_welcome(rail, rail_welcome(pair.acceptor, rail)));
  }
}

TEST(of_a_rail_that_was_dialled_again_no_earlier_life_is_accepted) {
  Pair pair;
  REQUIRE_OK(pair.handshake());
  const RailHello late = rail_hello(pair.initiator, {1, 1}, "tcp");
  CHECK(pair.acceptor.verify_rail_hello(rail_hello(pair.initiator, {1, 2}, "tcp")));
  CHECK(!pair.acceptor.verify_rail_hello(late));
  CHECK(!pair.initiator.verify_rail_welcome({1, 3}, rail_welcome(pair.acceptor, {1, 2})));
  CHECK(pair.acceptor.verify_rail_hello(rail_hello(pair.initiator, {2, 1}, "tcp")));
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
  CHECK(!with([](RailHello& m) { m.rail.attempt = 1; }));
  CHECK(!with([](RailHello& m) { m.rail = kNoRail; }));
  CHECK(!with([](RailHello& m) { m.transport = "shm"; }));
  CHECK(!with([](RailHello& m) { m.transport.clear(); }));
  for (std::size_t bit = 0; bit < 256; ++bit)
    CHECK(!with([&](RailHello& m) { m.proof[bit / 8] ^= static_cast<std::byte>(1 << bit % 8); }));
  CHECK(!pair.acceptor.verify_rail_hello(rail_hello(stranger.initiator, 1, "tcp")));
  CHECK(!with([&](RailHello& m) { m.proof = rail_hello(stranger.initiator, 1, "tcp").proof; }));
  CHECK(!pair.initiator.verify_rail_hello(hello));  // reflected to its sender
  CHECK(with([](RailHello&) {}));                   // a wrong one does not use up the right one

  CHECK(!pair.initiator.verify_rail_welcome(1, rail_welcome(stranger.acceptor, 1)));
  CHECK(!pair.initiator.verify_rail_welcome(1, rail_welcome(pair.acceptor, 2)));
  CHECK(!pair.initiator.verify_rail_welcome(1, RailWelcome{0, hello.proof}));
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

// Causes `event` in `session`; false if nothing outside of the session can.
bool cause(Event event, Pair& pair, Session& session) {
  Session& peer = pair.other(session);
  switch (event) {
    case Event::kHello:
    case Event::kChallenge:
    case Event::kProof: {
      // The valid frame where it is expected, otherwise another of its kind.
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
      // One clock serves both timers; the state decides which one runs.
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
      // One clock serves both timers.
      auto found = listed(event);
      if (timer && found == transitions.end())
        found = listed(event == Event::kSilence ? Event::kHandshakeTimeout : Event::kSilence);
      // If a pair is not listed, a frame is a violation; in kClosed nothing happens.
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
