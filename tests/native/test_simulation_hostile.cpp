// A peer that knows the secret and breaks all other rules: it may lose its own session, and no other peer
// loses anything.
#include <functional>

#include "mallory.h"
#include "wire_samples.h"

namespace simulation {
namespace {

// What else a program can be wrong in: test_footprint.cpp.
TEST(programs_that_leave_their_blocks_are_refused) {
  using Change = void (*)(CopyProgram&);
  constexpr Change kChanges[] = {
      [](CopyProgram& p) { p.loops[0].dst_offset += 8; },
      [](CopyProgram& p) { p.loops[0].dst_strides[0] += p.loops[0].nbytes; },
      [](CopyProgram& p) { p.loops[0].counts[0] = p.loops[0].counts[1] = UINT32_MAX; },
      [](CopyProgram& p) { p.loops[0].src_offset = UINT64_MAX - 64; },
      [](CopyProgram& p) { p.loops[0].src_offset += 1 << 20; },
      [](CopyProgram& p) {  // her own scales, beyond what she announced
        Conversion& conversion = p.conversions.emplace_back();
        conversion.src_dtype = conversion.dst_dtype = Dtype::kInt8;
        conversion.src_scales = ScalePlace::kRegion;
        conversion.src_offset = 1 << 24;
        p.loops[0].conversion = 1;
      },
  };
  for (const Change change : kChanges) {
    Pair pair;
    Mallory mallory(pair.world, pair.dst);
    pair.grant(pair.dst, mallory.key(), pair.dst_region, wire::LeaseMode::kWrite, {}, 10 * kSecond, true);
    pair.freeze_destination();
    mallory.layout = pair.dst_layout;
    mallory.tell_program(1, pair.dst_region, true, [&](CopyProgram& program) {
      const CopyLoop hers = program_between(Layout{}, Layout{}).loops[0];
      program.loops[0].src_offset = hers.src_offset;
      program.loops[0].src_layer_stride = hers.src_layer_stride;
      program.loops[0].src_block_stride = hers.src_block_stride;
      change(program);
    });
    mallory.send(wire::Offer{mallory.spec(2, 1, {1, 2}, {3, 4}), 4, 0, 0});
    // A program that no region can have, because it moves bytes more than once, ends her session when it
    // arrives.
    CHECK(mallory.ended || mallory.refused_with() != Code::kOk);
    check_undisturbed(pair);
  }
}

// Only a processor could send or sum them.
TEST(pages_on_a_gpu_are_neither_sent_nor_summed_for_whoever_asks) {
  for (const bool sum : {false, true}) {
    Pair pair;
    const RegionId on_gpu = pair.dst.add_region(pair.dst_layout, MemoryKind::kGpu);
    Mallory mallory(pair.world, pair.dst, two_sided_rail());
    pair.grant(pair.dst, mallory.key(), on_gpu, wire::LeaseMode::kRead, {}, 10 * kSecond, true);
    mallory.layout = pair.dst_layout;
    // Her region is in host memory; then one that claims not to be.
    const auto ask = [&](TransferId transfer, std::uint32_t program, RegionId into, bool integrity) {
      mallory.send(wire::Program{program, on_gpu, into, program_between(mallory.layout, mallory.layout)});
      auto spec = mallory.spec(transfer, program, {1, 2}, {3, 4});
      if (integrity) spec.flags = wire::kFlagIntegrity;
      mallory.send(wire::Request{std::move(spec)});
    };
    ask(2, 1, mallory.region(), false);
    CHECK_EQ(mallory.refused_with(), Code::kUnsupported);
    wire::Region liar;
    liar.id = 77;
    liar.name = "on a GPU, she says";
    liar.spans = {{0, mallory.memory().bytes.size()}};
    liar.num_blocks = mallory.layout.num_blocks;
    liar.keys = {{"kernels", {}}, {"stream", {}}};
    mallory.send(liar);
    mallory.received.clear();
    ask(4, 2, 77, true);
    CHECK_EQ(mallory.refused_with(), Code::kUnsupported);
    CHECK(mallory.last<wire::Accept>() == nullptr);
    ask(6, 3, 77, false);
    CHECK(mallory.last<wire::Accept>() != nullptr);
    mallory.send(wire::Credit{6, static_cast<std::uint16_t>(sum ? wire::kNoRail : 0), 0, 1});
    CHECK(mallory.ended);
    CHECK(mallory.last<wire::Checksums>() == nullptr);
    check_undisturbed(pair);
  }
}

TEST(a_program_that_was_good_for_an_offer_is_not_therefore_good_for_a_request) {
  Pair pair;
  Mallory mallory(pair.world, pair.dst);
  REQUIRE_EQ(mallory.region(), pair.dst_region);  // one number for two regions
  const Memory before(pair.destination());
  pair.grant(pair.dst, mallory.key(), pair.dst_region, wire::LeaseMode::kRead, {1, 2}, 10 * kSecond, true);
  pair.grant(pair.dst, mallory.key(), pair.dst_region, wire::LeaseMode::kWrite, {9}, 10 * kSecond, true);
  for (const bool offer_first : {true, false}) {
    mallory.layout = pair.dst_layout;
    mallory.tell_program(1, pair.dst_region, true, [&](CopyProgram& program) {
      CopyLoop& loop = program.loops[0];
      (offer_first ? loop.src_offset : loop.dst_offset) =
          0;  // within her region, and outside of the blocks in ours
      (offer_first ? loop.src_layer_stride : loop.dst_layer_stride) = 8;
      (offer_first ? loop.src_block_stride : loop.dst_block_stride) = 8;
    });
    const TransferId id = offer_first ? 2 : 10;
    mallory.received.clear();
    for (const bool offer : {offer_first, !offer_first})
      if (offer)
        mallory.send(wire::Offer{mallory.spec(id, 1, {1}, {2}), 4, 0, 0});
      else
        mallory.send(wire::Request{mallory.spec(id + 2, 1, {1}, {2})});
    if (offer_first) CHECK(mallory.last<wire::Accept>() == nullptr);
    CHECK_EQ(mallory.refused_with(), Code::kLayoutMismatch);
  }
  CHECK(!mallory.ended);
  CHECK(pair.destination().bytes == before.bytes);
  check_undisturbed(pair);
}

TEST(transfers_that_do_not_fit_are_refused) {
  Pair pair;
  Mallory mallory(pair.world, pair.dst);
  pair.grant(pair.dst, mallory.key(), pair.dst_region, wire::LeaseMode::kWrite, {3, 4}, 10 * kSecond, true);
  pair.freeze_destination();
  mallory.layout = pair.dst_layout;
  mallory.tell_program(1, pair.dst_region, true, [](CopyProgram& program) {
    const CopyLoop hers = program_between(Layout{}, Layout{}).loops[0];
    program.loops[0].src_layer_stride = hers.src_layer_stride;
    program.loops[0].src_block_stride = hers.src_block_stride;
  });
  TransferId id = 0;
  const auto code = [&](auto&& change) {
    wire::Offer offer{mallory.spec(id += 2, 1, {1, 2}, {3, 4}), 4, 0, 0};
    change(offer);
    mallory.send(offer);
    CHECK(mallory.last<wire::Fail>() != nullptr && mallory.last<wire::Fail>()->transfer == id);
    return mallory.refused_with();
  };
  CHECK_EQ(code([](wire::Offer& o) { o.spec.dst_ids[0] = 16; }), Code::kOutOfRange);
  CHECK_EQ(code([](wire::Offer& o) { o.spec.dst_ids[0] = UINT32_MAX; }), Code::kOutOfRange);
  CHECK_EQ(code([](wire::Offer& o) { o.spec.src_ids[0] = 16; }), Code::kOutOfRange);
  CHECK_EQ(code([](wire::Offer& o) { o.spec.dst_ids[0] = 4; }), Code::kDuplicateBlock);
  CHECK_EQ(code([](wire::Offer& o) { o.spec.dst_ids[0] = 5; }), Code::kNotPermitted);
  CHECK_EQ(code([](wire::Offer& o) { o.spec.grid.first_layer = 1; }), Code::kOutOfRange);
  CHECK_EQ(code([](wire::Offer& o) { o.spec.grid.num_layers = 5; }), Code::kOutOfRange);
  CHECK_EQ(code([](wire::Offer& o) { o.spec.program = 9; }), Code::kInvalidArgument);
  CHECK(!mallory.ended);
  mallory.send(wire::Request{mallory.spec(100, 1, {1}, {1})});
  CHECK(mallory.refused_with() != Code::kOk);
  check_undisturbed(pair);
}

// Her region and the victim's: blocks of four tokens in two units.
struct Units {
  Units() : mallory(pair.world, pair.dst) {
    pair.grant(pair.dst, mallory.key(), pair.dst_region, wire::LeaseMode::kWrite, {3, 4}, 10 * kSecond, true);
    pair.freeze_destination();
    hers.block_tokens = 2;
    theirs = pair.dst_layout;
    theirs.block_tokens = 4;
  }
  void tell(std::uint32_t program_id, const std::function<void(CopyProgram&)>& change = [](CopyProgram&) {}) {
    mallory.tell_program(program_id, pair.dst_region, true, [&](CopyProgram& program) {
      program = program_between(hers, theirs, true);
      change(program);
    });
  }
  // Sends an OFFER; returns the code of the refusal, or kOk. The last `num_fine` ids are tokens.
  Code offer(std::uint32_t program, Blocks from, Blocks to, std::uint32_t num_fine) {
    wire::Offer offer{mallory.spec(id += 2, program, std::move(from), std::move(to)), 0, 0, 0};
    offer.spec.grid.num_fine = num_fine;
    mallory.received.clear();
    mallory.send(offer);
    const auto* fail = mallory.last<wire::Fail>();
    CHECK(fail == nullptr || fail->transfer == id);
    return mallory.refused_with();
  }
  Pair pair;
  Mallory mallory;
  Layout hers, theirs;
  TransferId id = 0;
};

TEST(units_and_tokens_that_do_not_fit_are_refused) {
  Units units;
  units.hers.chunk_nbytes = units.theirs.chunk_nbytes / 2;  // tokens of one size
  units.tell(1);
  units.tell(2, [](CopyProgram& program) {  // whole units only
    program.units[kFine] = {0, 0};
    program.loops.resize(1);
  });
  // Block 3 is units 6 and 7, tokens 12 to 15; block 4 units 8 and 9, tokens 16 to 19.
  CHECK_EQ(units.offer(1, {0, 1, 4}, {6, 7, 16}, 1), Code::kOk);
  CHECK_EQ(units.offer(2, {0, 1, 4}, {6, 7, 16}, 1), Code::kInvalidArgument);
  CHECK_EQ(units.offer(2, {0}, {6}, 0), Code::kOk);
  CHECK_EQ(units.offer(1, {0, 4}, {7, 14}, 1), Code::kDuplicateBlock);
  CHECK_EQ(units.offer(1, {0}, {64}, 1), Code::kOutOfRange);  // of 16 blocks
  CHECK_EQ(units.offer(1, {32}, {12}, 1), Code::kOutOfRange);
  // She may write units and tokens of leased blocks only.
  CHECK_EQ(units.offer(1, {0}, {5}, 0), Code::kNotPermitted);
  CHECK_EQ(units.offer(1, {0}, {10}, 0), Code::kNotPermitted);
  CHECK_EQ(units.offer(1, {0}, {11}, 1), Code::kNotPermitted);
  CHECK_EQ(units.offer(1, {0}, {20}, 1), Code::kNotPermitted);
  CHECK(!units.mallory.ended);
  units.offer(1, {0, 1}, {6, 7}, 3);  // more tokens than pairs
  units.pair.world.run_for(100 * kMillisecond);
  CHECK(units.mallory.ended);
  check_undisturbed(units.pair);
}

TEST(breaking_the_order_of_transfers_ends_her_session_alone) {
  using Break = void (*)(Mallory&, Pair&);
  constexpr Break kBreaks[] = {
      [](Mallory& m, Pair&) {
        m.send(wire::Offer{m.spec(3, 1, {1}, {3}), 4, 0, 0});
      },  // not one of her numbers
      [](Mallory& m, Pair&) { m.send(wire::Request{m.spec(3, 2, {1}, {3})}); },
      [](Mallory& m, Pair&) {  // one number for two transfers
        wire::Offer offer{m.spec(2, 1, {1}, {3}), 0, 0, 0};
        m.send(offer);
        m.send(offer);
      },
      [](Mallory& m, Pair&) {
        m.send(wire::Offer{m.spec(2, 1, {1}, {3}), 0, 0, 0});
        m.send(wire::Request{m.spec(2, 2, {1}, {3})});
      },
      [](Mallory& m, Pair&) {  // pieces that do not exist
        m.send(wire::Request{m.spec(2, 2, {1}, {3})});
        m.send(wire::Credit{2, 0, 4, 1});
      },
      [](Mallory& m, Pair&) {
        m.send(wire::Request{m.spec(2, 2, {1}, {3})});
        m.send(wire::Credit{2, 0, 3, 2});
      },
      [](Mallory& m, Pair&) {  // the same message again and again, for a rail that never comes
        m.send(wire::Request{m.spec(2, 2, {1}, {3})});
        for (int i = 0; i < 100 && !m.ended; ++i) m.send(wire::Credit{2, 7, 0, 4});
      },
      [](Mallory& m, Pair&) {  // checksums without end
        wire::Request request{m.spec(2, 2, {1}, {3})};
        request.spec.flags = wire::kFlagIntegrity;
        m.send(request);
        for (int i = 0; i < 100 && !m.ended; ++i) m.send(wire::Credit{2, wire::kNoRail, 0, 4});
      },
      [](Mallory& m, Pair&) {
        m.tell_program(3, 1, true, [](CopyProgram& p) { p.loops[0].num_layers = 99; });
      },
      [](Mallory& m, Pair&) { m.tell_program(3, 1, true, [](CopyProgram& p) { p.loops[0].counts[1] = 0; }); },
      [](Mallory& m, Pair&) {  // regions without end
        for (RegionId id = 100; id < 5000 && !m.ended; ++id) {
          wire::Region region;
          region.id = id;
          m.send(region);
        }
      },
  };
  for (const auto& rails : rail_sets())
    for (const Break breaks : kBreaks) {
      Pair pair(rails);
      Mallory mallory(pair.world, pair.dst);
      pair.grant(pair.dst, mallory.key(), pair.dst_region, wire::LeaseMode::kRead, {}, 10 * kSecond, true);
      pair.grant(pair.dst, mallory.key(), pair.dst_region, wire::LeaseMode::kWrite, {3}, 10 * kSecond, true);
      mallory.layout = pair.dst_layout;
      const SessionKey key = mallory.key();
      const auto as_hers = [](std::uint64_t& layer, std::uint64_t& block) {
        layer = Layout{}.layer_stride();
        block = Layout{}.block_stride();
      };
      mallory.tell_program(1, pair.dst_region, true, [&](CopyProgram& p) {
        as_hers(p.loops[0].src_layer_stride, p.loops[0].src_block_stride);
      });
      mallory.tell_program(2, pair.dst_region, false, [&](CopyProgram& p) {
        as_hers(p.loops[0].dst_layer_stride, p.loops[0].dst_block_stride);
      });
      pair.freeze_destination();
      breaks(mallory, pair);
      pair.world.run_for(100 * kMillisecond);
      CHECK(mallory.ended);
      CHECK(mallory.key() == 0);
      CHECK(pair.dst.engine().peer(key)->reason.code() == Code::kProtocol);
      check_undisturbed(pair);
    }
}

// A request of the victim's, to write to her or to read from her.
TransferRequest request_of(Pair& pair, const Mallory& mallory, bool write, Blocks from, Blocks to) {
  Node& victim = write ? pair.src : pair.dst;
  const auto program = victim.engine().install_program(
      victim.now(), mallory.key(), write, write ? pair.src_region : mallory.region(),
      write ? mallory.region() : pair.dst_region,
      program_between(write ? pair.src_layout : mallory.layout, write ? mallory.layout : pair.dst_layout));
  REQUIRE_OK(program);
  TransferRequest request = pair.request(write, std::move(from), std::move(to));
  request.peer = mallory.key();
  request.program = program.value();
  return request;
}

struct Reading {
  explicit Reading(RailPlan rail = one_sided_rail(), bool held = false)
      : mallory(pair.world, pair.dst, std::move(rail)) {
    TransferRequest request = request_of(pair, mallory, false, {1, 2}, {3, 4});
    program = request.program;
    request.timeout_ns = kSecond;
    if (held) request.layers_ready = 0;
    handle = Pair::post(pair.dst, request);
    pair.world.run_for(kMillisecond);
    REQUIRE(mallory.last<wire::Request>() != nullptr);
    id = mallory.last<wire::Request>()->spec.transfer;
  }
  Pair pair;
  Mallory mallory;
  std::uint32_t program = 0;
  std::shared_ptr<Handle> handle;
  TransferId id = 0;
};

TEST(accept_twice_and_done_and_layers_backwards_change_nothing) {
  Reading reading;
  Mallory& mallory = reading.mallory;
  reading.pair.dst.work_ns = 20 * kMillisecond;
  mallory.send(wire::Done{reading.id});
  mallory.send(wire::LayersReady{reading.id, 0});
  mallory.send(wire::LayersReady{reading.id, 4096});
  mallory.send(wire::Checksums{reading.id, 1000, {1, 2, 3}});
  CHECK_EQ(reading.handle->outcome(), Outcome::kPending);
  mallory.send(wire::Accept{reading.id, 5, 0, kSecond, true});
  mallory.send(wire::Accept{reading.id, 6, 7, 0, false});
  mallory.send(wire::Accept{99, 6, 7, 0, false});
  REQUIRE(reading.pair.ends(reading.handle));
  CHECK_EQ(reading.handle->outcome(), Outcome::kDone);
  CHECK(!mallory.ended);
  check_undisturbed(reading.pair);
}

TEST(a_read_that_is_held_back_is_not_the_peers_to_release) {
  for (const bool one_sided : {true, false}) {
    Reading reading(one_sided ? one_sided_rail() : two_sided_rail(), true);
    reading.mallory.send(wire::LayersReady{reading.id, 4});
    reading.mallory.send(wire::Accept{reading.id, 5, 0, 10 * kSecond, true});
    reading.mallory.send(wire::LayersReady{reading.id, 4});
    REQUIRE(reading.pair.ends(reading.handle));
    CHECK_EQ(reading.handle->status().code(), Code::kDeadline);
    CHECK_EQ(reading.pair.bytes_landed, 0);
    CHECK(!reading.mallory.ended);
    check_undisturbed(reading.pair);
  }
}

TEST(durations_of_a_peer_do_not_overflow_ours) {
  for (const std::uint64_t ttl : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{INT64_MAX}})
    for (const bool renewable : {false, true}) {
      Reading reading;
      reading.mallory.send(wire::Accept{reading.id, 5, 0, ttl, renewable});
      REQUIRE(reading.pair.ends(reading.handle));
      CHECK_EQ(reading.handle->outcome(), ttl > 1 ? Outcome::kDone : Outcome::kFailed);
      wire::Request request{reading.mallory.spec(2, 9, {1}, {1})};
      request.spec.timeout_ns = INT64_MAX;
      reading.mallory.send(request);
      check_undisturbed(reading.pair);
    }
}

TEST(done_before_the_last_piece_was_sent_stops_the_sending) {
  Pair pair({two_sided_rail()});
  Mallory mallory(pair.world, pair.src);
  pair.src.work_ns = 100 * kMillisecond;
  auto handle = Pair::post(pair.src, request_of(pair, mallory, true, kFrom, kTo));
  pair.world.run_for(kMillisecond);
  REQUIRE(mallory.last<wire::Offer>() != nullptr);
  const TransferId id = mallory.last<wire::Offer>()->spec.transfer;
  mallory.send(wire::Credit{id, 0, 0, 32});
  pair.world.run_for(20 * kMillisecond);
  CHECK(pair.src.num_works() > 0);
  mallory.send(wire::Done{id});
  REQUIRE(pair.ends(handle));
  CHECK_EQ(handle->outcome(), Outcome::kDone);
  pair.reuse_source(kFrom);  // from now on, a send that goes on is a failure
  CHECK_OK(pair.src.deregister(pair.src_region));
  pair.check_quiet();
}

TEST(pieces_are_not_asked_for_over_a_rail_that_sends_nothing) {
  Pair pair({one_sided_rail()});
  Mallory mallory(pair.world, pair.src, one_sided_rail());
  const SessionKey key = mallory.key();
  Pair::post(pair.src, request_of(pair, mallory, true, {1}, {2}));
  pair.world.run_for(kMillisecond);
  REQUIRE(mallory.last<wire::Offer>() != nullptr);
  mallory.send(wire::Credit{mallory.last<wire::Offer>()->spec.transfer, 0, 0, 1});
  CHECK(mallory.ended);
  CHECK(pair.src.engine().peer(key)->reason.code() == Code::kProtocol);
  check_undisturbed(pair);
}

TEST(layers_that_are_not_ready_are_not_sent_to_who_asks_for_them) {
  Pair pair({two_sided_rail()});
  Mallory mallory(pair.world, pair.src);
  TransferRequest request = request_of(pair, mallory, true, {1}, {2});
  request.layers_ready = 2;
  auto handle = Pair::post(pair.src, request);
  pair.world.run_for(kMillisecond);
  REQUIRE(mallory.last<wire::Offer>() != nullptr);
  mallory.send(wire::Credit{mallory.last<wire::Offer>()->spec.transfer, 0, 1, 2});
  CHECK_EQ(handle->status().code(), Code::kProtocol);
  CHECK_EQ(pair.src.engine().stats().pieces_sent, 0);
  CHECK(mallory.key() == 0);
  check_undisturbed(pair);
}

TEST(random_messages_disturb_nobody_else) {
  for (std::uint64_t round = 0; round < 60; ++round) {
    Pair pair(rail_sets()[round % rail_sets().size()], check::seed() * 1000 + round);
    Mallory mallory(pair.world, pair.dst, round % 2 == 0 ? one_sided_rail() : two_sided_rail());
    const SessionKey key = mallory.key();
    pair.grant(pair.dst, key, pair.dst_region, wire::LeaseMode::kRead, {}, 10 * kSecond, true);
    pair.grant(pair.dst, key, pair.dst_region, wire::LeaseMode::kWrite, {3, 4}, 10 * kSecond, true);
    Memory before(pair.destination());
    wire_samples::Sampler sampler(pair.world.random(), 20);
    // Any message except those of the handshake and of rails, with small numbers in places.
    for (int i = 0; i < 300 && !mallory.ended; ++i) {
      wire::Message message = sampler.message(5 + pair.world.random().below(wire_samples::kNumKinds - 5));
      const auto type = wire::type_of(message);
      if (type == wire::FrameType::kGoodbye || type == wire::FrameType::kHeartbeat ||
          type == wire::FrameType::kHeartbeatAck || type == wire::FrameType::kMessagesTaken)
        continue;
      const auto small = [&](std::uint64_t below) {
        return static_cast<std::uint32_t>(pair.world.random().below(below));
      };
      const auto tame = [&](wire::TransferSpec& spec) {
        spec.transfer = small(8);
        spec.program = small(3);
        for (auto* blocks : {&spec.src_ids, &spec.dst_ids})
          for (std::uint32_t& block : *blocks) block = small(17);
        spec.grid.first_layer = 0;
        spec.grid.num_layers = 1 + small(4);
      };
      std::visit(
          [&](auto& body) {
            if constexpr (requires { body.spec; }) tame(body.spec);
            if constexpr (requires { body.layers_ready; }) body.layers_ready = small(3);
            if constexpr (requires { body.transfer; }) body.transfer = small(8);
            if constexpr (requires {
                            body.program;
                            body.src_region;
                          }) {
              body.id = small(3);
              body.src_region = small(3);
              body.dst_region = small(3);
              Layout hers = pair.dst_layout, theirs = pair.dst_layout;
              hers.block_tokens = 1 + small(2);
              theirs.block_tokens = hers.block_tokens * (1 + small(2));
              hers.chunk_nbytes = theirs.chunk_nbytes / theirs.block_tokens * hers.block_tokens;
              body.program = program_between(hers, theirs, small(2) != 0);
            }
          },
          message);
      if (auto* offer = std::get_if<wire::Offer>(&message))
        offer->layers_ready = std::min(offer->layers_ready, offer->spec.grid.num_layers);
      mallory.send(message);
    }
    pair.world.run_for(100 * kMillisecond);
    Memory after(pair.destination());
    for (Memory* memory : {&before, &after})
      for (const std::uint32_t block : {3u, 4u}) memory->fill(block, 0);
    CHECK(before.bytes == after.bytes);
    check_undisturbed(pair);
    if (check::state().num_failures != 0) return;
  }
}

}  // namespace
}  // namespace simulation
