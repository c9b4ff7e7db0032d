// The session: deadlines, heartbeats, silence, and standstills of the agent itself, which do not count as
// silence.
#include <algorithm>
#include <deque>
#include <map>

#include "session_pair.h"

namespace {

using namespace session_pair;

TEST(a_handshake_that_stalls_times_out) {
  for (const Scene& scene : kScenes) {
    if (scene.state == State::kOpen || scene.state == State::kClosed) continue;
    Pair pair;
    Session& session = enter(pair, scene);
    const Time deadline = session.next_deadline();
    CHECK_EQ(deadline, kStart + 2000 * kMs);
    CHECK_OK(session.on_time(deadline - 1));
    const Status status = session.on_time(deadline);
    CHECK_EQ(status.code(), Code::kNoAnswer);
    CHECK(says(status, "within 2000 ms"));
    CHECK(says(status, "(handshake_timeout_s)"));
    CHECK_EQ(session.state(), State::kClosed);
    CHECK_EQ(session.next_deadline(), kNever);
    CHECK_OK(session.on_time(deadline + kMs));  // reported once
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
      REQUIRE_OK(session.on_time(now));  // its own heartbeats do not show that the peer lives
    }
    CHECK_OK(session.on_time(lost_at - 1));
    session.take_output();
    const Status status = session.on_time(lost_at);
    CHECK_EQ(status.code(), Code::kPeerSilent);
    CHECK(says(status, "nothing heard for 2000 ms, the limit is 2000 ms"));
    CHECK_EQ(session.state(), State::kClosed);
    CHECK_EQ(session.take_output().size(), 1);  // a GOODBYE, in case the peer still listens
  }
}

// If on_time is called late, the agent itself stood still.
TEST(a_standstill_of_its_own_is_not_the_peers_silence) {
  Pair pair;
  REQUIRE_OK(pair.handshake());
  pair.now += 10'000 * kMs;
  CHECK_OK(pair.initiator.on_time(pair.now));
  CHECK_EQ(pair.initiator.take_output().size(), 1);  // the heartbeat that was due
  // As if it had been called in time: half a second of silence has passed, a second and a half is left.
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
             "nothing heard for 11500 ms, the limit is 2000 ms plus the 9500 ms in which this agent itself "
             "stood still"));
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
    CHECK(num_standstills >= 4);  // the fourth is the first that may count as silence
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
  CHECK_EQ(other.acceptor.on_time(pair.now + 1000 * kMs).code(), Code::kNoAnswer);
}

// Returns how many frames went both ways until then.
std::size_t idle_until(Pair& pair, Time until) {
  std::size_t num_frames = 0;
  while (std::min(pair.initiator.next_deadline(), pair.acceptor.next_deadline()) <= until) {
    pair.now = std::min(pair.initiator.next_deadline(), pair.acceptor.next_deadline());
    REQUIRE_OK(pair.initiator.on_time(pair.now));
    REQUIRE_OK(pair.acceptor.on_time(pair.now));
    for (int round = 0; round < 2; ++round) {
      for (Session* from : {&pair.initiator, &pair.acceptor}) {
        for (const Bytes& frame : from->take_output()) {
          ++num_frames;
          const auto result = pair.other(*from).receive(pair.now, frame);
          REQUIRE_OK(result);
          CHECK(!result.value().has_value());  // the layer above does not see it
        }
      }
    }
  }
  return num_frames;
}

// A silent peer is still found out after silent_ns: an end that lives is heard twice in that time.
TEST(heartbeats_of_a_quiet_session_grow_apart_and_are_answered_alone) {
  Pair pair;
  REQUIRE_OK(pair.handshake());
  CHECK_EQ(idle_until(pair, kStart + 2000 * kMs), 4 + 2 + 2);
  idle_until(pair, kStart + 10'000 * kMs);
  // A heartbeat and its answer, a step of 31 ms before three eighths of the limit.
  CHECK_EQ(idle_until(pair, kStart + 70'000 * kMs) / 2, 60'000 / 719 + 1);
  // What comes next is under a heartbeat of that time, and they are close again.
  pair.initiator.send(pair.now += 700 * kMs, Done{1});
  REQUIRE_OK(pair.carry(pair.initiator));
  CHECK_EQ(pair.acceptor.last_heartbeat_at(), pair.now);
  REQUIRE_OK(pair.carry(pair.acceptor));
  CHECK_EQ(pair.initiator.acknowledged_heartbeat_sent_at(), pair.now);
  CHECK(pair.acceptor.next_deadline() <= pair.now + 500 * kMs);
}

TEST(a_quiet_end_renews_what_it_holds_in_time) {
  Pair pair;
  REQUIRE_OK(pair.handshake());
  pair.initiator.renew_within(3000 * kMs);
  for (Time at = kStart; at < kStart + 60'000 * kMs; at += 500 * kMs) {
    idle_until(pair, at);
    CHECK(pair.acceptor.last_heartbeat_at() >= at - 3000 * kMs);
  }
}

// An agent with many peers that called it wakes for all of them at once. Each of the peers wakes once to
// answer and to send its own heartbeat.
TEST(heartbeats_of_many_sessions_are_due_together_and_answered_with_one) {
  check::Random random(check::seed());
  std::deque<Pair> pairs;
  for (std::uint64_t i = 0; i < 200; ++i) {
    pairs.emplace_back(check::seed() + i);
    pairs.back().now += static_cast<Time>(random.below(400)) * kMs + static_cast<Time>(random.below(kMs));
    REQUIRE_OK(pairs.back().handshake());
  }
  std::map<Time, int> due;  // of acceptors, over four intervals
  for (Pair& pair : pairs) {
    for (const Time until = pair.now + 2000 * kMs; pair.acceptor.next_deadline() < until;) {
      const Time before = pair.now;
      pair.now = pair.acceptor.next_deadline();
      CHECK(pair.now - before <= 500 * kMs);
      CHECK(pair.initiator.next_deadline() > pair.now + 10 * kMs);
      ++due[pair.now];
      pair.acceptor.send(pair.now, Done{1});  // the session is in use
      REQUIRE_OK(pair.acceptor.on_time(pair.now));
      REQUIRE_OK(pair.carry(pair.acceptor));
      const std::vector<Bytes> answer = pair.initiator.take_output();
      REQUIRE_EQ(answer.size(), 2u);
      for (const Bytes& frame : answer) REQUIRE_OK(pair.acceptor.receive(pair.now, frame));
      REQUIRE_OK(pair.carry(pair.acceptor));
      CHECK(pair.initiator.take_output().empty());  // an answer is not answered
      CHECK_EQ(pair.acceptor.acknowledged_heartbeat_sent_at(), pair.now);
      CHECK_EQ(pair.initiator.acknowledged_heartbeat_sent_at(), pair.now);
    }
  }
  for (const auto& [at, num] : due) CHECK_EQ(at % (500 * kMs / 16), 0);
  CHECK(due.size() <= 2'400 / 31 + 1);  // not one wake-up for each of the sessions' 800 and more
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

// A holder counts from sending, a grantor from arrival, so the holder's right ends first.
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
    pair.acceptor.send(pair.now, Done{1});  // alive, but slow to acknowledge
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

TEST(a_hurried_heartbeat_goes_out_at_once_and_the_next_when_it_is_acknowledged) {
  Pair pair;
  REQUIRE_OK(pair.handshake());
  const std::uint64_t first = pair.initiator.next_heartbeat();
  for (int i = 0; i < 3; ++i) pair.initiator.hurry_heartbeat(pair.now);
  CHECK_EQ(pair.initiator.next_heartbeat(), first + 1);
  REQUIRE_OK(pair.carry(pair.initiator));
  pair.now += 10 * kMs;
  REQUIRE_OK(pair.carry(
      pair.acceptor));  // the acknowledgement; it also sends the heartbeat that was hurried meanwhile
  CHECK_EQ(pair.initiator.acknowledged_heartbeat(), first);
  CHECK_EQ(pair.initiator.next_heartbeat(), first + 2);
  REQUIRE_OK(pair.carry(pair.initiator));
  REQUIRE_OK(pair.carry(pair.acceptor));
  CHECK_EQ(pair.initiator.acknowledged_heartbeat(), first + 1);
  CHECK_EQ(pair.initiator.next_heartbeat(), first + 2);  // no lease waits any more
  CHECK(pair.initiator.take_output().empty());
  CHECK_EQ(pair.initiator.acknowledged_heartbeat_sent_at(), pair.now);
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

}  // namespace
