// What stands between a peer's program and our memory: ids, structure, footprint.
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "core/executor.h"
#include "core/region_table.h"
#include "program_samples.h"

namespace {

using namespace program_samples;
using FootprintHalf = Footprint::Half;

constexpr std::uint32_t kHuge = wire::kMaxUnits;

bool says(const Status& status, std::string_view words) {
  if (status.message().find(words) != std::string::npos) return true;
  std::printf("  it says: %s\n", status.message().c_str());
  return false;
}

// ---- programs ----

// 16 tokens a block, two heads of 64 bytes a token, in one layer after the other; the source's pages
// are two units, the destination's one. Scales of the source's pages lie behind all.
constexpr std::uint32_t kTokens = 16, kBlocks = 8, kLayers = 2;
constexpr std::uint64_t kTokenNbytes = 128, kBlockNbytes = kTokens * kTokenNbytes,
                        kLayerNbytes = kBlocks * kBlockNbytes, kNbytes = kLayers * kLayerNbytes,
                        kScalesNbytes = kLayers * kBlocks * 4;

CopyProgram whole_blocks() {
  CopyLoop loop{};
  loop.num_layers = kLayers;
  loop.src_layer_stride = loop.dst_layer_stride = kLayerNbytes;
  loop.src_block_stride = loop.dst_block_stride = kBlockNbytes;
  loop.counts[0] = kTokens;
  loop.counts[1] = 2;
  loop.src_strides[0] = loop.dst_strides[0] = kTokenNbytes;
  loop.src_strides[1] = loop.dst_strides[1] = loop.nbytes = kTokenNbytes / 2;
  CopyProgram program;
  program.loops = {loop};
  program.num_layers = kLayers;
  return program;
}

// The same in units of 8 tokens, with single tokens.
CopyProgram units_and_tokens() {
  CopyProgram program = whole_blocks();
  program.units[kCoarse] = {2, 2};
  program.units[kFine] = {16, 16};
  CopyLoop loop = program.loops[0];
  loop.counts[0] = 8;
  loop.src_unit_stride = loop.dst_unit_stride = 8 * kTokenNbytes;
  program.loops = {loop};
  loop.grain = kFine;
  loop.counts[0] = 1;
  loop.src_unit_stride = loop.dst_unit_stride = kTokenNbytes;
  program.loops.push_back(loop);
  return program;
}

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
        "no whole elements"}});
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
  const std::string_view words = "finds scales of parts of a block";
  check_each_is_refused(
      converted(ScalePlace::kNone, ScalePlace::kRegion),
      {{"halves at the destination", [](CopyProgram& p) { p.units[kCoarse].dst = 2; }, words},
       {"single tokens",
        [](CopyProgram& p) {
          p.units[kFine] = {16, 16};
          p.loops[0].grain = kFine;
        },
        words}});
  CopyProgram halves_of_the_source = converted(ScalePlace::kNone, ScalePlace::kRegion);
  halves_of_the_source.units[kCoarse].src = 2;
  CHECK_OK(check_program(halves_of_the_source));
}

// ---- footprints ----

Footprint footprint_of(const CopyProgram& layout) {
  const MemorySpan span{0, kNbytes + kScalesNbytes};
  auto footprint = Footprint::create(layout, FootprintHalf::kDst, kBlocks, std::span(&span, 1));
  REQUIRE_OK(footprint);
  return std::move(footprint).value();
}

TEST(programs_of_units_tokens_and_scales_stay_inside_their_blocks) {
  const Footprint plain = footprint_of(whole_blocks());
  // How a region with page scales says where they are: loops of four bytes.
  CopyProgram with_scales = whole_blocks();
  CopyLoop scales = with_scales.loops[0];
  scales.src_offset = scales.dst_offset = kNbytes;
  scales.src_layer_stride = scales.dst_layer_stride = kBlocks * 4;
  scales.src_block_stride = scales.dst_block_stride = scales.nbytes = 4;
  scales.counts[0] = scales.counts[1] = 1;
  with_scales.loops.push_back(scales);
  const Footprint quantized = footprint_of(with_scales);
  for (const FootprintHalf half : {FootprintHalf::kSrc, FootprintHalf::kDst}) {
    CHECK_OK(plain.contains(whole_blocks(), half));
    CHECK_OK(plain.contains(units_and_tokens(), half));
    CHECK_OK(quantized.contains(units_and_tokens(), half));
    CHECK_OK(plain.contains(converted(ScalePlace::kProgram, ScalePlace::kProgram), half));
    const bool src = half == FootprintHalf::kSrc;
    const CopyProgram scaled = converted(src ? ScalePlace::kRegion : ScalePlace::kNone,
                                         src ? ScalePlace::kNone : ScalePlace::kRegion);
    CHECK_OK(quantized.contains(scaled, half));
    CHECK_EQ(plain.contains(scaled, half).code(), Code::kLayoutMismatch);
    CHECK_OK(plain.contains(scaled, src ? FootprintHalf::kDst : FootprintHalf::kSrc));  // nothing of ours
  }
}

// Programs that touch what is not theirs, on the side that is checked; mirrored for the other.
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
    const Status at_dst = footprint.contains(program, FootprintHalf::kDst);
    if (at_dst.ok()) FAIL(std::string("accepted at the destination: ") + why);
    for (CopyLoop& loop : program.loops) {
      std::swap(loop.src_offset, loop.dst_offset);
      std::swap(loop.src_layer_stride, loop.dst_layer_stride);
      std::swap(loop.src_block_stride, loop.dst_block_stride);
      std::swap(loop.src_unit_stride, loop.dst_unit_stride);
      std::swap(loop.src_strides, loop.dst_strides);
    }
    const Status at_src = footprint.contains(program, FootprintHalf::kSrc);
    if (at_src.ok()) FAIL(std::string("accepted at the source: ") + why);
  }
}

TEST(a_conversion_that_writes_more_than_it_reads_is_held_against_what_it_writes) {
  const Footprint footprint = footprint_of(whole_blocks());
  CopyProgram wider = converted(ScalePlace::kNone, ScalePlace::kNone);
  wider.conversions[0].dst_dtype = Dtype::kF32;  // runs of 256 bytes in steps of 64
  CHECK_OK(footprint.contains(wider, FootprintHalf::kSrc));
  CHECK_EQ(footprint.contains(wider, FootprintHalf::kDst).code(), Code::kLayoutMismatch);
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
  CHECK_OK(footprint.contains(good, FootprintHalf::kDst));
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
    CHECK(!footprint.contains(program, FootprintHalf::kDst).ok());
  }
}

TEST(programs_of_more_runs_than_are_worth_checking_are_refused_at_once) {
  const Footprint footprint = footprint_of(whole_blocks());
  CopyProgram program = units_and_tokens();
  program.units[kCoarse] = {kHuge, kHuge};
  program.loops.resize(1);
  program.loops[0].counts[0] = program.loops[0].counts[1] = UINT32_MAX;
  program.loops[0].num_layers = program.num_layers = wire::kMaxLayers;
  for (const FootprintHalf half : {FootprintHalf::kSrc, FootprintHalf::kDst}) {
    const Status status = footprint.contains(program, half);
    CHECK_EQ(status.code(), Code::kLayoutMismatch);
    CHECK(says(status, "more than 1048576 runs"));
  }
}

// Random programs, each broken at random: what contains() lets pass stays inside the blocks, byte by
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
    const auto footprint = Footprint::create(honest, FootprintHalf::kDst, num_blocks, std::span(&span, 1));
    REQUIRE_OK(footprint);
    if (!footprint.value().contains(program, FootprintHalf::kDst).ok()) {
      ++num_refused;
      continue;
    }
    ++num_passed;
    // Whose each byte is; 0 for nobody's, else the block's number and one.
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

// ---- ids ----

TEST(ids_of_units_and_tokens_are_held_against_their_blocks) {
  const CopyProgram program = units_and_tokens();  // 2 units, 16 tokens a block
  using Ids = std::vector<std::uint32_t>;
  const auto code = [&](const Ids& ids, std::uint32_t num_fine, FootprintHalf half = FootprintHalf::kDst) {
    return check_ids(ids, num_fine, program, half, 4, "kv").code();
  };
  for (const FootprintHalf half : {FootprintHalf::kSrc, FootprintHalf::kDst}) {
    CHECK_EQ(code({0, 7, 3}, 0, half), Code::kOk);
    CHECK_EQ(code({0, 8, 3}, 0, half), Code::kOutOfRange);
    CHECK_EQ(code({UINT32_MAX}, 0, half), Code::kOutOfRange);
    CHECK_EQ(code({0, 63}, 1, half), Code::kOk);
    CHECK_EQ(code({0, 64}, 1, half), Code::kOutOfRange);
    CHECK_EQ(code({0, UINT32_MAX}, 1, half), Code::kOutOfRange);
    CHECK_EQ(code({8, 16}, 1, half), Code::kOutOfRange);  // a unit that only tokens reach
    CHECK_EQ(code({20, 21, 22}, 3, half), Code::kOk);     // tokens alone
    CHECK_EQ(code({}, 0, half), Code::kOk);
  }
  CHECK_EQ(code({1, 2, 1}, 0), Code::kDuplicateBlock);
  CHECK_EQ(code({1, 2, 1}, 0, FootprintHalf::kSrc), Code::kOk);
  CHECK_EQ(code({0, 20, 20}, 2), Code::kDuplicateBlock);
  CHECK_EQ(code({0, 20, 20}, 2, FootprintHalf::kSrc), Code::kOk);
  // Unit 1 is the second half of block 0: tokens 8 to 15.
  for (std::uint32_t token = 0; token < 32; ++token) {
    CHECK_EQ(code({1, token}, 1), token >= 8 && token < 16 ? Code::kDuplicateBlock : Code::kOk);
    CHECK_EQ(code({1, token}, 1, FootprintHalf::kSrc), Code::kOk);
  }
  const auto words = [&](const Ids& ids, std::uint32_t num_fine) {
    return check_ids(ids, num_fine, program, FootprintHalf::kDst, 4, "kv").message();
  };
  CHECK_EQ(words({9}, 0), "dst_blocks: block 4 is not one of the 4 blocks of region 'kv'");
  CHECK_EQ(words({5, 5}, 0), "dst_blocks: block 2, unit 1, is named twice in region 'kv'");
  CHECK_EQ(words({1, 9}, 1), "dst_blocks: block 0, token 9, is named twice in region 'kv'");
}

TEST(tokens_for_a_program_that_has_none_are_refused) {
  CopyProgram program = units_and_tokens();
  program.units[kFine] = {0, 0};
  program.loops.resize(1);
  const std::vector<std::uint32_t> ids = {0, 20};
  for (const FootprintHalf half : {FootprintHalf::kSrc, FootprintHalf::kDst}) {
    const Status status = check_ids(ids, 1, program, half, 4, "kv");
    CHECK_EQ(status.code(), Code::kInvalidArgument);
    CHECK(says(status, "its copy program moves whole units"));
    CHECK_OK(check_ids(std::vector<std::uint32_t>{0, 7}, 0, program, half, 4, "kv"));
    const CopyProgram blocks = whole_blocks();  // one unit a block, no tokens
    CHECK_EQ(check_ids(ids, 2, blocks, half, 40, "kv").code(), Code::kInvalidArgument);
  }
}

TEST(what_a_peer_claims_of_its_blocks_costs_no_memory) {
  CopyProgram program = units_and_tokens();
  program.units[kCoarse] = {kHuge / 2, kHuge / 2};
  program.units[kFine] = {kHuge, kHuge};
  const std::vector<std::uint32_t> ids = {0, UINT32_MAX, 5, 2, 3, UINT32_MAX};
  CHECK_OK(check_ids(ids, 3, program, FootprintHalf::kDst, UINT32_MAX, "kv"));
  CHECK_EQ(
      check_ids(std::vector<std::uint32_t>{1, 2}, 1, program, FootprintHalf::kDst, UINT32_MAX, "kv").code(),
      Code::kDuplicateBlock);  // token 2 is the first of unit 1
  CHECK_EQ(
      check_ids(std::vector<std::uint32_t>{7, 7}, 0, program, FootprintHalf::kDst, UINT32_MAX, "kv").code(),
      Code::kDuplicateBlock);
}

TEST(random_ids_are_judged_as_a_table_of_tokens_judges_them) {
  check::Random random(check::seed());
  std::size_t num_ok = 0, num_twice = 0;
  for (int round = 0; round < 3000; ++round) {
    const std::uint32_t units = any(random, 1, 4), unit_tokens = any(random, 1, 4),
                        num_blocks = any(random, 1, 40);
    CopyProgram program;
    program.units[kCoarse] = {1, units};
    program.units[kFine] = {unit_tokens, units * unit_tokens};
    std::vector<bool> seen(std::size_t{num_blocks} * units * unit_tokens);
    std::vector<std::uint32_t> ids;
    bool twice = false;
    const std::uint32_t num_coarse = any(random, 0, 4), num_fine = any(random, 0, 4);
    for (std::uint32_t i = 0; i < num_coarse; ++i) {
      const std::uint32_t id = any(random, 0, num_blocks * units - 1);
      for (std::uint32_t token = id * unit_tokens; token < (id + 1) * unit_tokens; ++token) {
        twice = twice || seen[token];
        seen[token] = true;
      }
      ids.push_back(id);
    }
    for (std::uint32_t i = 0; i < num_fine; ++i) {
      const std::uint32_t id = any(random, 0, seen.size() - 1);
      twice = twice || seen[id];
      seen[id] = true;
      ids.push_back(id);
    }
    const Code code = check_ids(ids, num_fine, program, FootprintHalf::kDst, num_blocks, "kv").code();
    CHECK_EQ(code, twice ? Code::kDuplicateBlock : Code::kOk);
    (twice ? num_twice : num_ok) += 1;
  }
  CHECK(num_ok > 500 && num_twice > 500);
}

}  // namespace
