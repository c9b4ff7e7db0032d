// Messages: in order, as many as there is room for, and without a cost to other peers.
#include "mallory.h"

namespace simulation {
namespace {

constexpr std::uint64_t kNumLeast = wire::kMessageWindow / wire::kLeastMessageCharge;  // short messages
constexpr std::uint64_t kNumLongest = wire::kMessageWindow / wire::kMaxMessage;

std::size_t count(const Node& node, EventKind kind) {
  return static_cast<std::size_t>(std::count_if(node.events.begin(), node.events.end(),
                                                [&](const Event& event) { return event.kind == kind; }));
}
std::uint64_t unread_at(Node& node, SessionKey peer) {
  const std::shared_ptr<Budget> budget = node.engine().budget(peer);
  return budget == nullptr ? 0 : budget->used(Resource::kMessages);
}

TEST(a_reader_that_stalls_costs_a_window_and_reading_gives_room_back) {
  for (const std::uint64_t nbytes :
       {std::uint64_t{0}, wire::kLeastMessageCharge, std::uint64_t{wire::kMaxMessage}}) {
    Pair pair;
    pair.dst.takes_events = false;
    const std::uint64_t num_most = nbytes == wire::kMaxMessage ? kNumLongest : kNumLeast;
    const auto send = [&] { return pair.src.send_message(pair.to_dst, wire::Bytes(nbytes)); };
    for (std::uint64_t i = 0; i < num_most; ++i) CHECK_OK(send());
    pair.world.run_for(100 * kMillisecond);
    const Status full = send();
    CHECK_REFUSED(full, Code::kExhausted, "peer.sendable()");
    CHECK_EQ(unread_at(pair.dst, pair.to_src), wire::kMessageWindow);
    CHECK(!pair.src.engine().has_room(pair.world.now(), pair.to_dst, 0).value());
    // Room is reported once, after a quarter of the window has been read.
    for (std::uint64_t i = 1; i < num_most / 4; ++i) CHECK(pair.dst.read_message().has_value());
    pair.world.run_for(kMillisecond);
    CHECK_EQ(count(pair.src, EventKind::kRoom), 0u);
    CHECK(pair.dst.read_message().has_value());
    pair.world.run_for(kMillisecond);
    CHECK_EQ(count(pair.src, EventKind::kRoom), 1u);
    for (std::uint64_t i = 0; i < num_most / 4; ++i) CHECK_OK(send());
    CHECK_EQ(send().code(), Code::kExhausted);
    // After everything was read, the longest message finds room.
    pair.world.run_for(kMillisecond);
    while (pair.dst.read_message()) {}
    pair.world.run_for(kMillisecond);
    CHECK_EQ(count(pair.src, EventKind::kRoom), 2u);
    CHECK(pair.src.engine().has_room(pair.world.now(), pair.to_dst, wire::kMaxMessage).value());
    pair.dst.takes_events = true;
    check_undisturbed(pair);
  }
}

TEST(room_is_told_to_those_alone_who_found_none) {
  Pair pair;
  for (std::uint64_t i = 0; i < 3 * kNumLeast; ++i) {
    CHECK_OK(pair.src.send_message(pair.to_dst, {}));
    pair.world.run_for(kMillisecond);
  }
  CHECK_EQ(count(pair.dst, EventKind::kMessage), 3 * kNumLeast);
  CHECK_EQ(count(pair.src, EventKind::kRoom), 0u);
}

TEST(a_message_that_is_too_long_is_refused_where_it_is_sent) {
  Pair pair;
  CHECK_EQ(pair.src.send_message(pair.to_dst, wire::Bytes(wire::kMaxMessage + 1)).code(),
           Code::kInvalidArgument);
  CHECK_OK(pair.src.send_message(pair.to_dst, wire::Bytes(wire::kMaxMessage)));
}

TEST(a_session_that_ends_takes_its_window_with_it) {
  Pair pair;
  pair.dst.takes_events = false;
  while (pair.src.send_message(pair.to_dst, {}).ok()) {}
  pair.world.run_for(kMillisecond);
  const SessionKey gone = pair.to_dst;
  for (Node* node : {&pair.src, &pair.dst}) CHECK_EQ(node->engine().load().windows, 1u);
  pair.src.end_session_with(gone);
  CHECK_EQ(pair.src.send_message(gone, {}).code(), Code::kClosed);
  CHECK_EQ(pair.src.engine().has_room(pair.world.now(), gone, 0).status().code(), Code::kClosed);
  pair.world.run_for(100 * kMillisecond);
  for (Node* node : {&pair.src, &pair.dst}) CHECK_EQ(node->engine().load().windows, 0u);
  pair.connect({one_sided_rail()});
  CHECK_OK(pair.src.send_message(pair.to_dst, {}));
  pair.world.run_for(kMillisecond);
  // Messages of the first session are read first, and no peer is told of them.
  for (std::uint64_t i = 0; i < kNumLeast; ++i) CHECK(pair.dst.read_message()->peer != pair.to_src);
  CHECK_EQ(pair.dst.read_message()->peer, pair.to_src);
  pair.world.run_for(kMillisecond);
  CHECK_EQ(pair.src.session_with("decode"), pair.to_dst);
}

TEST(a_peer_that_is_cut_off_while_its_sender_waits_for_room_is_lost_in_time) {
  Pair pair;
  pair.dst.takes_events = false;
  while (pair.src.send_message(pair.to_dst, {}).ok()) {}
  pair.world.partition(pair.src, pair.dst);
  REQUIRE(pair.world.until([&] { return count(pair.src, EventKind::kPeerLost) == 1; }));
  CHECK_EQ(pair.src.send_message(pair.to_dst, {}).code(), Code::kPeerSilent);
}

// The called agent has its peer before the caller has, whose rails still have to come up.
TEST(messages_come_after_their_peer_does) {
  std::size_t num_early = 0;
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    World world(check::seed() * 1000 + seed);
    Node &caller = world.add("caller"), &called = world.add("called");
    caller.call(called, {one_sided_rail()});
    REQUIRE(world.until([&] { return called.session_with("caller") != 0; }));
    num_early += caller.session_with("called") == 0;
    for (int i = 0; i < 3; ++i) CHECK_OK(called.send_message(called.session_with("caller"), {}));
    REQUIRE(world.until([&] { return count(caller, EventKind::kMessage) == 3; }));
    CHECK(caller.events.front().kind == EventKind::kPeerUp);
  }
  CHECK(num_early > 0);
}

// ---- a peer that knows the secret and nothing else -----------------------------------------------

TEST(more_than_the_window_ends_her_session_alone) {
  for (const std::uint64_t nbytes : {std::uint64_t{1}, std::uint64_t{wire::kMaxMessage}}) {
    Pair pair;
    pair.dst.takes_events = false;
    Mallory mallory(pair.world, pair.dst);
    const SessionKey key = mallory.key();
    const std::uint64_t num_most = nbytes == 1 ? kNumLeast : kNumLongest;
    for (std::uint64_t i = 0; i < num_most; ++i) mallory.send(wire::AgentMessage{wire::Bytes(nbytes)});
    CHECK(!mallory.ended);
    mallory.send(wire::AgentMessage{});
    CHECK(mallory.ended);
    CHECK_EQ(pair.dst.engine().peer(key)->reason.code(), Code::kProtocol);
    // The messages within her window are still read.
    for (std::uint64_t i = 0; i < num_most; ++i) CHECK(pair.dst.read_message().has_value());
    CHECK(!pair.dst.read_message().has_value());
    pair.dst.takes_events = true;
    check_undisturbed(pair);
  }
}

TEST(a_message_beyond_the_largest_ends_her_session_alone) {
  Pair pair;
  Mallory mallory(pair.world, pair.dst);
  mallory.send(wire::AgentMessage{wire::Bytes(wire::kMaxMessage + 1)});
  CHECK(mallory.ended);
  check_undisturbed(pair);
}

TEST(what_was_read_is_told_once_for_a_quarter_of_the_window) {
  Pair pair;
  Mallory mallory(pair.world, pair.dst);
  for (std::uint64_t i = 0; i < 4 * kNumLeast; ++i) mallory.send(wire::AgentMessage{});
  // A thread that has to announce room comes late: another thread has done so.
  for (int i = 0; i < 2; ++i) pair.dst.engine().message_taken(pair.world.now(), mallory.key());
  pair.world.run_for(kMillisecond);
  std::vector<std::uint64_t> told;
  for (const wire::Message& message : mallory.received)
    if (const auto* taken = std::get_if<wire::MessagesTaken>(&message)) told.push_back(taken->charge);
  REQUIRE_EQ(told.size(), 16u);
  for (std::size_t i = 0; i < told.size(); ++i) CHECK_EQ(told[i], (i + 1) * wire::kMessageWindow / 4);
  CHECK(!mallory.ended);
}

TEST(a_reader_that_lies_about_what_it_took_loses_its_session_alone) {
  struct Lie {
    std::vector<std::uint64_t> told;  // for two messages that were sent; the last value is false
  };
  const std::uint64_t one = wire::kLeastMessageCharge;
  for (const Lie& lie :
       {Lie{{0}}, Lie{{2 * one + 1}}, Lie{{UINT64_MAX}}, Lie{{one, one}}, Lie{{2 * one, one}}}) {
    Pair pair;
    Mallory mallory(pair.world, pair.dst);
    const SessionKey key = mallory.key();
    for (int i = 0; i < 2; ++i) CHECK_OK(pair.dst.send_message(key, {}));
    for (const std::uint64_t charge : lie.told) {
      CHECK(!mallory.ended);
      mallory.send(wire::MessagesTaken{charge});
    }
    CHECK(mallory.ended);
    CHECK_EQ(pair.dst.engine().peer(key)->reason.code(), Code::kProtocol);
    check_undisturbed(pair);
  }
}

// ---- leases that peers hear of -------------------------------------------------------------------

std::vector<LeaseId> told_at(const Node& node) {
  std::vector<LeaseId> told;
  for (const Event& event : node.events)
    if (event.kind == EventKind::kLeaseAcknowledged) told.push_back(event.lease);
  return told;
}

TEST(a_lease_is_told_within_round_trips_and_not_at_the_next_heartbeat) {
  Pair pair;
  const Time round_trip = 2 * static_cast<Time>(pair.world.network().max_latency);
  std::vector<LeaseId> leases;
  for (int i = 0; i < 100; ++i) leases.push_back(pair.grant_read({1}));
  pair.src.on_event = [](Node& node, const Event& event) {
    if (event.kind == EventKind::kLeaseAcknowledged)
      CHECK(node.engine().await_acknowledged(node.now(), event.lease));
  };
  const auto ask = [&](LeaseId lease) {
    const bool told = pair.src.engine().await_acknowledged(pair.world.now(), lease);
    pair.src.settle();
    return told;
  };
  // The first query sends a heartbeat; the others come while it is under way. Each is answered once.
  CHECK(!ask(leases[0]));
  CHECK(!ask(leases[0]));
  const LeaseId later = pair.grant_read({2});
  leases.push_back(later);
  CHECK(!ask(later));
  for (const LeaseId lease : leases) CHECK(!ask(lease));
  pair.world.run_for(2 * round_trip + kMillisecond);
  CHECK_EQ(told_at(pair.src).size(), leases.size());
  for (const LeaseId lease : leases) CHECK(ask(lease));
  pair.world.run_for(kSecond);
  CHECK_EQ(told_at(pair.src).size(), leases.size());
}

TEST(nobody_is_told_who_does_not_ask) {
  Pair pair;
  const LeaseId lease = pair.grant_read({1});
  pair.world.run_for(2 * kSecond);
  CHECK(told_at(pair.src).empty());
  CHECK(pair.src.engine().await_acknowledged(pair.world.now(), lease));  // confirmed by the heartbeats since
  const LeaseId bearer =
      Pair::grant(pair.src, std::nullopt, pair.src_region, wire::LeaseMode::kRead, {1}, kSecond, false);
  CHECK(pair.src.engine().await_acknowledged(pair.world.now(), bearer));
  CHECK(pair.src.engine().await_acknowledged(pair.world.now(), 12345));
}

TEST(whoever_waits_for_a_lease_that_ends_before_is_woken) {
  enum class End { kRevoked, kRegionGone, kExpired, kPeerGone, kPeerSilent };
  for (const End end : {End::kRevoked, End::kRegionGone, End::kExpired, End::kPeerGone, End::kPeerSilent}) {
    Pair pair;
    pair.world.partition(pair.src, pair.dst);
    const LeaseId lease = pair.grant_read({1}, end == End::kExpired ? 100 * kMillisecond : kSecond, false);
    CHECK(!pair.src.engine().await_acknowledged(pair.world.now(), lease));
    pair.src.settle();
    pair.world.run_for(kMillisecond);
    CHECK(told_at(pair.src).empty());
    if (end == End::kRevoked) pair.src.revoke(lease);
    if (end == End::kRegionGone) CHECK_OK(pair.src.deregister(pair.src_region));
    if (end == End::kPeerGone) pair.src.end_session_with(pair.to_dst);
    REQUIRE(pair.world.until([&] { return !told_at(pair.src).empty(); }, 5 * kSecond));
    CHECK(told_at(pair.src) == std::vector<LeaseId>{lease});
    CHECK(pair.src.engine().await_acknowledged(pair.world.now(), lease));
    CHECK(pair.src.engine().lease_state(lease) != LeaseState::kActive);
  }
}

}  // namespace
}  // namespace simulation
