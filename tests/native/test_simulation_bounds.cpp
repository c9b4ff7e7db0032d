// Bounds on what a peer can make an agent hold or compute: the peer is refused in words, or loses its
// session, and a third agent loses nothing.
#include <numeric>

#include "mallory.h"

namespace simulation {
namespace {

// What the victim holds for a session; 0 if the session has ended.
std::uint64_t held_by(Node& node, SessionKey session, Resource resource) {
  const std::shared_ptr<Budget> budget = node.engine().budget(session);
  return budget == nullptr ? 0 : budget->used(resource);
}

struct Bounded {
  explicit Bounded(Resource resource, std::uint64_t limit, bool lease = true,
                   const RailPlan& rail = two_sided_rail())
      : pair({one_sided_rail()}, check::seed(), {}, limits(resource, limit)),
        mallory(pair.world, pair.dst, rail) {
    if (lease)
      pair.grant(pair.dst, mallory.key(), pair.dst_region, wire::LeaseMode::kRead, {}, 10 * kSecond, true);
    mallory.layout = pair.dst_layout;
  }
  static EngineConfig limits(Resource resource, std::uint64_t limit) {
    EngineConfig config;
    config.peer_budget[static_cast<std::size_t>(resource)] = limit;
    return config;
  }
  void tell(std::uint32_t program) {
    mallory.send(wire::Program{program, pair.dst_region, mallory.region(),
                               program_between(mallory.layout, mallory.layout)});
  }
  // Sends a REQUEST; returns the code of the refusal, or kOk.
  Code ask(std::uint32_t program, Blocks from) {
    mallory.received.clear();
    mallory.send(wire::Request{mallory.spec(id += 2, program, from, from)});
    return mallory.refused_with();
  }
  Pair pair;
  Mallory mallory;
  TransferId id = 0;
};

TEST(fence_slots_are_shared_and_a_refusal_says_whose_they_are) {
  Bounded bounded(Resource::kFenceSlots, 2);
  bounded.tell(1);
  const std::size_t before = bounded.pair.dst.engine().load().fences;
  for (int i = 0; i < 100; ++i)
    CHECK_EQ(bounded.ask(1, {}), Code::kOk);  // nothing to read, so it takes no slot
  CHECK_EQ(bounded.pair.dst.engine().load().fences, before);
  CHECK_EQ(bounded.ask(1, {1}), Code::kOk);
  CHECK_EQ(bounded.ask(1, {2}), Code::kOk);
  CHECK_EQ(bounded.ask(1, {3}), Code::kRefused);
  CHECK_HAS(bounded.mallory.last<wire::Fail>()->text, "2 fence slots");
  bounded.mallory.send(wire::Done{bounded.id - 2});
  CHECK_EQ(bounded.ask(1, {3}), Code::kOk);
  CHECK(!bounded.mallory.ended);
  check_undisturbed(bounded.pair);
}

// Writes without an expectation, more than there are fence slots.
TEST(one_peer_with_parked_writes_leaves_slots_to_others) {
  constexpr std::uint32_t kNumSlots = FenceTable::kNumSlots;
  EngineConfig limits;
  limits.max_open_transfers = 2 * kNumSlots;
  limits.peer_budget = peer_budget(limits.max_open_transfers, limits.max_open_pairs);
  Pair pair({one_sided_rail()}, check::seed(), limits);
  const std::uint32_t share = kNumSlots / 3 * 2 + 1;
  Node& other = pair.world.add("other");
  const RegionId region = other.add_region(pair.dst_layout);
  pair.world.connect(pair.src, other);
  const SessionKey to_other = pair.src.session_with("other");
  const auto program =
      pair.src.engine().install_program(pair.src.now(), to_other, true, pair.src_region, region,
                                        program_between(pair.src_layout, pair.dst_layout));
  REQUIRE_OK(program);
  std::vector<std::shared_ptr<Handle>> parked;
  for (std::uint32_t i = 0; i < kNumSlots; ++i) {
    TransferRequest request = pair.request(true, {1}, {1}, "parked " + std::to_string(i));
    request.timeout_ns = 100 * kSecond;
    parked.push_back(pair.src.engine().post(pair.src.now(), std::move(request)).value());
  }
  CHECK_EQ(pair.src.engine().load().fences, share);
  // To another peer, as many as it likes while a slot is free.
  const auto lease = other.engine().grant(
      other.now(),
      {other.session_with("prefill"), region, wire::LeaseMode::kWrite, true, {}, 100 * kSecond, true});
  REQUIRE_OK(lease);
  other.settle();
  std::vector<std::shared_ptr<Handle>> written;
  for (int i = 0; i < 100; ++i) {
    TransferRequest request = pair.request(true, {1}, {1});
    request.peer = to_other;
    request.program = program.value();
    written.push_back(Pair::post(pair.src, std::move(request)));
  }
  for (const auto& handle : written) {
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
  }
  // Transfers that wait get slots as others end.
  for (std::uint32_t i = 0; i < share; ++i) pair.src.engine().cancel(pair.src.now(), parked[i]->id());
  pair.src.settle();
  auto expected = pair.expect("parked " + std::to_string(kNumSlots - 1), {1});
  REQUIRE(pair.ends(expected));
  CHECK_EQ(expected->outcome(), Outcome::kDone);
}

// As many reads as both ends' options allow.
TEST(forty_thousand_reads_of_one_peer_are_served_at_once) {
  constexpr std::uint32_t kNum = 40'000;
  EngineConfig limits;
  limits.max_open_transfers = kNum;
  limits.peer_budget = peer_budget(limits.max_open_transfers, limits.max_open_pairs);
  Pair pair({one_sided_rail()}, check::seed(), limits);
  pair.grant_read();
  std::vector<std::shared_ptr<Handle>> reads;
  for (std::uint32_t i = 0; i < kNum; ++i) {
    TransferRequest request = pair.request(false, {1}, {1});
    request.layers_ready = 0;
    request.timeout_ns = 100 * kSecond;
    reads.push_back(pair.dst.engine().post(pair.dst.now(), std::move(request)).value());
  }
  pair.dst.settle();
  REQUIRE(pair.world.until([&] { return pair.src.engine().load().fences == kNum; }));
  for (const auto& handle : reads)
    pair.dst.engine().layers_ready(pair.dst.now(), handle->id(), pair.src_layout.num_layers);
  pair.dst.settle();
  for (const auto& handle : reads) {
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
  }
  CHECK(pair.world.until([&] { return pair.src.engine().load().fences == 0; }));
}

// A peer may name any slot of the table, and no other.
TEST(a_fence_slot_beyond_the_table_is_a_breach) {
  for (const std::uint32_t slot : {0u, FenceTable::kNumSlots - 1, FenceTable::kNumSlots}) {
    Pair pair;
    Mallory mallory(pair.world, pair.dst);
    mallory.layout = pair.dst_layout;
    for (const wire::LeaseMode mode : {wire::LeaseMode::kRead, wire::LeaseMode::kWrite})
      pair.grant(pair.dst, mallory.key(), pair.dst_region, mode, {}, 10 * kSecond, true);
    mallory.send(
        wire::Program{1, pair.dst_region, mallory.region(), program_between(mallory.layout, mallory.layout)});
    mallory.send(
        wire::Program{2, mallory.region(), pair.dst_region, program_between(mallory.layout, mallory.layout)});
    TransferId id = 0;
    for (const Blocks& blocks : {Blocks{1}, Blocks{}}) {  // of nothing, too
      mallory.send(wire::Request{mallory.spec(id += 2, 1, blocks, blocks)});
      const wire::Accept* const accept = mallory.last<wire::Accept>();
      REQUIRE(accept != nullptr && accept->transfer == id);
      CHECK(accept->fence_slot < FenceTable::kNumSlots);
    }
    mallory.send(wire::Offer{mallory.spec(id += 2, 2, {1}, {1}), 0, slot, 0});
    CHECK_EQ(mallory.ended, slot == FenceTable::kNumSlots);
    check_undisturbed(pair);
  }
}

TEST(programs_are_charged_to_the_peer_that_tells_them) {
  Bounded bounded(Resource::kBytes, 4096);
  for (std::uint32_t id = 1; id <= 100; ++id) bounded.tell(id);
  const std::uint64_t held = held_by(bounded.pair.dst, bounded.mallory.key(), Resource::kBytes);
  CHECK(held > 2048 && held <= 4096);
  CHECK_EQ(bounded.ask(100, {1}), Code::kRefused);
  CHECK_HAS(bounded.mallory.last<wire::Fail>()->text, "copy programs");
  CHECK(!bounded.mallory.ended);
  check_undisturbed(bounded.pair);
}

TEST(tables_are_charged_to_the_peer_and_given_back_with_their_transfer) {
  Bounded bounded(Resource::kBytes, 8192);
  bounded.tell(1);
  const auto used = [&] { return held_by(bounded.pair.dst, bounded.mallory.key(), Resource::kBytes); };
  const std::uint64_t before = used();
  CHECK_EQ(bounded.ask(1, {1, 2, 3}), Code::kOk);
  CHECK(used() > before + 3 * 8);
  bounded.mallory.send(wire::Done{bounded.id});
  bounded.pair.world.run_for(kMillisecond);
  CHECK_EQ(used(), before);
  check_undisturbed(bounded.pair);
}

TEST(a_transfer_without_a_right_is_refused_before_its_program_is_looked_at) {
  Bounded bounded(Resource::kEvents, 1000, false);
  bounded.mallory.tell_program(1, bounded.pair.dst_region, true, [](CopyProgram& program) {
    program.loops[0].dst_offset += 8;  // other blocks than the ids name
  });
  bounded.mallory.send(wire::Offer{bounded.mallory.spec(2, 1, {1}, {99}), 4, 0, 0});
  CHECK_EQ(bounded.mallory.refused_with(), Code::kNotPermitted);
  check_undisturbed(bounded.pair);
}

TEST(credits_over_rails_that_are_not_there_are_kept_as_pieces_of_one_transfer_at_most) {
  Bounded bounded(Resource::kEvents, 1000);
  bounded.tell(1);
  CHECK_EQ(bounded.ask(1, {1, 2}), Code::kOk);
  const std::uint32_t num_pieces = 2 * bounded.mallory.layout.num_layers;
  bounded.mallory.send(wire::Credit{bounded.id, 7, 0, num_pieces});  // the rail may still come up
  CHECK(!bounded.mallory.ended);
  bounded.mallory.send(wire::Credit{bounded.id, 8, 0, 1});
  CHECK(bounded.mallory.ended);
  check_undisturbed(bounded.pair);
}

TEST(what_was_found_of_a_program_holds_for_its_regions_and_no_others) {
  Bounded bounded(Resource::kBytes, 64 * 1024);
  Mallory& mallory = bounded.mallory;
  bounded.pair.grant(bounded.pair.dst, mallory.key(), bounded.pair.dst_region, wire::LeaseMode::kWrite, {},
                     10 * kSecond, true);
  const auto announce = [&](std::uint64_t nbytes) {
    wire::Region region;
    region.id = 100;
    region.name = "hers";
    region.spans = {{0, nbytes}};
    region.num_blocks = mallory.layout.num_blocks;
    region.keys = {{"mapped", {}}, {"stream", {}}};
    mallory.send(region);
  };
  const auto offer = [&] {
    mallory.received.clear();
    mallory.send(wire::Offer{mallory.spec(bounded.id += 2, 1, {1}, {1}), 0, 0, 0});
    return mallory.refused_with();
  };
  const std::uint64_t whole = mallory.memory().bytes.size();
  announce(64);
  mallory.send(
      wire::Program{1, 100, bounded.pair.dst_region, program_between(mallory.layout, mallory.layout)});
  const SessionKey key = mallory.key();
  const auto used = [&] { return held_by(bounded.pair.dst, key, Resource::kBytes); };
  const Code refused = offer();
  CHECK(refused != Code::kOk);
  const std::uint64_t kept = used();
  for (int i = 0; i < 20; ++i) CHECK_EQ(offer(), refused);
  CHECK_EQ(used(), kept);
  announce(whole);  // a repetition, which changes nothing
  CHECK_EQ(offer(), refused);
  mallory.send(wire::RegionGone{100});
  announce(whole);
  CHECK_EQ(offer(), Code::kOk);
  mallory.send(wire::RegionGone{100});
  announce(64);
  CHECK_EQ(offer(), refused);
  CHECK(!mallory.ended);
  check_undisturbed(bounded.pair);
}

TEST(pieces_asked_for_here_and_there_are_charged_once_they_are_many) {
  for (const bool only_sums : {false, true}) {
    Bounded bounded(Resource::kBytes, 64 * 1024);
    bounded.pair.dst.again_percent = 100;  // her rail accepts nothing, because she does not read
    bounded.tell(1);
    Blocks from(bounded.mallory.layout.num_blocks);
    std::iota(from.begin(), from.end(), 0u);
    bounded.mallory.received.clear();
    wire::Request request{bounded.mallory.spec(2, 1, from, from)};
    request.spec.flags = only_sums ? wire::kFlagIntegrity : 0;
    bounded.mallory.send(request);
    CHECK_EQ(bounded.mallory.refused_with(), Code::kOk);
    const SessionKey key = bounded.mallory.key();
    const auto used = [&] { return held_by(bounded.pair.dst, key, Resource::kBytes); };
    const std::uint64_t before = used();
    const std::uint32_t num_pieces =
        bounded.mallory.layout.num_layers * static_cast<std::uint32_t>(from.size());
    const auto ask_for_every_other = [&] {
      for (std::uint32_t piece = 0; piece < num_pieces && !bounded.mallory.ended; piece += 2)
        bounded.mallory.send(wire::Credit{2, only_sums ? wire::kNoRail : std::uint16_t{0}, piece, 1});
    };
    for (int i = 0; i < 4; ++i) ask_for_every_other();
    if (!bounded.mallory.ended) CHECK(only_sums ? used() == before : used() > before);
    bounded.mallory.send(wire::Done{2});
    bounded.pair.world.run_for(kMillisecond);
    CHECK(used() < before);
    bounded.pair.dst.again_percent = 0;
    check_undisturbed(bounded.pair);
  }
}

TEST(regions_that_come_and_go_wait_for_a_caller_up_to_a_bound) {
  Bounded bounded(Resource::kEvents, 10);
  Node& victim = bounded.pair.dst;
  const SessionKey key = bounded.mallory.key();
  RegionId next = 100;
  const auto comes_and_goes = [&] {
    wire::Region region;
    region.id = next++;
    bounded.mallory.send(region);
    bounded.mallory.send(wire::RegionGone{region.id});
  };
  for (int i = 0; i < 100; ++i) comes_and_goes();  // the caller takes the events
  CHECK(!bounded.mallory.ended);
  victim.takes_events = false;
  for (int i = 0; i < 5; ++i) comes_and_goes();
  CHECK(!bounded.mallory.ended);
  CHECK_EQ(held_by(victim, key, Resource::kEvents), 10u);
  comes_and_goes();
  CHECK(bounded.mallory.ended);
  CHECK_REFUSED(victim.engine().peer(key)->reason, Code::kPeerLost, "changes of your regions are unread");
  victim.takes_events = true;
  check_undisturbed(bounded.pair);
}

TEST(notifications_that_nobody_reads_are_refused_in_words_until_somebody_does) {
  Bounded bounded(Resource::kEvents, 2);
  Pair& pair = bounded.pair;
  pair.grant_write();
  pair.dst.takes_events = false;
  const auto writes = [&] {
    const auto handle = pair.write(kFrom, kTo, "read me");
    REQUIRE(pair.ends(handle));
    return handle->status();
  };
  CHECK_OK(writes());
  CHECK_OK(writes());
  const Status refused = writes();
  CHECK_REFUSED(refused, Code::kRefused, "notifications are unread at the peer");
  // An expected tag becomes no notification, but it could, so it needs room as well.
  const auto expected = pair.expect("read me", kTo);
  CHECK_EQ(writes().code(), Code::kRefused);
  pair.dst.events.clear();
  CHECK_OK(writes());
  CHECK_EQ(expected->outcome(), Outcome::kDone);
  CHECK_EQ(held_by(pair.dst, pair.to_src, Resource::kEvents), 0u);
  const auto without = pair.write(kFrom, kTo);
  REQUIRE(pair.ends(without));
  CHECK_OK(without->status());
  check_undisturbed(pair);
}

TEST(what_is_told_of_regions_is_charged_and_given_back_with_them) {
  Bounded bounded(Resource::kBytes, 1024 * 1024);
  const auto used = [&] { return held_by(bounded.pair.dst, bounded.mallory.key(), Resource::kBytes); };
  const std::uint64_t before = used();
  const auto region = [](RegionId id, std::uint16_t rail) {
    wire::Region told;
    told.id = id;
    told.keys = {{"mapped", RegionKeys(60'000), rail}};
    return told;
  };
  bounded.mallory.send(region(100, 0));
  CHECK(used() - before > 60'000);
  bounded.mallory.send(region(100, 0));  // a repetition
  CHECK(used() - before < 62'000);
  bounded.mallory.send(region(100, 1));
  CHECK(used() - before > 120'000);
  bounded.mallory.send(wire::RegionGone{100});
  CHECK_EQ(used(), before);
  const SessionKey key = bounded.mallory.key();
  for (std::uint16_t rail = 0; rail < 20 && !bounded.mallory.ended; ++rail)
    bounded.mallory.send(region(101, rail));
  CHECK(bounded.mallory.ended);
  CHECK_REFUSED(bounded.pair.dst.engine().peer(key)->reason, Code::kPeerLost, "too much");
  check_undisturbed(bounded.pair);
}

// For a process that has restarted, see test_simulation_faults.cpp.
TEST(a_name_whose_process_answers_is_not_taken_over) {
  for (const bool newcomer_calls : {true, false}) {
    Pair pair;
    pair.grant_read(kFrom);
    Node& newcomer = pair.world.add("prefill");
    newcomer_calls ? newcomer.call(pair.dst, {one_sided_rail()})
                   : pair.dst.call(newcomer, {one_sided_rail()});
    pair.world.run_for(10 * kSecond);
    CHECK(pair.dst.engine().session(pair.to_src) != nullptr);
    CHECK(newcomer.engine().open_peers().empty());
    CHECK_EQ(pair.dst.engine().open_peers().size(), 1);
    auto handle = pair.read(kFrom, kTo);  // under the earlier lease
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
    CHECK(pair.equal(kFrom, kTo));
  }
}

// A caller that has more pairs of regions, or larger programs, than a peer keeps. Its end has the peer keep
// those that were used last, so the peer never has to refuse one.
TEST(more_programs_than_a_peer_keeps_take_turns) {
  // The larger ones by a table of scales that no loop reads.
  for (const auto& [num_programs, num_scales] :
       {std::pair<std::uint32_t, std::size_t>{4200, 0}, {600, wire::kMaxScales}}) {
    Pair pair({one_sided_rail()}, check::seed());
    pair.grant_read();
    std::vector<std::uint32_t> programs;
    for (std::uint32_t i = 0; i < num_programs; ++i) {
      CopyProgram program = program_between(pair.src_layout, pair.dst_layout);
      if (i % 2 == 0) program.scales.resize(num_scales);
      const auto installed = pair.dst.engine().install_program(
          pair.dst.now(), pair.to_src, false, pair.src_region, pair.dst_region, std::move(program));
      REQUIRE_OK(installed);
      programs.push_back(installed.value());
      if (i % 16 == 0) pair.world.run_for(kMillisecond);
    }
    pair.world.run_for(kMillisecond);
    const std::uint64_t held = held_by(pair.src, pair.to_dst, Resource::kBytes);
    CHECK(held > 0 && held <= std::uint64_t{64} * 1024 * 1024);
    const auto read = [&](std::uint32_t program) {
      TransferRequest request = pair.request(false, {1}, {2});
      request.program = program;
      return Pair::post(pair.dst, request);
    };
    for (const std::uint32_t id : {programs.front(), programs[1], programs.back(), programs.front()}) {
      const auto handle = read(id);
      REQUIRE(pair.ends(handle));
      CHECK_OK(handle->status());
    }
    // Transfers that are posted keep programs that their caller forgets, also while they wait to be told.
    pair.src.pause();
    std::vector<std::shared_ptr<Handle>> handles;
    for (const std::uint32_t id : programs) handles.push_back(read(id));
    for (const std::uint32_t id : programs) pair.dst.engine().forget_program(pair.to_src, id);
    pair.src.resume();
    for (const auto& handle : handles) {
      REQUIRE(pair.ends(handle));
      CHECK_OK(handle->status());
    }
    CHECK(pair.dst.engine().session(pair.to_src) != nullptr);
    pair.check_quiet();
  }
}

// An older release tells all that it has: what is one too many is refused in words, and only where it is used.
TEST(a_program_too_many_costs_its_transfers_and_not_the_session) {
  Bounded bounded(Resource::kBytes, std::uint64_t{192} * 1024 * 1024);
  for (std::uint32_t id = 1; id <= 4100; ++id) bounded.tell(id);
  CHECK_EQ(bounded.ask(1, {1}), Code::kOk);
  CHECK_EQ(bounded.ask(4100, {1}), Code::kRefused);
  CHECK_HAS(bounded.mallory.last<wire::Fail>()->text, "copy programs");
  bounded.tell(1);  // a number that is told anew takes its own place
  CHECK_EQ(bounded.ask(1, {2}), Code::kOk);
  CHECK(!bounded.mallory.ended);
  check_undisturbed(bounded.pair);
}

}  // namespace
}  // namespace simulation
