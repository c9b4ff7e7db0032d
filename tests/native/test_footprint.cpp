// What protects our memory from a peer's program: checks of its structure, and of the bytes of its blocks.
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "block_programs.h"
#include "check.h"
#include "core/control/wire.h"
#include "core/copy/executor.h"
#include "core/copy/footprint.h"
#include "program_samples.h"

namespace {

using namespace block_programs;
using namespace program_samples;

// ---- programs ----

Conversion conversion_of(Dtype src, Dtype dst) {
  Conversion conversion{};
  conversion.src_dtype = src;
  conversion.dst_dtype = dst;
  return conversion;
}

// Pages of int8 with a scale each at the source become pages of bf16... half as long again.
CopyProgram converted(ScalePlace src, ScalePlace dst) {
  CopyProgram program = whole_blocks();
  Conversion conversion = conversion_of(Dtype::kInt8, Dtype::kE4m3);
  conversion.src_scales = src;
  conversion.dst_scales = dst;
  const auto region = [](std::uint64_t& offset, std::uint64_t& layer, std::uint64_t& block) {
    offset = kNbytes;
    layer = kBlocks * 4;
    block = 4;
  };
  if (src == ScalePlace::kRegion)
    region(conversion.src_offset, conversion.src_layer_stride, conversion.src_block_stride);
  if (dst == ScalePlace::kRegion)
    region(conversion.dst_offset, conversion.dst_layer_stride, conversion.dst_block_stride);
  const auto table = [](std::uint64_t& offset, std::uint64_t& layer, std::uint64_t (&strides)[2]) {
    offset = 1;
    layer = 2;
    strides[1] = 1;
  };
  if (src == ScalePlace::kProgram)
    table(conversion.src_offset, conversion.src_layer_stride, conversion.src_strides);
  if (dst == ScalePlace::kProgram)
    table(conversion.dst_offset, conversion.dst_layer_stride, conversion.dst_strides);
  program.scales.assign(5, 1.0f);  // 1 + layer * 2 + head
  program.conversions = {conversion};
  program.loops[0].conversion = 1;
  return program;
}

struct Broken {
  const char* why;
  std::function<void(CopyProgram&)> change;
  std::string_view words;
};

void check_each_is_refused(const CopyProgram& good, const std::vector<Broken>& broken) {
  REQUIRE_OK(check_program(good));
  for (const Broken& one : broken) {
    CopyProgram program = good;
    one.change(program);
    const Status status = check_program(program);
    if (status.ok()) FAIL(std::string("accepted: ") + one.why);
    CHECK_EQ(status.code(), Code::kInvalidArgument);
    CHECK(says(status, one.words));
  }
}

TEST(units_that_cannot_be_are_refused) {
  check_each_is_refused(
      units_and_tokens(),
      {{"no units at the source", [](CopyProgram& p) { p.units[kCoarse].src = 0; }, "no units"},
       {"no units at the destination", [](CopyProgram& p) { p.units[kCoarse].dst = 0; }, "no units"},
       {"tokens at one side", [](CopyProgram& p) { p.units[kFine].dst = 0; }, "no units"},
       {"no tokens, yet a loop of them", [](CopyProgram& p) { p.units[kFine] = {0, 0}; },
        "units that its blocks do not have"},
       {"another number of tokens at the source", [](CopyProgram& p) { p.units[kFine].src = 32; },
        "different numbers of tokens"},
       {"another number of units at the source", [](CopyProgram& p) { p.units[kCoarse].src = 4; },
        "different numbers of tokens"},
       {"units that do not divide the tokens", [](CopyProgram& p) { p.units[kCoarse] = {3, 3}; },
        "different numbers of tokens"},
       {"huge units", [](CopyProgram& p) { p.units[kCoarse] = {kHuge, kHuge}; },
        "different numbers of tokens"},
       {"a grain that does not exist", [](CopyProgram& p) { p.loops[0].grain = 2; },
        "units that its blocks do not have"}});
}

TEST(heads_that_the_destination_does_not_hold_are_refused) {
  CopyProgram good = whole_blocks();
  good.dst_heads = {2, 2, 4};
  const std::string_view words = "heads that its destination does not hold";
  check_each_is_refused(good, {{"none", [](CopyProgram& p) { p.dst_heads.num = 0; }, words},
                               {"one more", [](CopyProgram& p) { p.dst_heads.num = 3; }, words},
                               {"more than all", [](CopyProgram& p) { p.dst_heads = {0, 5, 4}; }, words},
                               {"far behind", [](CopyProgram& p) { p.dst_heads.first = UINT32_MAX; }, words},
                               {"of none", [](CopyProgram& p) { p.dst_heads = {0, 1, 0}; }, words}});
}

TEST(loops_that_move_nothing_or_too_much_are_refused) {
  check_each_is_refused(
      whole_blocks(),
      {{"no bytes", [](CopyProgram& p) { p.loops[0].nbytes = 0; }, "moves nothing"},
       {"no rows", [](CopyProgram& p) { p.loops[0].counts[0] = 0; }, "moves nothing"},
       {"no layers", [](CopyProgram& p) { p.loops[0].num_layers = 0; }, "moves nothing"},
       {"more bytes than a block has", [](CopyProgram& p) { p.loops[0].nbytes = std::uint64_t{1} << 31; },
        "bytes of a pair"},
       {"more runs than a block has", [](CopyProgram& p) { p.loops[0].counts[0] = UINT32_MAX; },
        "bytes of a pair"},
       {"beyond the last layer", [](CopyProgram& p) { p.loops[0].first_layer = 1; }, "beyond its last layer"},
       {"beyond 32 bits of layers",
        [](CopyProgram& p) { p.loops[0].first_layer = p.loops[0].num_layers = UINT32_MAX; },
        "beyond its last layer"},
       {"no layers at all", [](CopyProgram& p) { p.num_layers = 0; }, "1 to 4096 layers"},
       {"no loops", [](CopyProgram& p) { p.loops.clear(); }, "1 to 8192 loops"}});
}

TEST(conversions_that_leave_their_tables_are_refused) {
  using Place = ScalePlace;
  check_each_is_refused(
      converted(Place::kNone, Place::kNone),
      {{"beyond the table", [](CopyProgram& p) { p.loops[0].conversion = 2; }, "conversion beyond its table"},
       {"far beyond", [](CopyProgram& p) { p.loops[0].conversion = UINT32_MAX; },
        "conversion beyond its table"},
       {"half an element",
        [](CopyProgram& p) { p.conversions[0].src_dtype = Dtype::kF32, p.loops[0].nbytes = 63; },
        "not a whole number of elements"}});
  for (const bool src : {true, false}) {
    const auto with = [src](auto change) {
      return [src, change](CopyProgram& p) {
        Conversion& c = p.conversions[0];
        if (src)
          change(c.src_offset, c.src_layer_stride, c.src_block_stride, c.src_strides);
        else
          change(c.dst_offset, c.dst_layer_stride, c.dst_block_stride, c.dst_strides);
      };
    };
    using U64 = std::uint64_t;
    const std::string_view words =
        src ? "source scale beyond its table" : "destination scale beyond its table";
    check_each_is_refused(
        src ? converted(Place::kProgram, Place::kNone) : converted(Place::kNone, Place::kProgram),
        {{"a shorter table", [](CopyProgram& p) { p.scales.pop_back(); }, words},
         {"no table", [](CopyProgram& p) { p.scales.clear(); }, words},
         {"an offset", with([](U64& offset, U64&, U64&, U64(&)[2]) { offset = 2; }), words},
         {"a layer stride", with([](U64&, U64& layer, U64&, U64(&)[2]) { layer = 3; }), words},
         {"an outer stride", with([](U64&, U64&, U64&, U64(&strides)[2]) { strides[0] = 1; }), words},
         {"an inner stride", with([](U64&, U64&, U64&, U64(&strides)[2]) { strides[1] = 2; }), words},
         {"a scale for each block", with([](U64&, U64&, U64& block, U64(&)[2]) { block = 1; }), words},
         {"an offset beyond 64 bits", with([](U64& offset, U64&, U64&, U64(&)[2]) { offset = UINT64_MAX; }),
          words},
         {"a sum that wraps",
          with([](U64& offset, U64&, U64&, U64(&strides)[2]) { offset = UINT64_MAX - 4, strides[1] = 5; }),
          words},
         {"a product that wraps", with([](U64&, U64& layer, U64&, U64(&)[2]) { layer = U64{1} << 63; }),
          words},
         {"a huge stride", with([](U64&, U64&, U64&, U64(&strides)[2]) { strides[0] = UINT64_MAX / 8; }),
          words}});
  }
}

TEST(scales_are_found_of_whole_blocks_alone) {
  const std::string_view words = "computes scales of parts of a block";
  check_each_is_refused(
      converted(ScalePlace::kNone, ScalePlace::kRegion),
      {{"halves at the destination", [](CopyProgram& p) { p.units[kCoarse].dst = 2; }, words},
       {"single tokens",
        [](CopyProgram& p) {
          p.units[kFine] = {16, 16};
          p.loops[0].grain = kFine;
        },
        words},
       {"of 32 MiB at once", [](CopyProgram& p) { p.loops[0].nbytes = 1 << 20; },
        "computes scales of more than 16777216 bytes of a block at once"}});
  CopyProgram halves_of_the_source = converted(ScalePlace::kNone, ScalePlace::kRegion);
  halves_of_the_source.units[kCoarse].src = 2;
  CHECK_OK(check_program(halves_of_the_source));
}

// ---- footprints ----

Footprint footprint_of(const CopyProgram& layout) {
  const MemorySpan span{0, kNbytes + kScalesNbytes};
  auto footprint = Footprint::create(layout, Side::kDst, kBlocks, std::span(&span, 1));
  REQUIRE_OK(footprint);
  return std::move(footprint).value();
}

TEST(programs_of_units_tokens_and_scales_stay_inside_their_blocks) {
  const Footprint plain = footprint_of(whole_blocks());
  // How a region with page scales describes their places: loops of four bytes.
  CopyProgram with_scales = whole_blocks();
  CopyLoop scales = with_scales.loops[0];
  scales.src_offset = scales.dst_offset = kNbytes;
  scales.src_layer_stride = scales.dst_layer_stride = kBlocks * 4;
  scales.src_block_stride = scales.dst_block_stride = scales.nbytes = 4;
  scales.counts[0] = scales.counts[1] = 1;
  with_scales.loops.push_back(scales);
  const Footprint quantized = footprint_of(with_scales);
  for (const Side side : {Side::kSrc, Side::kDst}) {
    CHECK_OK(plain.contains(whole_blocks(), side));
    CHECK_OK(plain.contains(units_and_tokens(), side));
    CHECK_OK(quantized.contains(units_and_tokens(), side));
    CHECK_OK(plain.contains(converted(ScalePlace::kProgram, ScalePlace::kProgram), side));
    const bool src = side == Side::kSrc;
    const CopyProgram scaled = converted(src ? ScalePlace::kRegion : ScalePlace::kNone,
                                         src ? ScalePlace::kNone : ScalePlace::kRegion);
    CHECK_OK(quantized.contains(scaled, side));
    CHECK_EQ(plain.contains(scaled, side).code(), Code::kLayoutMismatch);
    CHECK_OK(plain.contains(scaled, src ? Side::kDst : Side::kSrc));  // it touches none of our bytes
  }
}

// Programs that touch foreign bytes on the side that is checked; mirrored for the other side.
using Change = void (*)(CopyLoop& fine, CopyLoop& coarse, CopyProgram& program);

TEST(programs_that_leave_their_blocks_are_refused_on_either_side) {
  const Footprint footprint = footprint_of(whole_blocks());
  const std::pair<const char*, Change> kChanges[] = {
      {"a longer step between units", [](CopyLoop&, CopyLoop& c, CopyProgram&) { c.dst_unit_stride += 8; }},
      {"a step into the next block",
       [](CopyLoop&, CopyLoop& c, CopyProgram&) { c.dst_unit_stride = kBlockNbytes; }},
      {"a step that wraps", [](CopyLoop&, CopyLoop& c, CopyProgram&) { c.dst_unit_stride = UINT64_MAX; }},
      {"a step from token to token",
       [](CopyLoop& f, CopyLoop&, CopyProgram&) { f.dst_unit_stride = 2 * kTokenNbytes; }},
      {"tokens too far in front", [](CopyLoop& f, CopyLoop&, CopyProgram&) { f.dst_offset = kTokenNbytes; }},
      {"tokens of two", [](CopyLoop& f, CopyLoop&, CopyProgram&) { f.counts[0] = 2; }},
      {"longer tokens", [](CopyLoop& f, CopyLoop&, CopyProgram&) { f.nbytes += 1; }},
      {"a block stride of its own",
       [](CopyLoop& f, CopyLoop&, CopyProgram&) { f.dst_block_stride = 2 * kBlockNbytes; }},
      {"blocks on top of each other", [](CopyLoop&, CopyLoop& c, CopyProgram&) { c.dst_block_stride = 0; }},
      {"more units than there are",
       [](CopyLoop&, CopyLoop&, CopyProgram& p) { p.units[kCoarse] = {3, 3}, p.units[kFine] = {24, 24}; }},
      {"a layer more", [](CopyLoop& f, CopyLoop&, CopyProgram& p) { f.num_layers = 3, p.num_layers = 3; }},
  };
  for (const auto& [why, change] : kChanges) {
    CopyProgram program = units_and_tokens();
    change(program.loops[1], program.loops[0], program);
    const Status at_dst = footprint.contains(program, Side::kDst);
    if (at_dst.ok()) FAIL(std::string("accepted at the destination: ") + why);
    for (CopyLoop& loop : program.loops) {
      std::swap(loop.src_offset, loop.dst_offset);
      std::swap(loop.src_layer_stride, loop.dst_layer_stride);
      std::swap(loop.src_block_stride, loop.dst_block_stride);
      std::swap(loop.src_unit_stride, loop.dst_unit_stride);
      std::swap(loop.src_strides, loop.dst_strides);
    }
    const Status at_src = footprint.contains(program, Side::kSrc);
    if (at_src.ok()) FAIL(std::string("accepted at the source: ") + why);
  }
}

TEST(a_conversion_that_writes_more_than_it_reads_is_held_against_what_it_writes) {
  const Footprint footprint = footprint_of(whole_blocks());
  CopyProgram wider = converted(ScalePlace::kNone, ScalePlace::kNone);
  wider.conversions[0].dst_dtype = Dtype::kF32;  // runs of 256 bytes in steps of 64
  CHECK_OK(footprint.contains(wider, Side::kSrc));
  CHECK_EQ(footprint.contains(wider, Side::kDst).code(), Code::kLayoutMismatch);
}

TEST(scales_outside_of_the_footprint_are_refused) {
  CopyProgram with_scales = whole_blocks();
  CopyLoop scales = with_scales.loops[0];
  scales.dst_offset = kNbytes;
  scales.dst_layer_stride = kBlocks * 4;
  scales.dst_block_stride = scales.nbytes = 4;
  scales.counts[0] = scales.counts[1] = 1;
  with_scales.loops.push_back(scales);
  const Footprint footprint = footprint_of(with_scales);
  const CopyProgram good = converted(ScalePlace::kNone, ScalePlace::kRegion);
  CHECK_OK(footprint.contains(good, Side::kDst));
  using Break = void (*)(Conversion&);
  constexpr Break kBreaks[] = {
      [](Conversion& c) {
        c.dst_offset -= 4;
      },  // among the values: they are block 0's, but not with this stride
      [](Conversion& c) { c.dst_offset += 4; },  // of the next block
      [](Conversion& c) { c.dst_offset = UINT64_MAX - 3; },
      [](Conversion& c) { c.dst_block_stride = 8; },
      [](Conversion& c) { c.dst_block_stride = 0; },
      [](Conversion& c) { c.dst_layer_stride = 4; },
      [](Conversion& c) { c.dst_strides[0] = 4; },
      [](Conversion& c) { c.dst_strides[1] = 4; },
      [](Conversion& c) { c.dst_strides[1] = UINT64_MAX; },
  };
  for (const Break& breaks : kBreaks) {
    CopyProgram program = good;
    breaks(program.conversions[0]);
    CHECK(!footprint.contains(program, Side::kDst).ok());
  }
}

TEST(programs_of_more_runs_than_are_worth_checking_are_refused_at_once) {
  const Footprint footprint = footprint_of(whole_blocks());
  CopyProgram program = units_and_tokens();
  program.units[kCoarse] = {kHuge, kHuge};
  program.loops.resize(1);
  program.loops[0].counts[0] = program.loops[0].counts[1] = UINT32_MAX;
  program.loops[0].num_layers = program.num_layers = wire::kMaxLayers;
  for (const Side side : {Side::kSrc, Side::kDst}) {
    const Status status = footprint.contains(program, side);
    CHECK_REFUSED(status, Code::kLayoutMismatch, "more than 1048576 runs");
  }
}

// Heads before blocks: a block owns one interval for each head of each layer.
CopyProgram heads_apart(std::uint32_t num_heads, std::uint64_t run_nbytes) {
  CopyProgram program = whole_blocks();
  CopyLoop& loop = program.loops[0];
  loop.nbytes = run_nbytes;
  loop.counts[0] = num_heads;
  loop.counts[1] = 1;
  loop.src_block_stride = loop.dst_block_stride = run_nbytes;
  loop.src_strides[0] = loop.dst_strides[0] = run_nbytes * kBlocks;
  loop.src_layer_stride = loop.dst_layer_stride = run_nbytes * kBlocks * num_heads;
  return program;
}

TEST(programs_between_scattered_parts_of_a_block_are_held_against_each) {
  constexpr std::uint32_t kHeads = 5000;
  const CopyProgram layout = heads_apart(kHeads, 8);
  const MemorySpan span{0, kLayers * 8 * kBlocks * kHeads};
  const auto footprint = Footprint::create(layout, Side::kDst, kBlocks, std::span(&span, 1));
  REQUIRE_OK(footprint);
  for (const Side side : {Side::kSrc, Side::kDst}) {
    CHECK_OK(footprint.value().contains(layout, side));
    CHECK_OK(check_inside(layout, side, kBlocks, std::span(&span, 1)));
    CopyProgram one_off = layout;
    CopyLoop last = one_off.loops[0];
    one_off.loops[0].counts[0] = kHeads - 1;
    last.counts[0] = 1;
    last.src_offset = last.dst_offset = last.src_strides[0] * (kHeads - 1);
    (side == Side::kSrc ? last.src_offset : last.dst_offset) += 8;
    one_off.loops.push_back(last);
    const Status status = footprint.value().contains(one_off, side);
    CHECK_REFUSED(status, Code::kLayoutMismatch, "loop 1 of the copy program touches bytes");
  }
}

TEST(programs_that_move_a_block_over_and_over_are_refused) {
  const Footprint footprint = footprint_of(whole_blocks());
  const std::pair<const char*, std::function<void(CopyLoop&)>> kChanges[] = {
      {"rows on top of each other",
       [](CopyLoop& l) { l.counts[0] *= 1024, l.src_strides[0] = l.dst_strides[0] = 0; }},
      {"a row more on top of the last", [](CopyLoop& l) {
         l.counts[1] = 3;
         l.src_strides[1] = l.dst_strides[1] = 0;
       }}};
  for (const auto& [why, change] : kChanges)
    for (const Side side : {Side::kSrc, Side::kDst}) {
      CopyProgram program = whole_blocks();
      change(program.loops[0]);
      const Status status = footprint.contains(program, side);
      if (status.ok()) FAIL(std::string("accepted: ") + why);
      CHECK(says(status, "moves bytes of a block more than once"));
    }
}

// Pages with a scale each, cut into units: every unit takes its page's scale along.
TEST(units_share_the_scale_of_their_page_at_the_source_alone) {
  const auto with_scales = [](CopyProgram program) {
    CopyLoop loop = program.loops[0];
    loop.counts[0] = loop.counts[1] = 1;
    loop.nbytes = sizeof(float);
    loop.src_offset = loop.dst_offset = kNbytes;
    loop.src_layer_stride = loop.dst_layer_stride = kBlocks * sizeof(float);
    loop.src_block_stride = loop.dst_block_stride = sizeof(float);
    loop.src_unit_stride = loop.dst_unit_stride = 0;
    program.loops.push_back(loop);
    return program;
  };
  const MemorySpan span{0, kNbytes + kScalesNbytes};
  const auto footprint =
      Footprint::create(with_scales(whole_blocks()), Side::kDst, kBlocks, std::span(&span, 1));
  REQUIRE_OK(footprint);
  CopyProgram program = with_scales(units_and_tokens());
  CHECK_OK(check_program(program));
  CHECK_OK(footprint.value().contains(program, Side::kSrc));
  CHECK(says(footprint.value().contains(program, Side::kDst), "moves bytes of a block more than once"));
  program.loops.back().counts[0] = 2;  // of one unit
  CHECK(says(footprint.value().contains(program, Side::kSrc), "moves bytes of a block more than once"));
}

TEST(programs_that_would_take_long_to_check_are_refused) {
  // Single bytes at sums of two equal strides: each is in its place, and only a check byte by byte can show
  // that.
  constexpr std::uint32_t kHeads = 512, kRunNbytes = 1024;
  const CopyProgram layout = heads_apart(kHeads, kRunNbytes);
  const MemorySpan span{0, kLayers * std::uint64_t{kBlocks} * kHeads * kRunNbytes};
  const auto footprint = Footprint::create(layout, Side::kDst, kBlocks, std::span(&span, 1));
  REQUIRE_OK(footprint);
  CopyProgram program = layout;
  CopyLoop& loop = program.loops[0];
  loop.nbytes = loop.num_layers = 1;
  loop.counts[0] = loop.counts[1] = kHeads;
  loop.src_strides[1] = loop.src_strides[0];
  loop.dst_strides[1] = loop.dst_strides[0];
  std::vector<MemorySpan> parts;
  for (std::uint64_t head = 0; head < kLayers * kHeads; ++head)
    parts.push_back({head * kBlocks * kRunNbytes, kRunNbytes});
  for (const Side side : {Side::kSrc, Side::kDst}) {
    CHECK(says(footprint.value().contains(program, side), "differ too much"));
    CHECK(says(check_inside(program, side, 1, parts), "differ too much"));
  }
}

// Random programs, each broken at random: those that contains() accepts stay inside their blocks, byte by
// byte.
TEST(whatever_passes_touches_only_its_own_blocks) {
  check::Random random(check::seed());
  std::size_t num_passed = 0, num_refused = 0;
  for (int round = 0; round < 1500; ++round) {
    Sample sample(random, any_wish(random));
    const CopyProgram& honest = *sample.move.program;
    CopyProgram program = honest;
    if (random.chance(85)) {
      CopyLoop& loop = program.loops[random.below(program.loops.size())];
      std::uint64_t* const numbers[] = {&loop.dst_offset,      &loop.dst_layer_stride, &loop.dst_block_stride,
                                        &loop.dst_unit_stride, &loop.dst_strides[0],   &loop.dst_strides[1],
                                        &loop.nbytes};
      std::uint64_t& number = *numbers[random.below(std::size(numbers))];
      number += random.below(3) * 8 - 8;
      if (loop.conversion != 0 && random.chance(40)) {
        Conversion& conversion = program.conversions[loop.conversion - 1];
        (random.chance(50) ? conversion.dst_offset : conversion.dst_block_stride) += random.below(3) * 4 - 4;
      }
    }
    if (!check_program(program).ok()) continue;
    const std::uint32_t num_blocks = sample.dst.num_blocks;
    const MemorySpan span{0, sample.dst.end};
    const auto footprint = Footprint::create(honest, Side::kDst, num_blocks, std::span(&span, 1));
    REQUIRE_OK(footprint);
    if (!footprint.value().contains(program, Side::kDst).ok()) {
      ++num_refused;
      continue;
    }
    ++num_passed;
    // Each byte's owner: 0 for none, otherwise the block's number plus one.
    std::vector<std::uint32_t> owner(sample.dst.end);
    const auto visit_all = [&](const CopyProgram& of, auto&& visit) {
      for (const CopyLoop& loop : of.loops)
        for (std::uint32_t layer = loop.first_layer; layer < loop.first_layer + loop.num_layers; ++layer)
          for (std::uint32_t id = 0; id < num_blocks * of.units[loop.grain].dst; ++id) {
            const std::vector<Run> runs = runs_of(of, loop, layer, 0, id);
            for (const Run& run : runs) visit(run.dst, run.dst_nbytes, id / of.units[loop.grain].dst);
            for (const std::uint64_t at : found_scales(runs))
              visit(at, std::uint64_t{4}, id / of.units[loop.grain].dst);
          }
    };
    visit_all(honest, [&](std::uint64_t at, std::uint64_t nbytes, std::uint32_t block) {
      std::fill_n(owner.begin() + static_cast<std::ptrdiff_t>(at), nbytes, block + 1);
    });
    bool inside = true;
    visit_all(program, [&](std::uint64_t at, std::uint64_t nbytes, std::uint32_t block) {
      inside = inside && at + nbytes <= owner.size() &&
               std::all_of(owner.begin() + static_cast<std::ptrdiff_t>(at),
                           owner.begin() + static_cast<std::ptrdiff_t>(at + nbytes),
                           [&](std::uint32_t of) { return of == block + 1; });
    });
    CHECK(inside);
    // And a transport would agree.
    Move move = sample.move;
    move.program = std::make_shared<CopyProgram>(program);
    for (std::uint32_t piece = 0; piece < move.grid.num_pieces(); ++piece)
      CHECK(piece_end(move, piece, Side::kDst) <= sample.dst.end);
  }
  CHECK(num_passed > 200 && num_refused > 200);
}

}  // namespace
