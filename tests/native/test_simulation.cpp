// What the engine promises when only time and order vary, on every set of rails.
#include "simulated_pair.h"

namespace simulation {
namespace {

// ---- completing -------------------------------------------------------------------------------

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

TEST(layers_move_when_their_caller_releases_them_and_are_reported_when_they_are_in) {
  for (const bool write : {true, false})
    on_every_rail([&](Pair& pair) {
      pair.grant_read();
      const auto expected = write ? pair.expect("req", kTo) : nullptr;
      TransferRequest request = pair.request(write, kFrom, kTo, "req");
      request.layers_ready = 0;
      Node& poster = write ? pair.src : pair.dst;
      const auto handle = Pair::post(poster, request);
      const auto& told = write ? expected : handle;
      for (std::uint32_t layer = 0; layer < 4; ++layer) CHECK(!told->watch_layer(layer));
      for (std::uint32_t ready = 0; ready < 4; ++ready) {
        pair.world.run_for(20 * kMillisecond);
        CHECK_EQ((write ? pair.dst : pair.src).engine().num_transfers(), 1);  // it was asked at once
        for (std::uint32_t layer = 0; layer < 4; ++layer) CHECK_EQ(told->layer_arrived(layer), layer < ready);
        CHECK_EQ(pair.bytes_landed, ready * 2 * pair.src_layout.chunk_nbytes * kFrom.size());
        CHECK_EQ(handle->outcome(), Outcome::kPending);
        for (const std::uint32_t layers :
             {ready, ready + 1})  // the first is a repetition, which changes nothing
          poster.engine().layers_ready(poster.now(), handle->id(), layers);
        poster.settle();
        pair.world.until([&] { return told->layer_arrived(ready); }, kSecond);
        CHECK(pair.equal(kFrom, kTo, ready, ready + 1));
      }
      for (const auto& each : {handle, told}) {
        REQUIRE(pair.ends(each));
        CHECK_EQ(each->outcome(), Outcome::kDone);
      }
      CHECK_EQ(std::count_if(pair.dst.events.begin(), pair.dst.events.end(),
                             [](const Event& event) { return event.kind == EventKind::kLayer; }),
               4);
    });
}

TEST(a_read_that_is_never_released_ends_at_its_deadline_and_nothing_lands) {
  on_every_rail([](Pair& pair) {
    pair.grant_read();
    TransferRequest request = pair.request(false, kFrom, kTo);
    request.layers_ready = 0;
    auto handle = Pair::post(pair.dst, request);
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kFailed);
    CHECK_EQ(handle->status().code(), Code::kDeadline);
    CHECK_EQ(handle->status().message(),
             "4 of its 4 layers had not been released here when the transfer's time was over");
    CHECK_EQ(pair.bytes_landed, 0);
    pair.world.run_for(kSecond);
    CHECK_EQ(pair.src.engine().num_transfers(), 0);
    pair.dst.engine().layers_ready(pair.dst.now(), handle->id(), 4);
    pair.dst.settle();
    pair.world.run_for(kSecond);
    CHECK_EQ(pair.bytes_landed, 0);
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
      for (std::uint32_t block = 0; block < layout.num_blocks; ++block) request.src_ids.push_back(block);
      request.dst_ids = request.src_ids;
      request.num_layers = layout.num_layers;
      request.timeout_ns = 60 * kSecond;
      handles.push_back(Pair::post(src, request));
    }
    for (std::size_t i = 0; i < handles.size(); ++i) {  // only now may bytes move
      Node& src = *world.nodes()[i + 1];
      src.engine().layers_ready(src.now(), handles[i]->id(), layout.num_layers);
      src.settle();
    }
    // When the first transfer is done, the last has made progress too.
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
    // At once, because waiting could not help.
    CHECK_REFUSED(write->status(), Code::kRefused, "is not among the 3 that were named");
    CHECK(other_blocks->outcome() == Outcome::kPending);
  });
}

TEST(callers_mistakes_are_named_and_nothing_is_posted) {
  Pair pair;
  const auto code = [&](auto&& change) {
    TransferRequest request = pair.request(true, kFrom, kTo);
    change(request);
    return pair.src.engine().post(pair.src.now(), std::move(request)).status().code();
  };
  CHECK_EQ(code([](auto& r) { r.src_ids[0] = 16; }), Code::kOutOfRange);
  CHECK_EQ(code([](auto& r) { r.dst_ids[0] = 16; }), Code::kOutOfRange);
  CHECK_EQ(code([](auto& r) { r.dst_ids[1] = r.dst_ids[0]; }), Code::kDuplicateBlock);
  CHECK_EQ(code([](auto& r) { r.dst_ids.pop_back(); }), Code::kLengthMismatch);
  CHECK_EQ(code([](auto& r) { r.num_layers = 5; }), Code::kOutOfRange);
  CHECK_EQ(code([](auto& r) { r.timeout_ns = 0; }), Code::kInvalidArgument);
  CHECK_EQ(code([](auto& r) { r.program = 99; }), Code::kUnknownRegion);
  CHECK_EQ(code([](auto& r) { r.peer = 99; }), Code::kPeerLost);
  pair.check_quiet();
}

}  // namespace
}  // namespace simulation
