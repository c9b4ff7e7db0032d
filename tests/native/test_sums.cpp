// Checksums that a peer asks for: in slices of our size, sessions in turn, whatever is in a piece.
#include "core/engine/sums.h"

#include <array>
#include <memory>
#include <vector>

#include "check.h"
#include "core/copy/crc32c.h"
#include "core/engine/sources.h"

namespace kvxfer {
namespace {

// Of one layer and one pair a piece: `rows` runs of `nbytes` that all lie in one place.
struct Summed : Source {
  Summed(SessionKey session, TransferId transfer, std::byte* bytes, std::uint64_t nbytes, std::uint32_t rows,
         std::uint32_t num_pieces = 1) {
    auto copies = std::make_shared<CopyProgram>();
    CopyLoop loop{};
    loop.num_layers = copies->num_layers = 1;
    loop.counts[0] = rows;
    loop.counts[1] = rows;
    loop.nbytes = nbytes;
    copies->loops = {loop};
    auto local = std::make_shared<LocalRegion>();
    local->base = bytes;
    auto moves = std::make_shared<Move>();
    moves->program = copies;
    moves->grid = {0, 1, num_pieces, 1};
    moves->src_ids.resize(num_pieces);
    moves->dst_ids.resize(num_pieces);
    moves->local = local;
    key = {session, transfer};
    move = std::move(moves);
  }
};

std::vector<Sums::Told> round_of(Sums& sums) {
  std::vector<Sums::Told> told;
  sums.round([](SessionKey, auto&& turn) { turn(); },
             [&](Sums::Told& each) { told.push_back(std::move(each)); });
  return told;
}

TEST(a_piece_without_end_keeps_no_other_session_from_its_sums) {
  std::array<std::byte, 64> memory{};
  const Summed endless(1, 2, memory.data(), memory.size(), UINT32_MAX);
  const Summed small(2, 2, memory.data(), memory.size(), 1, 3);
  Sums sums(Side::kSrc);
  sums.add(endless, {0, 1});
  sums.add(small, {0, 2});
  sums.add(small, {2, 1});
  CHECK_EQ(sums.num_runs(small.key), 1u);  // they are neighbours
  const std::vector<Sums::Told> told = round_of(sums);
  REQUIRE_EQ(told.size(), 1u);
  CHECK(told[0].transfer == small.key);
  CHECK_EQ(told[0].first_piece, 0u);
  CHECK(told[0].sums == std::vector(3, crc32c(0, memory.data(), memory.size())));
  for (int i = 0; i < 10; ++i) CHECK(round_of(sums).empty());  // 40 MiB of it
  CHECK(!sums.empty());
  sums.forget(endless.key);
  CHECK(sums.empty());
  CHECK(round_of(sums).empty());
}

TEST(a_piece_of_many_rounds_has_the_sum_of_its_bytes) {
  std::vector<std::byte> memory(1 << 20);
  check::Random(check::seed()).fill(memory.data(), memory.size());
  const Summed large(1, 2, memory.data(), memory.size(), 5);  // 25 MiB
  Sums sums(Side::kSrc);
  sums.add(large, {0, 1});
  std::uint32_t expected = 0;
  for (int i = 0; i < 25; ++i) expected = crc32c(expected, memory.data(), memory.size());
  std::vector<Sums::Told> told;
  int num_rounds = 1;
  while ((told = round_of(sums)).empty() && num_rounds < 100) ++num_rounds;
  REQUIRE_EQ(told.size(), 1u);
  CHECK(told[0].sums == std::vector{expected});
  CHECK(num_rounds > 5);
  CHECK(sums.empty());
}

}  // namespace
}  // namespace kvxfer
