// Random copy programs that a decoder lets through and that no honest layout makes: runs by the billion, strides of
// nothing, of almost everything and beyond 64 bits, axes that overlap. Whatever is checked, walked, packed and
// summed of them stays inside memory and ends by our count of work.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <numeric>
#include <vector>

#include "block_programs.h"
#include "check.h"
#include "core/control/wire.h"
#include "core/copy/footprint.h"
#include "core/copy/pack.h"
#include "core/copy/run_cursor.h"

namespace {

using namespace block_programs;

std::uint64_t any_number(check::Random& random, std::uint64_t usual) {
  constexpr std::uint64_t kEdges[] = {0,
                                      1,
                                      2,
                                      63,
                                      64,
                                      UINT32_MAX,
                                      std::uint64_t{1} << 32,
                                      UINT64_MAX,
                                      UINT64_MAX - 63,
                                      std::uint64_t{1} << 63};
  if (random.chance(30)) return kEdges[random.below(std::size(kEdges))];
  if (random.chance(30)) return random.below(2 * kNbytes);
  if (random.chance(20)) return usual / (1 + random.below(4));
  if (random.chance(20)) return usual - 64 * random.below(3);
  return usual;
}

std::uint32_t any_count(check::Random& random, std::uint32_t usual) {
  return static_cast<std::uint32_t>(any_number(random, usual));
}

CopyProgram any_program(check::Random& random) {
  CopyProgram program = random.chance(50) ? whole_blocks() : units_and_tokens();
  while (random.chance(30)) program.loops.push_back(program.loops[random.below(program.loops.size())]);
  if (random.chance(40)) {
    Conversion& conversion = program.conversions.emplace_back();
    conversion.src_dtype = Dtype::kBf16;
    conversion.dst_dtype = random.chance(50) ? Dtype::kE4m3 : Dtype::kF32;
    conversion.src_scales = static_cast<ScalePlace>(random.below(3));
    conversion.dst_scales = static_cast<ScalePlace>(random.below(3));
    for (std::uint64_t* number : {&conversion.src_offset, &conversion.dst_offset, &conversion.dst_strides[0],
                                  &conversion.dst_strides[1], &conversion.src_strides[0]})
      *number = random.chance(60) ? 0 : any_number(random, 4);
    program.scales.assign(4, 1.0f);
    program.loops[random.below(program.loops.size())].conversion = 1;
  }
  for (std::uint64_t changes = random.below(5); changes != 0; --changes) {
    CopyLoop& loop = program.loops[random.below(program.loops.size())];
    std::uint64_t* const numbers[] = {&loop.src_offset,
                                      &loop.dst_offset,
                                      &loop.src_layer_stride,
                                      &loop.dst_layer_stride,
                                      &loop.src_block_stride,
                                      &loop.dst_block_stride,
                                      &loop.src_unit_stride,
                                      &loop.dst_unit_stride,
                                      &loop.src_strides[0],
                                      &loop.src_strides[1],
                                      &loop.dst_strides[0],
                                      &loop.dst_strides[1],
                                      &loop.nbytes};
    std::uint64_t& number = *numbers[random.below(std::size(numbers))];
    number = any_number(random, number);
    if (random.chance(30)) {
      std::uint32_t& count = loop.counts[random.below(2)];
      count = any_count(random, count);
    }
  }
  return program;
}

TEST(hostile_programs_stay_inside_and_end_by_our_count) {
  check::Random random(check::seed());
  // Both regions hold the same blocks; memory is exactly theirs, so that a sanitizer sees what leaves it.
  const std::vector<MemorySpan> spans = {{0, kNbytes}};
  const auto own = Footprint::create(whole_blocks(), Side::kSrc, kBlocks, spans);
  REQUIRE_OK(own);
  std::size_t num_structured = 0, num_packed = 0, num_scattered = 0;
  for (int round = 0; round < 20'000; ++round) {
    auto program = std::make_shared<CopyProgram>(any_program(random));
    if (!check_program(*program).ok()) continue;
    ++num_structured;
    Move move;
    move.program = program;
    const std::uint32_t num_fine = program->units[kFine].src != 0 && random.chance(50) ? 4 : 0;
    move.grid = {0, program->num_layers, 8 + num_fine, 3, num_fine};
    move.src_ids.resize(8 + num_fine);
    std::iota(move.src_ids.begin(), move.src_ids.end(), 0u);
    move.dst_ids = move.src_ids;
    std::vector<std::byte> memory(kNbytes, std::byte{0x3c});
    move.local = unregistered(memory.data());
    const std::uint32_t piece = static_cast<std::uint32_t>(random.below(move.grid.num_pieces()));
    const std::uint64_t nbytes = piece_nbytes(*program, move.grid.piece(piece));
    constexpr std::uint64_t kRoom = 64 * 1024;
    if (own.value().contains(*program, Side::kSrc).ok()) {
      ++num_packed;
      REQUIRE(nbytes <= move.grid.num_pairs * 4 * 2 * kBlockNbytes);  // widened, in two grains
      const std::uint64_t room = std::max(kRoom, Packer::least_room(*program));
      REQUIRE(room <= 4 * kMostFoundNbytes);
      std::vector<std::byte> packed(room);
      Packer packer(move, piece);
      std::uint64_t out = 0;
      while (const std::size_t some = packer.pack(packed.data(), room)) out += some;
      CHECK_EQ(out, nbytes);
      PieceChecksum sum(move, piece, Side::kSrc, memory.data());
      while (!sum.done()) REQUIRE(sum.advance(kRoom) <= kRoom + kMostFoundNbytes);
    }
    if (own.value().contains(*program, Side::kDst).ok()) {
      ++num_scattered;
      const std::vector<std::byte> bytes(nbytes, std::byte{0x5a});
      RunCursor cursor(move, piece, Side::kDst);
      const std::uint64_t half = nbytes / 2;
      cursor.scatter(bytes.data(), half);
      cursor = RunCursor(move, piece, Side::kDst);
      cursor.skip(half);
      cursor.scatter(bytes.data() + half, nbytes - half);
    }
    static_cast<void>(check_inside(*program, Side::kSrc, kBlocks, spans));
    // Unchecked against memory: sizes and skips alone, which follow no offset.
    Packer(move, piece).skip(nbytes);
    RunCursor(move, piece, Side::kSrc).skip(nbytes / 2);
  }
  CHECK(num_structured > 2000);
  CHECK(num_packed > 500);
  CHECK(num_scattered > 500);
}

}  // namespace
