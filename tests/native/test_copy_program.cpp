// The arithmetic of copy_program.h: how a transfer falls into pieces, which pairs are of which
// grain, and where a pair's runs lie.
#include <tuple>
#include <vector>

#include "check.h"
#include "kvxfer/copy_program.h"
#include "program_samples.h"

namespace {

using namespace program_samples;

TEST(every_pair_of_every_layer_is_in_one_piece_and_of_its_grain) {
  for (std::uint32_t num_pairs = 0; num_pairs <= 13; ++num_pairs)
    for (std::uint32_t num_fine = 0; num_fine <= num_pairs; ++num_fine)
      for (std::uint32_t pairs_per_piece = 1; pairs_per_piece <= 15; ++pairs_per_piece) {
        const PieceGrid grid{7, 3, num_pairs, pairs_per_piece, num_fine};
        std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>> seen, expected;
        for (std::uint32_t index = 0; index < grid.num_pieces(); ++index) {
          const Piece piece = grid.piece(index);
          CHECK(piece.num_pairs > 0 && piece.num_pairs <= pairs_per_piece);
          CHECK(piece.num_fine <= piece.num_pairs);
          CHECK_EQ(piece.begin(kCoarse), piece.first_pair);
          CHECK_EQ(piece.end(kCoarse), piece.begin(kFine));
          CHECK_EQ(piece.end(kFine), piece.first_pair + piece.num_pairs);
          for (const std::uint32_t grain : {kCoarse, kFine})
            for (std::uint32_t pair = piece.begin(grain); pair < piece.end(grain); ++pair) {
              CHECK_EQ(grid.grain_of(pair), grain);
              seen.push_back({piece.layer, pair, grain});
            }
        }
        for (std::uint32_t layer = 7; layer < 10; ++layer)
          for (std::uint32_t pair = 0; pair < num_pairs; ++pair)
            expected.push_back({layer, pair, pair + num_fine < num_pairs ? kCoarse : kFine});
        REQUIRE(seen == expected);  // early layers and pairs come early
      }
}

TEST(grids_at_the_bounds_of_the_wire_do_not_overflow) {
  constexpr std::uint32_t kMost = 256 * 1024;
  const PieceGrid grid{4095, 1, kMost, kMost, kMost};
  CHECK_EQ(grid.num_pieces(), 1);
  CHECK_EQ(grid.piece(0).num_fine, kMost);
  CHECK_EQ(grid.piece(0).end(kCoarse), 0);
  const PieceGrid last_alone{0, 4, kMost, kMost - 1, 1};
  CHECK_EQ(last_alone.num_pieces(), 8);
  CHECK_EQ(last_alone.piece(0).num_fine, 0);
  CHECK_EQ(last_alone.piece(1).num_fine, 1);
  CHECK_EQ(last_alone.piece(1).begin(kFine), kMost - 1);
}

TEST(runs_are_those_of_the_loops_merged_where_they_touch_on_both_sides) {
  check::Random random(check::seed());
  std::size_t num_merged = 0;
  for (int round = 0; round < 400; ++round) {
    Wish wish = any_wish(random);
    wish.conversions.reset();
    const Move move = Sample(random, wish).move;
    for (std::uint32_t index = 0; index < move.grid.num_pieces(); ++index) {
      std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>> seen, expected;
      for_each_run(move.program->view(), move.grid.piece(index), move.src_ids.data(), move.dst_ids.data(),
                   [&](std::uint64_t src, std::uint64_t dst, std::uint64_t nbytes) {
                     seen.push_back({src, dst, nbytes});
                   });
      for_each_pair(move, index, [&](const CopyLoop&, const std::vector<Run>& runs) {
        for (const Run& run : runs) {
          if (!expected.empty()) {
            auto& [src, dst, nbytes] = expected.back();
            if (run.src == src + nbytes && run.dst == dst + nbytes) {
              nbytes += run.src_nbytes;
              ++num_merged;
              continue;
            }
          }
          expected.push_back({run.src, run.dst, run.src_nbytes});
        }
      });
      REQUIRE(seen == expected);
    }
  }
  CHECK(num_merged > 1000);
}

TEST(blocks_of_a_move_are_those_of_its_units_and_tokens) {
  auto program = std::make_shared<CopyProgram>();
  program->units[kCoarse] = {2, 3};
  program->units[kFine] = {8, 12};
  Move move;
  move.program = program;
  move.grid = {0, 1, 4, 2, 2};
  move.src_ids = {0, 5, 7, 8};
  move.dst_ids = {2, 3, 11, 24};
  const std::uint32_t src_blocks[] = {0, 2, 0, 1}, dst_blocks[] = {0, 1, 0, 2};
  for (std::uint32_t pair = 0; pair < 4; ++pair) {
    CHECK_EQ(move.src_block(pair), src_blocks[pair]);
    CHECK_EQ(move.dst_block(pair), dst_blocks[pair]);
  }
}

}  // namespace
