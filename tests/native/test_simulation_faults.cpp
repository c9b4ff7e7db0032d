// What the engine promises when processes die, stop and go on, and when paths break.
#include <functional>

#include "simulated_pair.h"

namespace simulation {
namespace {

bool is_one_of(Code code, std::initializer_list<Code> codes) {
  return std::find(codes.begin(), codes.end(), code) != codes.end();
}

// ---- processes --------------------------------------------------------------------------------

TEST(a_peer_that_crashes_ends_what_it_was_part_of) {
  for (const bool heard : {false, true})
    for (const bool source_dies : {false, true})
      in_mid_transfer(rail_sets(), 4, [&](Pair& pair, bool write, std::shared_ptr<Handle> handle) {
        const bool poster_dies = source_dies == write;
        (source_dies ? pair.src : pair.dst).crash(heard);
        Node& left = source_dies ? pair.dst : pair.src;
        REQUIRE(pair.world.until([&] { return left.engine().num_transfers() == 0; }, 4 * kSecond));
        if (!poster_dies) {
          // Its pages stay mapped, so what was copied may still be confirmed.
          if (handle->outcome() == Outcome::kDone)
            CHECK(pair.equal(kFrom, kTo));
          else
            CHECK(is_one_of(handle->status().code(), {Code::kPeerLost, Code::kPeerSilent, Code::kNoPath}));
        }
        REQUIRE(pair.world.until([&] { return left.engine().open_peers().empty(); }, 4 * kSecond));
        CHECK_EQ(left.engine().load().leases, 0);
      });
}

TEST(a_peer_that_is_stopped_for_long_ends_what_it_was_part_of) {
  for (const bool source_stops : {false, true})
    in_mid_transfer(rail_sets(), 4, [&](Pair& pair, bool write, std::shared_ptr<Handle> handle) {
      Node& stopped = source_stops ? pair.src : pair.dst;
      Node& other = source_stops ? pair.dst : pair.src;
      stopped.pause();
      REQUIRE(pair.world.until([&] { return other.engine().num_transfers() == 0; }, 4 * kSecond));
      REQUIRE(pair.world.until([&] { return other.engine().open_peers().empty(); }, 4 * kSecond));
      if (!source_stops) pair.reuse_source(kFrom);
      if (source_stops) pair.freeze_destination();
      pair.world.run_for(kSecond);
      stopped.resume();
      REQUIRE(pair.ends(handle));
      if (handle->outcome() == Outcome::kDone) {
        if (source_stops)
          CHECK(pair.equal(kFrom, kTo));
        else
          CHECK(!write && pair.equal_held(kFrom, kTo));
      }
    });
}

TEST(a_restarted_peer_is_a_new_one_and_what_the_old_one_held_is_over) {
  for (const bool heard : {false, true})
    for (const bool source_restarts : {false, true})
      in_mid_transfer(rail_sets(), 4, [&](Pair& pair, bool write, std::shared_ptr<Handle> handle) {
        Node& restarted = source_restarts ? pair.src : pair.dst;
        Node& left = source_restarts ? pair.dst : pair.src;
        const SessionKey old = source_restarts ? pair.to_src : pair.to_dst;
        restarted.crash(heard);
        restarted.start();
        (source_restarts ? pair.src_region : pair.dst_region) =
            restarted.add_region(source_restarts ? pair.src_layout : pair.dst_layout);
        restarted.call(left, {one_sided_rail()});
        REQUIRE(pair.world.until([&] { return restarted.session_with(left.name()) != 0; }));
        REQUIRE(pair.world.until([&] { return left.session_with(restarted.name()) > old; }));
        CHECK_EQ(left.engine().peer(old)->state, std::string("lost"));
        if (!heard) CHECK(left.engine().peer(old)->reason.code() == Code::kPeerRestarted);
        REQUIRE(pair.world.until([&] { return left.engine().num_transfers() == 0; }, kSecond));
        if (source_restarts != write && handle->outcome() != Outcome::kDone)
          CHECK(is_one_of(handle->status().code(), {Code::kPeerRestarted, Code::kPeerLost, Code::kNoPath}));
        // The new process works as the first one did.
        pair.to_dst = pair.src.session_with("decode");
        pair.to_src = pair.dst.session_with("prefill");
        pair.connect({one_sided_rail()});
        for (std::uint32_t block = 0; block < 16; ++block) pair.source().fill(block, 2000 + block);
        pair.grant_read();
        auto again = pair.read(kFrom, kTo);
        REQUIRE(pair.ends(again));
        CHECK_EQ(again->outcome(), Outcome::kDone);
        CHECK(pair.equal(kFrom, kTo));
      });
}

TEST(closing_an_agent_ends_every_handle_of_both) {
  for (const bool source_closes : {false, true})
    in_mid_transfer(rail_sets(), 4, [&](Pair& pair, bool write, std::shared_ptr<Handle> handle) {
      Node& closed = source_closes ? pair.src : pair.dst;
      Node& other = source_closes ? pair.dst : pair.src;
      auto waiting =
          other.engine().post(other.now(), pair.request(!source_closes, kFrom, kTo, "never")).value();
      closed.engine().close(closed.now());
      closed.settle();
      REQUIRE(pair.world.until(
          [&] { return closed.engine().num_transfers() == 0 && closed.num_works() == 0; }, kSecond));
      REQUIRE(pair.ends(handle));
      REQUIRE(pair.ends(waiting));
      CHECK(handle->outcome() == Outcome::kFailed);
      CHECK(handle->status().code() == (source_closes == write ? Code::kClosed : Code::kPeerLost) ||
            handle->status().code() == Code::kNoPath || handle->status().code() == Code::kLeaseEnded);
      CHECK(!closed.engine().post(closed.now(), pair.request(source_closes, kFrom, kTo)).ok());
      CHECK(!closed.engine().expect(closed.now(), Pair::bytes("x"), 1, {1}, 0, 1, {}, {}, kSecond).ok());
    });
}

// ---- the control path -------------------------------------------------------------------------

TEST(a_connection_that_is_cut_or_half_closed_ends_both_ends_and_nothing_else_lands) {
  enum class Way { kOneWay, kBothWays, kHalfClosed };
  for (const Way way : {Way::kOneWay, Way::kBothWays, Way::kHalfClosed})
    for (const bool from_source : {false, true})
      in_mid_transfer(rail_sets(), 4, [&](Pair& pair, bool, std::shared_ptr<Handle> handle) {
        Node& a = from_source ? pair.src : pair.dst;
        Node& b = from_source ? pair.dst : pair.src;
        const SessionKey key = from_source ? pair.to_dst : pair.to_src;
        if (way == Way::kHalfClosed)
          a.pipe(key)->half_close(a.side(key));
        else
          pair.world.partition(a, b, way == Way::kBothWays);
        REQUIRE(pair.ends(handle));
        if (handle->outcome() == Outcome::kDone) CHECK(pair.equal(kFrom, kTo));
        REQUIRE(pair.world.until(
            [&] { return a.engine().open_peers().empty() && b.engine().open_peers().empty(); }, 5 * kSecond));
        pair.freeze_destination();
        pair.world.heal(a, b);
        pair.world.run_for(kSecond);
      });
}

TEST(frames_that_are_lost_repeated_swapped_or_altered_end_the_session_typed) {
  for (unsigned Network::* fault : {&Network::lose, &Network::repeat, &Network::swap, &Network::flip})
    in_mid_transfer(rail_sets(), 4, [&](Pair& pair, bool, std::shared_ptr<Handle> handle) {
      pair.world.network().*fault = 3000;
      REQUIRE(pair.world.until(
          [&] { return pair.src.engine().open_peers().empty() && pair.dst.engine().open_peers().empty(); },
          60 * kSecond));
      REQUIRE(pair.ends(handle));
      std::size_t num_typed = 0;
      for (Node* node : {&pair.src, &pair.dst}) {
        const Code code = node->engine().peer(node == &pair.src ? pair.to_dst : pair.to_src)->reason.code();
        num_typed += is_one_of(code, {Code::kProtocol, Code::kAuthFailed});
        CHECK(is_one_of(code, {Code::kProtocol, Code::kAuthFailed, Code::kPeerLost, Code::kPeerSilent}));
      }
      CHECK(num_typed >= 1);
      pair.world.network().*fault = 0;
    });
}

TEST(another_secret_opens_no_session) {
  World world(check::seed());
  Node &a = world.add("prefill", "one"), &b = world.add("decode", "other");
  a.call(b, {one_sided_rail()});
  world.run_for(5 * kSecond);
  for (Node* node : {&a, &b}) {
    CHECK(node->engine().open_peers().empty());
    CHECK_EQ(node->engine().load().timers, 0);
  }
  // The agent that was called sees the caller hang up.
  CHECK(a.engine().peer(1)->reason.code() == Code::kAuthFailed);
  CHECK(b.engine().peer(1)->reason.code() == Code::kPeerLost);
}

// The called agent has a limit for strangers; the caller's error names it, at any point of the handshake.
TEST(both_ends_name_the_limit_of_a_handshake) {
  for (const auto& [limit, awaited] :
       {std::pair(50 * kMicrosecond, "HELLO"), std::pair(250 * kMicrosecond, "PROOF")}) {
    World world(check::seed());
    world.network().min_latency = world.network().max_latency = 100 * kMicrosecond;
    Node& a = world.add("prefill");
    world.limits.session.handshake_timeout_ns = limit;
    Node& b = world.add("decode");
    a.call(b, {one_sided_rail()});
    world.run_for(kSecond);
    const std::string here = a.engine().peer(1)->reason.message(),
                      there = b.engine().peer(1)->reason.message();
    if (here.find("handshake_timeout_s") == std::string::npos) std::printf("  %s\n", here.c_str());
    CHECK_HAS(here, "its handshake_timeout_s was over");
    CHECK_HAS(there, "no " + std::string(awaited) + " within");
    CHECK_HAS(there, "(handshake_timeout_s)");
  }
}

TEST(a_thousand_connections_leave_nothing_behind) {
  World world(check::seed());
  Node &a = world.add("prefill"), &b = world.add("decode");
  for (int i = 0; i < 1000; ++i) {
    world.connect(a, b, {one_sided_rail(), two_sided_rail()});
    const SessionKey key = a.session_with("decode");
    if (i % 2 == 0) {
      a.engine().end_session(a.now(), key, Code::kClosed, "enough");
      a.settle();
    } else {
      a.pipe(key)->close(0);
      a.pipe(key)->cut();
      b.crash();
      b.start();
    }
    REQUIRE(world.until([&] { return a.engine().open_peers().empty() && b.engine().open_peers().empty(); }));
    a.events.clear();
    b.events.clear();
  }
  world.run_for(5 * kSecond);
  Pair::check_nothing_left(a);
  Pair::check_nothing_left(b);
  CHECK_EQ(a.engine().load().timers, 0);
}

// ---- rails ------------------------------------------------------------------------------------

TEST(the_last_rail_is_kept_though_it_is_silent) {
  Pair pair({two_sided_rail()});
  pair.grant_read();
  auto handle = pair.read(kFrom, kTo);
  REQUIRE(pair.until_midway(kFrom.size()));
  pair.src.link(pair.src.rails_with(pair.to_dst)[0])->muted = true;
  REQUIRE(pair.ends(handle));
  CHECK_EQ(handle->status().code(), Code::kDeadline);
  pair.src.link(pair.src.rails_with(pair.to_dst)[0])->muted = false;
  handle = pair.read(kFrom, kTo);
  REQUIRE(pair.ends(handle));
  CHECK_OK(handle->status());
  pair.check_quiet();
}

TEST(when_the_mapped_rail_dies_the_stream_carries_on) {
  const RailSets mapped = {{one_sided_rail(), two_sided_rail()}};
  in_mid_transfer(mapped, 20, [](Pair& pair, bool, std::shared_ptr<Handle> handle) {
    pair.src.cut_rail(pair.src.rails_with(pair.to_dst)[0], "cut");
    REQUIRE(pair.ends(handle));
    CHECK_OK(handle->status());
    CHECK(pair.equal(kFrom, kTo));
  });
}

TEST(when_the_last_rail_dies_the_peer_is_lost) {
  in_mid_transfer(rail_sets(), 4, [](Pair& pair, bool, std::shared_ptr<Handle> handle) {
    for (const RailId rail : pair.src.rails_with(pair.to_dst)) pair.src.cut_rail(rail, "cut");
    REQUIRE(pair.ends(handle));
    if (handle->outcome() == Outcome::kDone)
      CHECK(pair.equal(kFrom, kTo));
    else
      CHECK(is_one_of(handle->status().code(), {Code::kPeerLost, Code::kNoPath, Code::kLeaseEnded}));
    REQUIRE(pair.world.until(
        [&] { return pair.src.engine().open_peers().empty() && pair.dst.engine().open_peers().empty(); }));
  });
}

TEST(a_region_that_no_rail_reaches_holds_up_no_other) {
  Pair pair({two_sided_rail()});
  const RegionId hidden = pair.dst.add_region(pair.dst_layout);
  pair.world.run_for(kSecond);
  pair.grant_read();
  pair.dst.unattachable.insert("stream");
  const RegionId unreachable = pair.src.add_region(pair.src_layout);
  pair.world.run_for(kSecond);
  pair.grant(pair.src, pair.to_dst, unreachable, wire::LeaseMode::kRead, {}, 10 * kSecond, true);
  TransferRequest request = pair.request(false, kFrom, kTo);
  request.program = pair.dst.engine()
                        .install_program(pair.dst.now(), pair.to_src, false, unreachable, hidden,
                                         program_between(pair.src_layout, pair.dst_layout))
                        .value();
  auto stuck = Pair::post(pair.dst, request);
  pair.world.run_for(10 * kMillisecond);
  auto handle = pair.read(kFrom, kTo);
  REQUIRE(pair.ends(handle));
  CHECK_EQ(handle->outcome(), Outcome::kDone);
  REQUIRE(pair.ends(stuck));
  CHECK_EQ(stuck->status().code(), Code::kDeadline);
  pair.check_quiet();
}

TEST(no_rail_at_all_is_unreachable) {
  World world(check::seed());
  Node &a = world.add("prefill"), &b = world.add("decode");
  RailPlan rail = one_sided_rail();
  rail.comes_up = false;
  a.call(b, {rail, rail});
  world.run_for(kSecond);
  CHECK(a.engine().peer(1)->reason.code() == Code::kUnreachable);
  CHECK(b.engine().open_peers().empty());
}

TEST(a_required_transport_that_does_not_come_up_is_unreachable_whatever_else_does) {
  EngineConfig config;
  config.required_transports = {"mapped"};
  World world(check::seed(), config);
  Node &a = world.add("prefill"), &b = world.add("decode");
  RailPlan rail = one_sided_rail();
  rail.comes_up = false;
  a.call(b, {two_sided_rail(), rail});
  world.run_for(kSecond);
  const Status reason = a.engine().peer(1)->reason;
  CHECK_EQ(reason.code(), Code::kUnreachable);
  CHECK(reason.message().find("no mapped rail to 'decode' came up, which this agent requires") == 0);
  CHECK(b.engine().open_peers().empty());
}

// ---- regions ----------------------------------------------------------------------------------

TEST(regions_come_and_go_thousands_of_times_in_one_session) {
  Pair pair;
  for (int i = 0; i < 5000; ++i) {
    const RegionId ours = pair.src.add_region({.num_layers = 1, .num_blocks = 1});
    if (i % 100 == 0 && i != 0) pair.world.run_for(kMillisecond);
    CHECK_OK(pair.src.engine().install_program(
        pair.src.now(), pair.to_dst, true, ours, pair.dst_region,
        program_between({.num_layers = 1, .num_blocks = 1}, {.num_layers = 1})));
    CHECK_OK(pair.src.deregister(ours));
  }
  pair.world.run_for(kSecond);
  pair.grant_read();
  auto handle = pair.read(kFrom, kTo);
  REQUIRE(pair.ends(handle));
  CHECK_EQ(handle->outcome(), Outcome::kDone);
}

TEST(a_gone_region_of_one_agent_leaves_the_programs_of_the_others_region_with_its_number) {
  for (const bool source : {false, true}) {
    Pair pair;
    // Number 1 is registered at the other end, too: `source` says whose region 1 goes.
    const RegionId src = pair.src.add_region(pair.src_layout), dst = pair.dst.add_region(pair.dst_layout);
    pair.world.run_for(kSecond);
    pair.src.memory(source ? src : 1).fill(3, 4711);
    const CopyProgram program = program_between(pair.src_layout, pair.dst_layout);
    const RegionId from = source ? src : pair.src_region, to = source ? pair.dst_region : dst;
    const auto write =
        pair.src.engine().install_program(pair.src.now(), pair.to_dst, true, from, to, program);
    const auto read =
        pair.dst.engine().install_program(pair.dst.now(), pair.to_src, false, from, to, program);
    REQUIRE_OK(write);
    REQUIRE_OK(read);
    pair.src.settle();
    pair.dst.settle();
    pair.world.run_for(kMillisecond);
    CHECK_OK(source ? pair.src.deregister(1) : pair.dst.deregister(1));
    pair.world.run_for(kSecond);
    pair.grant(pair.src, pair.to_dst, from, wire::LeaseMode::kRead, {}, 10 * kSecond, true);
    pair.grant(pair.dst, pair.to_src, to, wire::LeaseMode::kWrite, {}, 10 * kSecond, true);
    for (const bool writes : {false, true}) {
      TransferRequest request = pair.request(writes, {3}, {5});
      request.program = writes ? write.value() : read.value();
      auto handle = Pair::post(writes ? pair.src : pair.dst, request);
      REQUIRE(pair.ends(handle));
      CHECK_OK(handle->status());
    }
    for (std::uint32_t layer = 0; layer < 4; ++layer)
      CHECK(pair.src.memory(from).read(layer, 3) == pair.dst.memory(to).read(layer, 5));
  }
}

}  // namespace
}  // namespace simulation
