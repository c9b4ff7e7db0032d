// What the engine promises while nothing but time and order is against it, and when rights end:
// each scenario on every set of rails.
#include <functional>

#include "simulated_pair.h"

namespace simulation {
namespace {

const Blocks kFrom = {1, 2, 3, 9, 5, 6, 7, 8}, kTo = {4, 5, 6, 0, 1, 9, 11, 15};

void on_every_rail(const std::function<void(Pair&)>& scenario) {
  for (const auto& rails : rail_sets())
    for (std::uint64_t i = 0; i < 5; ++i) {
      Pair pair(rails, check::seed() * 1000 + i);
      scenario(pair);
      pair.check_quiet();
    }
}

// ---- completing -------------------------------------------------------------------------------

TEST(write_under_a_lease_completes_and_its_bytes_are_right) {
  on_every_rail([](Pair& pair) {
    pair.grant_write();
    const std::vector<std::byte> before = pair.destination().bytes;
    auto handle = pair.write(kFrom, kTo, "req-1");
    REQUIRE(pair.ends(handle));
    CHECK_OK(handle->status());
    CHECK_EQ(handle->outcome(), Outcome::kDone);
    CHECK(pair.equal(kFrom, kTo));
    CHECK(pair.notified(pair.dst, "req-1"));
    CHECK_EQ(pair.num_ended(pair.src, handle), 1);
    // What was not named is as it was.
    Memory memory(pair.dst_layout);
    memory.bytes = pair.destination().bytes;
    for (const std::uint32_t block : kTo)
      for (std::uint32_t layer = 0; layer < memory.layout.num_layers; ++layer)
        for (std::uint32_t half : {0, 1})
          std::fill_n(memory.chunk(layer, block, half), memory.layout.chunk_nbytes, std::byte{0});
    CHECK(memory.bytes == before);
  });
}

TEST(read_under_a_lease_completes_and_the_source_is_notified) {
  on_every_rail([](Pair& pair) {
    pair.grant_read(kFrom);
    auto handle = pair.read(kFrom, kTo, "fetched");
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
    CHECK(pair.equal(kFrom, kTo));
    for (std::uint32_t layer = 0; layer < 4; ++layer) CHECK(handle->layer_arrived(layer));
    CHECK(pair.world.until([&] { return pair.notified(pair.src, "fetched"); }, kSecond));
  });
}

TEST(some_layers_of_a_program_move_and_no_others) {
  on_every_rail([](Pair& pair) {
    pair.grant_read();
    TransferRequest request = pair.request(false, kFrom, kTo);
    request.first_layer = 1;
    request.num_layers = request.layers_ready = 2;
    auto handle = Pair::post(pair.dst, request);
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
    CHECK(pair.equal(kFrom, kTo, 1, 3));
    CHECK(!handle->has_layer(0));
    CHECK(!handle->has_layer(3));
    const std::vector<std::byte> untouched(2 * pair.dst_layout.chunk_nbytes);
    for (const std::uint32_t block : kTo)
      for (std::uint32_t layer : {0u, 3u}) CHECK(pair.destination().read(layer, block) == untouched);
  });
}

TEST(layers_are_released_one_by_one_and_reported_when_confirmed) {
  on_every_rail([](Pair& pair) {
    auto expected = pair.expect("req", kTo);
    for (std::uint32_t layer = 0; layer < 4; ++layer) CHECK(!expected->watch_layer(layer));
    TransferRequest request = pair.request(true, kFrom, kTo, "req");
    request.layers_ready = 0;
    auto handle = Pair::post(pair.src, request);
    for (std::uint32_t ready = 0; ready < 4; ++ready) {
      pair.world.run_for(20 * kMillisecond);
      for (std::uint32_t layer = 0; layer < 4; ++layer)
        CHECK_EQ(expected->layer_arrived(layer), layer < ready);
      CHECK_EQ(handle->outcome(), Outcome::kPending);
      pair.src.engine().layers_ready(pair.src.now(), handle->id(), ready);  // says nothing new
      pair.src.engine().layers_ready(pair.src.now(), handle->id(), ready + 1);
      pair.src.settle();
      pair.world.until([&] { return expected->layer_arrived(ready); }, kSecond);
      CHECK(pair.equal(kFrom, kTo, ready, ready + 1));
    }
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
    CHECK_EQ(expected->outcome(), Outcome::kDone);
    std::size_t num_events = 0;
    for (const Event& event : pair.dst.events) num_events += event.kind == EventKind::kLayer;
    CHECK_EQ(num_events, 4);
  });
}

TEST(an_offer_may_come_before_what_expects_it) {
  on_every_rail([](Pair& pair) {
    auto handle = pair.write(kFrom, kTo, "req");
    pair.world.run_for(100 * kMillisecond);
    CHECK_EQ(pair.bytes_landed, 0);
    auto expected = pair.expect("req", kTo);
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
    CHECK_EQ(expected->outcome(), Outcome::kDone);
    CHECK(pair.equal(kFrom, kTo));
    CHECK(!pair.notified(pair.dst, "req"));  // the expectation's handle says it
  });
}

TEST(one_expectation_is_met_by_several_writes) {
  on_every_rail([](Pair& pair) {
    auto expected = pair.expect("req", kTo);
    const Blocks from[] = {{1, 2, 3, 9}, {5, 6, 7, 8}}, to[] = {{4, 5, 6, 0}, {1, 9, 11, 15}};
    auto first = pair.write(from[0], to[0], "req");
    REQUIRE(pair.ends(first));
    CHECK_EQ(first->outcome(), Outcome::kDone);
    CHECK_EQ(expected->outcome(), Outcome::kPending);
    auto second = pair.write(from[1], to[1], "req");
    REQUIRE(pair.ends(second));
    CHECK_EQ(expected->outcome(), Outcome::kDone);
    CHECK(pair.equal(kFrom, kTo));
  });
}

TEST(no_blocks_at_all_is_done_with_every_layer_in) {
  on_every_rail([](Pair& pair) {
    auto read = pair.read({}, {}, "nothing");
    auto write = pair.write({}, {}, "note");
    REQUIRE(pair.ends(read));
    REQUIRE(pair.ends(write));
    CHECK_EQ(read->outcome(), Outcome::kDone);
    CHECK_EQ(write->outcome(), Outcome::kDone);
    CHECK(read->layer_arrived(3));
    CHECK(pair.notified(pair.dst, "note"));
  });
}

TEST(integrity_passes_on_bytes_that_are_right) {
  on_every_rail([](Pair& pair) {
    pair.grant_read();
    TransferRequest request = pair.request(false, kFrom, kTo);
    request.integrity = true;
    pair.dst.again_percent = 20;
    auto handle = Pair::post(pair.dst, request);
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
    CHECK(pair.equal(kFrom, kTo));
  });
}

TEST(a_byte_that_flips_on_its_way_fails_integrity_and_notifies_nobody) {
  on_every_rail([](Pair& pair) {
    auto expected = pair.expect("req", kTo);
    TransferRequest request = pair.request(true, kFrom, kTo, "req");
    request.integrity = true;
    pair.dst.flip_percent = 20;
    auto handle = Pair::post(pair.src, request);
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->status().code(), Code::kIntegrity);
    REQUIRE(pair.ends(expected));
    CHECK_EQ(expected->status().code(), Code::kIntegrity);
    CHECK(!pair.notified(pair.dst, "req"));
    CHECK_EQ(handle->failed_blocks(), kFrom);
  });
}

TEST(rails_that_say_again_are_asked_again) {
  on_every_rail([](Pair& pair) {
    pair.src.again_percent = pair.dst.again_percent = 60;
    pair.grant_write();
    auto handle = pair.write(kFrom, kTo);
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
    CHECK(pair.equal(kFrom, kTo));
  });
}

TEST(ten_thousand_queued_transfers_complete) {
  for (const auto& rails : rail_sets()) {
    Pair pair(rails);
    pair.world.network().min_latency = 0;
    pair.grant_write();
    pair.src.work_ns = pair.dst.work_ns = kMicrosecond;
    std::vector<std::shared_ptr<Handle>> handles;
    for (std::uint32_t i = 0; i < 10'000; ++i) {
      TransferRequest request = pair.request(true, {i % 16}, {i % 16});
      request.num_layers = request.layers_ready = 1;
      request.timeout_ns = 600 * kSecond;
      auto handle = pair.src.engine().post(pair.src.now(), request);
      REQUIRE_OK(handle);
      handles.push_back(handle.value());
    }
    pair.src.settle();
    REQUIRE(pair.ends(handles.back(), 600 * kSecond));
    pair.check_quiet();
    for (auto& handle : handles) REQUIRE_EQ(handle->outcome(), Outcome::kDone);
  }
}

TEST(an_urgent_transfer_overtakes_those_that_can_wait) {
  on_every_rail([](Pair& pair) {
    pair.grant_read();
    TransferRequest slow = pair.request(false, kFrom, kTo);
    slow.priority = 9;
    TransferRequest urgent = pair.request(false, {4}, {3});
    std::vector<std::shared_ptr<Handle>> patient;
    for (int i = 0; i < 12; ++i) patient.push_back(Pair::post(pair.dst, slow));
    pair.until_midway(kFrom.size());
    auto first = Pair::post(pair.dst, urgent);
    REQUIRE(pair.ends(first));
    CHECK_EQ(patient.back()->outcome(), Outcome::kPending);
    REQUIRE(pair.ends(patient.back()));
  });
}

TEST(a_receiver_serves_many_sources_in_turn) {
  for (const auto& rails : rail_sets()) {
    World world(check::seed());
    Node& dst = world.add("decode");
    const Layout layout{.num_blocks = 128};
    const RegionId to = dst.add_region(layout);
    std::vector<std::shared_ptr<Handle>> handles;
    std::map<SessionKey, std::uint64_t> landed;
    dst.on_write = [&](Node&, SessionKey from, Memory&, std::uint64_t, std::uint64_t nbytes) {
      landed[from] += nbytes;
    };
    for (int i = 0; i < 12; ++i) {
      Node& src = world.add("prefill-" + std::to_string(i));
      const RegionId from = src.add_region(layout);
      world.connect(src, dst, rails);
      const SessionKey key = src.session_with("decode");
      Pair::grant(dst, dst.session_with(src.name()), to, wire::LeaseMode::kWrite, {}, 600 * kSecond, true);
      TransferRequest request;
      request.peer = key;
      request.program = src.engine()
                            .install_program(src.now(), key, true, from, to, program_between(layout, layout))
                            .value();
      for (std::uint32_t block = 0; block < layout.num_blocks; ++block) request.src_blocks.push_back(block);
      request.dst_blocks = request.src_blocks;
      request.num_layers = layout.num_layers;
      request.timeout_ns = 60 * kSecond;
      handles.push_back(Pair::post(src, request));
    }
    for (std::size_t i = 0; i < handles.size(); ++i) {  // only now may bytes move
      Node& src = *world.nodes()[i + 1];
      src.engine().layers_ready(src.now(), handles[i]->id(), layout.num_layers);
      src.settle();
    }
    // When the first is done, the last is well on its way too.
    REQUIRE(world.until([&] {
      return std::any_of(handles.begin(), handles.end(),
                         [](auto& handle) { return handle->outcome() != Outcome::kPending; });
    }));
    CHECK_EQ(landed.size(), 12);
    std::uint64_t least = UINT64_MAX, most = 0;
    for (const auto& [key, nbytes] : landed) least = std::min(least, nbytes), most = std::max(most, nbytes);
    CHECK(least * 2 > most);
    for (auto& handle : handles) {
      REQUIRE(world.until([&] { return handle->outcome() != Outcome::kPending; }));
      CHECK_EQ(handle->outcome(), Outcome::kDone);
    }
  }
}

// ---- refused ----------------------------------------------------------------------------------

TEST(without_a_lease_nothing_moves) {
  on_every_rail([](Pair& pair) {
    pair.grant_write({4, 5});
    pair.grant_read({1, 2});
    pair.freeze_destination();
    auto write = pair.write(kFrom, kTo);
    auto read = pair.read(kFrom, kTo);
    REQUIRE(pair.ends(write));
    REQUIRE(pair.ends(read));
    CHECK_EQ(write->status().code(), Code::kNotPermitted);
    CHECK_EQ(read->status().code(), Code::kNotPermitted);
    CHECK_EQ(read->failed_blocks(), kTo);
  });
}

TEST(a_lease_of_the_other_mode_or_of_another_region_is_none) {
  on_every_rail([](Pair& pair) {
    pair.grant(pair.dst, pair.to_src, pair.dst_region, wire::LeaseMode::kRead, {}, 10 * kSecond, true);
    const RegionId other = pair.dst.add_region(pair.dst_layout);
    pair.grant(pair.dst, pair.to_src, other, wire::LeaseMode::kWrite, {}, 10 * kSecond, true);
    auto write = pair.write(kFrom, kTo);
    REQUIRE(pair.ends(write));
    CHECK_EQ(write->status().code(), Code::kNotPermitted);
    CHECK_EQ(pair.bytes_landed, 0);
  });
}

TEST(an_expectation_of_other_blocks_or_of_another_peer_permits_nothing) {
  on_every_rail([](Pair& pair) {
    auto other_blocks = pair.expect("req", {4, 5, 6});
    auto write = pair.write(kFrom, kTo, "req");
    REQUIRE(pair.ends(write));
    CHECK_EQ(pair.bytes_landed, 0);
    CHECK(write->outcome() == Outcome::kFailed);
    // Whichever end's time is over first says it in its own words.
    CHECK(write->status().code() == Code::kNotPermitted || write->status().code() == Code::kDeadline);
  });
}

TEST(callers_mistakes_are_named_and_nothing_is_posted) {
  Pair pair;
  const auto code = [&](auto&& change) {
    TransferRequest request = pair.request(true, kFrom, kTo);
    change(request);
    return pair.src.engine().post(pair.src.now(), std::move(request)).status().code();
  };
  CHECK_EQ(code([](auto& r) { r.src_blocks[0] = 16; }), Code::kOutOfRange);
  CHECK_EQ(code([](auto& r) { r.dst_blocks[0] = 16; }), Code::kOutOfRange);
  CHECK_EQ(code([](auto& r) { r.dst_blocks[1] = r.dst_blocks[0]; }), Code::kDuplicateBlock);
  CHECK_EQ(code([](auto& r) { r.dst_blocks.pop_back(); }), Code::kLengthMismatch);
  CHECK_EQ(code([](auto& r) { r.num_layers = 5; }), Code::kOutOfRange);
  CHECK_EQ(code([](auto& r) { r.timeout_ns = 0; }), Code::kInvalidArgument);
  CHECK_EQ(code([](auto& r) { r.program = 99; }), Code::kUnknownRegion);
  CHECK_EQ(code([](auto& r) { r.peer = 99; }), Code::kPeerLost);
  pair.check_quiet();
}

// ---- rights that end at the destination -------------------------------------------------------

// In mid-transfer `end` ends the right; from then on no byte changes, and the writer fails typed.
void write_is_fenced(const std::function<void(Pair&)>& begin, const std::function<void(Pair&)>& end,
                     std::vector<Code> codes) {
  on_every_rail([&](Pair& pair) {
    begin(pair);
    auto handle = pair.write(kFrom, kTo, "req");
    REQUIRE(pair.until_midway(kFrom.size()));
    end(pair);
    pair.freeze_destination();
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kFailed);
    CHECK(std::find(codes.begin(), codes.end(), handle->status().code()) != codes.end());
    CHECK_EQ(handle->failed_blocks(), kFrom);
    pair.world.run_for(kSecond);
  });
}

TEST(after_revoke_no_byte_lands) {
  LeaseId lease = 0;
  write_is_fenced([&](Pair& pair) { lease = pair.grant_write(kTo); },
                  [&](Pair& pair) { pair.dst.revoke(lease); }, {Code::kLeaseEnded});
}

TEST(after_deregistration_no_byte_lands) {
  write_is_fenced([](Pair& pair) { pair.grant_write(); },
                  [](Pair& pair) { CHECK_OK(pair.dst.deregister(pair.dst_region)); }, {Code::kRegionGone});
}

TEST(after_an_expectation_is_cancelled_no_byte_lands) {
  std::shared_ptr<Handle> expected;
  write_is_fenced([&](Pair& pair) { expected = pair.expect("req", kTo); },
                  [&](Pair& pair) {
                    pair.dst.cancel(expected);
                    CHECK_EQ(expected->outcome(), Outcome::kCancelled);
                  },
                  {Code::kCancelled});
}

TEST(after_an_expectations_time_no_byte_lands) {
  write_is_fenced(
      [](Pair& pair) {
        pair.expect("req", kTo, 250 * kMillisecond), pair.src.work_ns = pair.dst.work_ns = 60 * kMillisecond;
      },
      [](Pair& pair) { pair.world.until([&] { return pair.dst.engine().load().expectations == 0; }); },
      {Code::kDeadline});
}

TEST(after_a_lease_expires_no_byte_lands) {
  write_is_fenced(
      [](Pair& pair) {
        pair.grant_write(kTo, 250 * kMillisecond, false),
            pair.src.work_ns = pair.dst.work_ns = 60 * kMillisecond;
      },
      [](Pair& pair) { pair.world.until([&] { return pair.dst.engine().load().leases == 0; }); },
      {Code::kLeaseEnded});
}

TEST(after_the_session_is_ended_no_byte_lands) {
  write_is_fenced([](Pair& pair) { pair.grant_write(); },
                  [](Pair& pair) {
                    pair.dst.engine().end_session(pair.dst.now(), pair.to_src, Code::kClosed, "enough");
                    pair.dst.settle();
                  },
                  {Code::kPeerLost});
}

TEST(after_close_no_byte_lands_and_every_handle_is_final) {
  std::shared_ptr<Handle> expected;
  write_is_fenced([&](Pair& pair) { expected = pair.expect("req", kTo); },
                  [&](Pair& pair) {
                    pair.dst.engine().close(pair.dst.now());
                    pair.dst.settle();
                    CHECK_EQ(expected->outcome(), Outcome::kFailed);
                  },
                  {Code::kPeerLost});
}

TEST(after_a_reader_cancels_no_byte_lands) {
  on_every_rail([](Pair& pair) {
    pair.grant_read();
    auto handle = pair.read(kFrom, kTo);
    REQUIRE(pair.until_midway(kFrom.size()));
    pair.dst.cancel(handle);
    pair.freeze_destination();
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kCancelled);
    CHECK_EQ(handle->status().code(), Code::kCancelled);
    CHECK(!handle->failed_blocks().empty());
    pair.world.run_for(kSecond);
  });
}

// ---- rights that end at the source ------------------------------------------------------------

// In mid-transfer the source ends the right and reuses the pages at once: never done.
void read_is_fenced(const std::function<void(Pair&)>& begin, const std::function<void(Pair&)>& end,
                    bool paused, std::vector<Code> codes) {
  std::size_t num_failed = 0;
  on_every_rail([&](Pair& pair) {
    begin(pair);
    auto handle = pair.read(kFrom, kTo, "fetched");
    REQUIRE(pair.until_midway(kFrom.size()));
    if (paused) pair.dst.pause();
    end(pair);
    pair.reuse_source(kFrom);
    if (paused) {
      pair.world.run_for(pair.world.random().chance(50) ? 100 * kMillisecond : 4 * kSecond);
      pair.dst.resume();
    }
    REQUIRE(pair.ends(handle));
    if (handle->outcome() == Outcome::kDone) {  // it had read all, and looked at the fence, before
      CHECK(pair.equal_held(kFrom, kTo));
      return;
    }
    ++num_failed;
    CHECK_EQ(handle->outcome(), Outcome::kFailed);
    CHECK(std::find(codes.begin(), codes.end(), handle->status().code()) != codes.end());
    pair.world.run_for(kSecond);
    CHECK(!pair.src.alive() || !pair.notified(pair.src, "fetched"));
  });
  CHECK(num_failed >= 15);  // of 20: done is the exception
}
const std::vector<Code> kAnyLoss = {Code::kLeaseEnded,   Code::kRegionGone, Code::kPeerLost,
                                    Code::kPeerSilent,   Code::kDeadline,   Code::kRailFailed,
                                    Code::kPeerRestarted};

TEST(pages_read_under_a_revoked_lease_are_never_done) {
  LeaseId lease = 0;
  for (const bool paused : {false, true})
    read_is_fenced([&](Pair& pair) { lease = pair.grant_read(kFrom); },
                   [&](Pair& pair) { pair.src.revoke(lease); }, paused,
                   paused ? kAnyLoss : std::vector{Code::kLeaseEnded});
}

TEST(pages_of_a_deregistered_region_are_never_done) {
  for (const bool paused : {false, true})
    read_is_fenced([](Pair& pair) { pair.grant_read(); },
                   [](Pair& pair) { CHECK_OK(pair.src.deregister(pair.src_region)); }, paused,
                   paused ? kAnyLoss : std::vector{Code::kLeaseEnded, Code::kRegionGone});
}

TEST(pages_of_a_session_that_the_source_ended_are_never_done) {
  for (const bool paused : {false, true})
    read_is_fenced([](Pair& pair) { pair.grant_read(); },
                   [](Pair& pair) {
                     pair.src.engine().end_session(pair.src.now(), pair.to_dst, Code::kClosed, "enough");
                     pair.src.settle();
                   },
                   paused, kAnyLoss);
}

TEST(a_reader_that_was_stopped_until_its_lease_expired_is_never_done) {
  read_is_fenced(
      [](Pair& pair) { pair.grant_read(kFrom, kSecond); },
      [](Pair& pair) { REQUIRE(pair.world.until([&] { return pair.src.engine().load().leases == 0; })); },
      true, kAnyLoss);
}

TEST(a_reader_stops_before_a_lease_that_nobody_renews_expires) {
  on_every_rail([](Pair& pair) {
    pair.src.work_ns = pair.dst.work_ns = 20 * kMillisecond;
    pair.grant_read(kFrom, 80 * kMillisecond, false);
    auto handle = pair.read(kFrom, kTo);
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->status().code(), Code::kLeaseEnded);
  });
}

TEST(a_renewed_lease_carries_a_read_that_takes_longer_than_it) {
  on_every_rail([](Pair& pair) {
    pair.src.work_ns = pair.dst.work_ns = 800 * kMillisecond;
    pair.grant_read(kFrom, kSecond);
    pair.world.run_for(static_cast<Time>(pair.world.random().below(2 * kSecond)));
    TransferRequest request = pair.request(false, kFrom, kTo);
    request.timeout_ns = 60 * kSecond;
    auto handle = Pair::post(pair.dst, request);
    REQUIRE(pair.ends(handle, 60 * kSecond));
    CHECK_OK(handle->status());
  });
}

TEST(heartbeats_renew_a_lease_for_as_long_as_both_live) {
  on_every_rail([](Pair& pair) {
    const LeaseId lease = pair.grant_read(kFrom, kSecond);
    pair.world.run_for(20 * kSecond);
    CHECK(pair.src.engine().lease_state(lease) == LeaseState::kActive);
    auto handle = pair.read(kFrom, kTo);
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
    pair.dst.pause();
    REQUIRE(pair.world.until([&] { return pair.src.engine().lease_state(lease) != LeaseState::kActive; },
                             2 * kSecond));
    pair.dst.resume();
  });
}

TEST(a_write_that_its_source_ends_is_never_done_with_other_bytes) {
  for (const bool paused : {false, true})
    for (const bool cancelled : {false, true})
      on_every_rail([&](Pair& pair) {
        auto expected = pair.expect("req", kTo);
        auto handle = pair.write(kFrom, kTo, "req");
        REQUIRE(pair.until_midway(kFrom.size()));
        if (paused) pair.dst.pause();
        if (cancelled) {
          pair.src.cancel(handle);
        } else {
          CHECK_OK(pair.src.deregister(pair.src_region));
        }
        REQUIRE(pair.world.until([&] { return handle->outcome() != Outcome::kPending; }, kSecond));
        CHECK_EQ(handle->outcome(), cancelled ? Outcome::kCancelled : Outcome::kFailed);
        pair.reuse_source(kFrom);
        pair.world.run_for(500 * kMillisecond);
        pair.dst.resume();
        REQUIRE(pair.ends(expected));
        if (expected->outcome() == Outcome::kDone) CHECK(pair.equal_held(kFrom, kTo));
      });
}

TEST(both_ends_may_end_a_transfer_at_the_same_time) {
  on_every_rail([](Pair& pair) {
    auto expected = pair.expect("req", kTo);
    auto handle = pair.write(kFrom, kTo, "req");
    REQUIRE(pair.until_midway(kFrom.size()));
    pair.src.cancel(handle);
    pair.dst.cancel(expected);
    pair.freeze_destination();
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kCancelled);
    CHECK_EQ(expected->outcome(), Outcome::kCancelled);
    pair.src.cancel(handle);  // too late: nothing happens
    CHECK_EQ(pair.num_ended(pair.src, handle), 1);
  });
}

TEST(a_deadline_ends_both_ends) {
  for (const bool write : {false, true})
    on_every_rail([&](Pair& pair) {
      pair.src.work_ns = pair.dst.work_ns = 100 * kMillisecond;
      pair.grant_read();
      pair.grant_write();
      TransferRequest request = pair.request(write, kFrom, kTo, "req");
      request.timeout_ns = 150 * kMillisecond;
      auto handle = Pair::post(write ? pair.src : pair.dst, request);
      REQUIRE(pair.ends(handle));
      CHECK_EQ(handle->status().code(), Code::kDeadline);
      pair.world.run_for(kSecond);
      CHECK_EQ(pair.src.engine().num_transfers(), 0);
      CHECK_EQ(pair.dst.engine().num_transfers(), 0);
    });
}

TEST(durations_without_end_are_never_over) {
  Pair pair;
  pair.grant_write({}, kNever);
  pair.grant_read({}, kNever);
  for (const bool write : {false, true}) {
    TransferRequest request = pair.request(write, kFrom, kTo);
    request.timeout_ns = kNever;
    auto handle = Pair::post(write ? pair.src : pair.dst, request);
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
  }
  auto expected = pair.expect("never", {3}, kNever);
  pair.world.run_for(10 * kSecond);
  CHECK_EQ(expected->outcome(), Outcome::kPending);
}

}  // namespace
}  // namespace simulation
