// Several writers fill one receiver's expectation: each some heads and some tokens, from pages of other sizes
// than the receiver's. It is done when all parts have arrived, and not before.
#include <functional>

#include "simulated_pair.h"

namespace simulation {
namespace {

constexpr std::uint32_t kHeads = 4, kTokens = 8;  // of the receiver: heads, and tokens of a block

Layout layout_of(std::uint32_t block_tokens, std::uint32_t first_head, std::uint32_t num_heads) {
  return {.num_layers = 3,
          .num_blocks = 24,
          .chunk_nbytes = block_tokens * num_heads * 4,
          .gap_nbytes = 16,
          .block_tokens = block_tokens,
          .num_heads = num_heads,
          .first_head = first_head};
}

bool each_once(const Blocks& blocks) {
  return std::set<std::uint32_t>(blocks.begin(), blocks.end()).size() == blocks.size();
}

// Two prefills, each with half of the heads, in pages of half and of twice the size of the decode's.
struct Writers {
  struct Writer {
    Node* node;
    Layout layout;
    RegionId region;
    SessionKey to_dst;
    Blocks blocks;  // of the sequence, from token 0 on
  };

  explicit Writers(const std::vector<RailPlan>& rails, std::uint64_t seed = check::seed())
      : world(seed), dst(world.add("decode")) {
    layout.block_major = true;
    region = dst.add_region(layout);
    add("lower", layout_of(kTokens / 2, 0, kHeads / 2), {7, 1, 12, 3, 20, 5, 9, 11}, rails);
    add("upper", layout_of(kTokens * 2, kHeads / 2, kHeads / 2), {4, 0}, rails);
  }
  void add(const std::string& name, const Layout& of, Blocks table, const std::vector<RailPlan>& rails) {
    Node& node = world.add(name);
    const RegionId id = node.add_region(of);
    for (std::uint32_t block = 0; block < of.num_blocks; ++block)
      node.memory(id).fill(block, 1000 * world.nodes().size() + block);
    world.connect(node, dst, rails);
    writers.push_back({&node, of, id, node.session_with("decode"), std::move(table)});
  }

  Memory& destination() { return dst.memory(region); }
  CopyProgram program(const Writer& writer) const { return program_between(writer.layout, layout, true); }
  // Copies some tokens of the sequence.
  TransferRequest request(const Writer& writer, std::uint32_t first, std::uint32_t last) const {
    const Ids ids = ids_between(writer.layout, layout, writer.blocks, blocks, first, last);
    TransferRequest out;
    out.peer = writer.to_dst;
    out.src_ids = ids.src;
    out.dst_ids = ids.dst;
    out.num_fine = ids.num_fine;
    out.num_layers = out.layers_ready = layout.num_layers;
    out.notify = Pair::bytes("req");
    out.timeout_ns = 5 * kSecond;
    return out;
  }
  std::shared_ptr<Handle> post(const Writer& writer, TransferRequest what, const CopyProgram& by) const {
    auto installed = writer.node->engine().install_program(writer.node->now(), writer.to_dst, true,
                                                           writer.region, region, by);
    REQUIRE_OK(installed);
    what.program = installed.value();
    return Pair::post(*writer.node, std::move(what));
  }
  std::shared_ptr<Handle> write(std::size_t index, std::uint32_t first = 0,
                                std::uint32_t last = kNumTokens) const {
    return post(writers[index], request(writers[index], first, last), program(writers[index]));
  }
  std::shared_ptr<Handle> expect(std::uint32_t first = 0, std::uint32_t last = kNumTokens,
                                 Time timeout = 5 * kSecond) {
    auto handle = dst.engine().expect(dst.now(), Pair::bytes("req"), region, blocks, 0, layout.num_layers,
                                      {kTokens, first, last, kHeads}, {}, timeout);
    REQUIRE_OK(handle);
    dst.settle();
    for (std::uint32_t layer = 0; layer < layout.num_layers; ++layer)
      CHECK(!handle.value()->watch_layer(layer));
    return handle.value();
  }
  bool ends(const std::shared_ptr<Handle>& handle) {
    return world.until([&] { return handle->outcome() != Outcome::kPending; }, 12 * kSecond);
  }
  bool token_arrived(std::size_t index, std::uint32_t layer, std::uint32_t token) {
    const Writer& writer = writers[index];
    for (std::uint32_t head = writer.layout.first_head;
         head < writer.layout.first_head + writer.layout.num_heads; ++head)
      if (destination().read(layer, blocks, token, head) !=
          writer.node->memory(writer.region).read(layer, writer.blocks, token, head))
        return false;
    return true;
  }
  bool arrived(std::size_t index, std::uint32_t first = 0, std::uint32_t last = kNumTokens) {
    for (std::uint32_t layer = 0; layer < layout.num_layers; ++layer)
      for (std::uint32_t token = first; token < last; ++token)
        if (!token_arrived(index, layer, token)) return false;
    return true;
  }
  // Whether the bytes of tokens outside of the range are still zeros.
  bool untouched_outside(std::uint32_t first, std::uint32_t last) {
    for (std::uint32_t layer = 0; layer < layout.num_layers; ++layer)
      for (std::uint32_t token = 0; token < kNumTokens; ++token)
        for (std::uint32_t head = 0; head < kHeads; ++head)
          if ((token < first || token >= last) && destination().read(layer, blocks, token, head) !=
                                                      std::vector<std::byte>(2 * layout.head_nbytes()))
            return false;
    return true;
  }
  void check_quiet() {
    world.run_for(10 * kSecond);
    for (auto& node : world.nodes())
      if (node->alive()) Pair::check_nothing_left(*node);
  }

  static constexpr std::uint32_t kNumTokens = 32;
  World world;
  Node& dst;
  Layout layout = layout_of(kTokens, 0, kHeads);
  RegionId region = 0;
  Blocks blocks = {6, 2, 15, 9};
  std::vector<Writer> writers;
};

void on_every_rail(const std::function<void(Writers&, bool upper_first)>& scenario) {
  for (const auto& rails : rail_sets())
    for (const bool upper_first : {false, true})
      for (std::uint64_t i = 0; i < 3; ++i) {
        Writers writers(rails, check::seed() * 1000 + i);
        scenario(writers, upper_first);
        writers.check_quiet();
      }
}

TEST(two_writers_of_half_the_heads_complete_an_expectation_only_together) {
  on_every_rail([](Writers& all, bool upper_first) {
    auto expected = all.expect();
    auto first = all.write(upper_first);
    REQUIRE(all.ends(first));
    CHECK_EQ(first->outcome(), Outcome::kDone);
    all.world.run_for(100 * kMillisecond);
    CHECK_EQ(expected->outcome(), Outcome::kPending);
    for (std::uint32_t layer = 0; layer < 3; ++layer) CHECK(!expected->layer_arrived(layer));
    CHECK(all.arrived(upper_first));
    auto second = all.write(!upper_first);
    REQUIRE(all.ends(second));
    CHECK_EQ(second->outcome(), Outcome::kDone);
    CHECK_EQ(expected->outcome(), Outcome::kDone);
    for (std::uint32_t layer = 0; layer < 3; ++layer) CHECK(expected->layer_arrived(layer));
    CHECK(all.arrived(0) && all.arrived(1));
  });
}

TEST(a_layer_is_in_when_all_of_its_heads_are) {
  on_every_rail([](Writers& all, bool upper_first) {
    auto expected = all.expect();
    std::shared_ptr<Handle> handles[2];
    for (std::size_t index : {0, 1}) {
      TransferRequest request = all.request(all.writers[index], 0, Writers::kNumTokens);
      request.layers_ready = index == upper_first ? 3 : 0;
      handles[index] = all.post(all.writers[index], request, all.program(all.writers[index]));
    }
    REQUIRE(all.ends(handles[upper_first]));
    auto& late = all.writers[!upper_first];
    for (std::uint32_t ready = 0; ready < 3; ++ready) {
      all.world.run_for(20 * kMillisecond);
      for (std::uint32_t layer = 0; layer < 3; ++layer)
        CHECK_EQ(expected->layer_arrived(layer), layer < ready);
      late.node->engine().layers_ready(late.node->now(), handles[!upper_first]->id(), ready + 1);
      late.node->settle();
    }
    REQUIRE(all.ends(expected));
    CHECK_EQ(expected->outcome(), Outcome::kDone);
    std::size_t num_events = 0;
    for (const Event& event : all.dst.events) num_events += event.kind == EventKind::kLayer;
    CHECK_EQ(num_events, 3);
  });
}

TEST(one_writer_that_fails_fails_what_is_expected_and_names_the_blocks) {
  on_every_rail([](Writers& all, bool upper_first) {
    auto expected = all.expect();
    TransferRequest request =
        all.request(all.writers[upper_first], 0, 2 * kTokens);  // two of the four blocks
    request.layers_ready = 2;
    auto upper = all.post(all.writers[upper_first], request, all.program(all.writers[upper_first]));
    auto other = all.write(!upper_first);
    REQUIRE(all.ends(other));
    CHECK_EQ(other->outcome(), Outcome::kDone);
    all.world.run_for(50 * kMillisecond);
    all.writers[upper_first].node->cancel(upper);
    REQUIRE(all.ends(expected));
    // It hears of the cancel, or first finds that the writer's right has ended.
    const bool hears = expected->status().code() == Code::kCancelled;
    CHECK_EQ(expected->outcome(), hears ? Outcome::kCancelled : Outcome::kFailed);
    CHECK_EQ(expected->failed_blocks(), all.blocks);  // half of the heads of the others never came
    REQUIRE(all.ends(upper));
    CHECK(each_once(upper->failed_blocks()));
    for (std::uint32_t layer = 0; layer < 3; ++layer) CHECK(!expected->layer_arrived(layer));
  });
}

TEST(blocks_that_were_brought_in_full_are_not_among_those_that_failed) {
  on_every_rail([](Writers& all, bool upper_first) {
    auto expected = all.expect();
    // All heads of tokens 0 to 19, and half of the heads of later tokens: block 2 is half full.
    for (const std::size_t index : {upper_first, !upper_first}) {
      auto handle = all.write(index, 0, index == 0 ? 20 : Writers::kNumTokens);
      REQUIRE(all.ends(handle));
      CHECK_EQ(handle->outcome(), Outcome::kDone);
    }
    CHECK_EQ(expected->outcome(), Outcome::kPending);
    all.dst.cancel(expected);
    REQUIRE(all.ends(expected));
    CHECK_EQ(expected->failed_blocks(), Blocks({all.blocks[2], all.blocks[3]}));
  });
}

TEST(a_writer_that_dies_fails_what_is_expected) {
  for (const bool heard : {false, true})
    on_every_rail([&](Writers& all, bool upper_first) {
      auto expected = all.expect();
      auto other = all.write(!upper_first);
      REQUIRE(all.ends(other));
      TransferRequest request = all.request(all.writers[upper_first], 0, Writers::kNumTokens);
      request.layers_ready = 1;
      auto dying = all.post(all.writers[upper_first], request, all.program(all.writers[upper_first]));
      all.world.run_for(20 * kMillisecond);
      all.writers[upper_first].node->crash(heard);
      REQUIRE(all.world.until([&] { return expected->outcome() != Outcome::kPending; }, 4 * kSecond));
      CHECK_EQ(expected->outcome(), Outcome::kFailed);
      CHECK_EQ(expected->failed_blocks(), all.blocks);
      CHECK_EQ(other->outcome(), Outcome::kDone);
    });
}

TEST(a_range_in_parts_is_done_with_its_last_token) {
  on_every_rail([](Writers& all, bool upper_first) {
    auto expected = all.expect(5, 27);
    const std::uint32_t cuts[] = {5, 6, 13, 16, 26, 27};
    std::vector<std::pair<std::uint32_t, std::uint32_t>> parts;
    for (std::size_t i = 0; i + 1 < std::size(cuts); ++i) parts.push_back({cuts[i], cuts[i + 1]});
    if (upper_first) std::reverse(parts.begin(), parts.end());
    std::size_t num_left = 2 * parts.size();
    for (const std::size_t index : {0, 1})
      for (const auto& [first, last] : parts) {
        CHECK_EQ(expected->outcome(), Outcome::kPending);
        auto handle = all.write(index, first, last);
        REQUIRE(all.ends(handle));
        CHECK_OK(handle->status());
        CHECK_EQ(expected->outcome(), --num_left == 0 ? Outcome::kDone : Outcome::kPending);
      }
    CHECK(all.arrived(0, 5, 27) && all.arrived(1, 5, 27));
    CHECK(all.untouched_outside(5, 27));
  });
}

TEST(more_than_was_asked_for_may_come_and_is_not_waited_for) {
  on_every_rail([](Writers& all, bool upper_first) {
    auto expected = all.expect(9, 12);  // of the second block only
    auto first = all.write(upper_first, 9, 12);
    auto second = all.write(!upper_first, 8, 16);
    for (auto& handle : {first, second, expected}) {
      REQUIRE(all.ends(handle));
      CHECK_OK(handle->status());
    }
  });
}

TEST(a_failed_transfer_names_each_block_once_however_many_units_it_has) {
  on_every_rail([](Writers& all, bool upper_first) {
    auto expected = all.expect(3, 30);
    TransferRequest request = all.request(all.writers[upper_first], 3, 30);
    request.layers_ready = 1;
    CHECK(request.num_fine != 0);
    auto handle = all.post(all.writers[upper_first], request, all.program(all.writers[upper_first]));
    all.world.run_for(20 * kMillisecond);
    all.dst.cancel(expected);
    REQUIRE(all.ends(handle));
    REQUIRE(all.ends(expected));
    CHECK(each_once(handle->failed_blocks()));
    Blocks failed = handle->failed_blocks(), blocks = all.writers[upper_first].blocks;
    std::sort(failed.begin(), failed.end());
    std::sort(blocks.begin(), blocks.end());
    CHECK_EQ(failed, blocks);
    CHECK_EQ(expected->failed_blocks(), all.blocks);
  });
}

TEST(leases_are_of_blocks_whatever_part_of_them_is_written) {
  on_every_rail([](Writers& all, bool upper_first) {
    const Writers::Writer& from = all.writers[upper_first];
    const SessionKey key = all.dst.session_with(from.node->name());
    Blocks leased(all.blocks.begin(), all.blocks.end() - 1);
    Pair::grant(all.dst, key, all.region, wire::LeaseMode::kWrite, leased, 20 * kSecond, true);
    TransferRequest request = all.request(from, 2, 3 * kTokens);
    request.notify.clear();
    auto inside = all.post(from, request, all.program(from));
    REQUIRE(all.ends(inside));
    CHECK_OK(inside->status());
    CHECK(all.arrived(upper_first, 2, 3 * kTokens));
    request = all.request(from, 2, 3 * kTokens + 1);  // one token of the fourth block
    request.notify.clear();
    auto beyond = all.post(from, request, all.program(from));
    REQUIRE(all.ends(beyond));
    CHECK_EQ(beyond->status().code(), Code::kNotPermitted);
    CHECK(all.untouched_outside(2, 3 * kTokens));
  });
}

// ---- writers that do not fit ------------------------------------------------------------------

TEST(a_writer_of_another_layout_is_refused_and_the_others_go_on) {
  using Change = void (*)(CopyProgram&);
  constexpr Change kChanges[] = {
      [](CopyProgram& program) { program.dst_heads.total = 2 * kHeads; },
      [](CopyProgram& program) { program.dst_heads = {0, 2, 2}; },
      // Three units of one token each instead of two of four: within the block, but not its units.
      [](CopyProgram& program) {
        program.units[kCoarse].dst = 3;
        program.units[kFine] = {0, 0};
        program.loops.resize(1);
        program.loops[0].counts[1] = 1;
        program.loops[0].src_unit_stride = program.loops[0].dst_unit_stride = 16;
      },
  };
  for (const Change change : kChanges)
    for (const bool expected_first : {true, false})
      on_every_rail([&](Writers& all, bool upper_first) {
        std::shared_ptr<Handle> expected;
        if (expected_first) expected = all.expect();
        const Writers::Writer& wrong = all.writers[upper_first];
        CopyProgram program = all.program(wrong);
        change(program);
        TransferRequest request = all.request(wrong, 0, Writers::kNumTokens);
        request.src_ids.resize(1);
        request.dst_ids = {all.blocks[0] * program.units[kCoarse].dst};
        auto refused = all.post(wrong, request, program);
        all.world.run_for(50 * kMillisecond);
        if (!expected_first) expected = all.expect();
        REQUIRE(all.world.until([&] { return refused->outcome() != Outcome::kPending; }, kSecond));
        CHECK_EQ(refused->status().code(), Code::kRefused);
        CHECK(all.untouched_outside(0, 0));
        CHECK_EQ(expected->outcome(), Outcome::kPending);
        auto lower = all.write(0), upper = all.write(1);
        REQUIRE(all.ends(expected));
        CHECK_EQ(expected->outcome(), Outcome::kDone);
        CHECK(all.arrived(0) && all.arrived(1));
      });
}

// If a second writer's source lost its right in the middle, it would spoil what the first has brought.
TEST(what_one_writer_brings_no_other_may) {
  on_every_rail([](Writers& all, bool upper_first) {
    auto expected = all.expect(5, 27);
    auto early = all.write(upper_first, 5, 14);
    if (upper_first) REQUIRE(all.ends(early));  // otherwise it is still on its way
    for (const auto& [first, last] : {std::pair(5u, 14u), std::pair(13u, 20u), std::pair(5u, 6u)}) {
      auto twice = all.write(upper_first, first, last);
      REQUIRE(all.world.until([&] { return twice->outcome() != Outcome::kPending; }, kSecond));
      CHECK_EQ(twice->status().code(), Code::kRefused);
    }
    for (auto& handle : {all.write(!upper_first, 5, 27), all.write(upper_first, 14, 27), early, expected}) {
      REQUIRE(all.ends(handle));
      CHECK_OK(handle->status());
    }
    CHECK(all.arrived(0, 5, 27) && all.arrived(1, 5, 27));
  });
}

TEST(other_layers_of_the_same_blocks_are_anothers_to_bring) {
  on_every_rail([](Writers& all, bool upper_first) {
    auto expected = all.expect();
    auto upper = all.write(1);
    std::vector<std::shared_ptr<Handle>> handles = {expected, upper};
    for (const std::uint32_t layer : {upper_first ? 2u : 0u, 1u, upper_first ? 0u : 2u}) {
      TransferRequest request = all.request(all.writers[0], 0, Writers::kNumTokens);
      request.first_layer = layer;
      request.num_layers = request.layers_ready = 1;
      handles.push_back(all.post(all.writers[0], request, all.program(all.writers[0])));
    }
    for (auto& handle : handles) {
      REQUIRE(all.ends(handle));
      CHECK_OK(handle->status());
    }
    CHECK(all.arrived(0) && all.arrived(1));
  });
}

TEST(callers_mistakes_in_units_and_tokens_are_named_and_nothing_is_posted) {
  Writers all({one_sided_rail()});
  const Writers::Writer& from = all.writers[0];
  const auto installed = from.node->engine().install_program(from.node->now(), from.to_dst, true, from.region,
                                                             all.region, all.program(from));
  const auto whole = from.node->engine().install_program(
      from.node->now(), from.to_dst, true, from.region, all.region, program_between(from.layout, all.layout));
  REQUIRE_OK(installed);
  REQUIRE_OK(whole);
  const auto code = [&](auto&& change) {
    TransferRequest request = all.request(from, 3, 30);
    request.program = installed.value();
    change(request);
    return from.node->engine().post(from.node->now(), std::move(request)).status().code();
  };
  CHECK_EQ(code([](auto& r) { r.num_fine = 1000; }), Code::kInvalidArgument);
  CHECK_EQ(code([&](auto& r) { r.program = whole.value(); }), Code::kInvalidArgument);
  CHECK_EQ(code([](auto& r) { r.dst_ids.back() = 24 * kTokens; }), Code::kOutOfRange);
  CHECK_EQ(code([](auto& r) { r.dst_ids.back() = r.dst_ids[0] * 4 + 3; }), Code::kDuplicateBlock);
  all.check_quiet();
}

}  // namespace
}  // namespace simulation
