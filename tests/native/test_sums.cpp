// Checksums that a peer asks for: in slices of our size, sessions in turn, for any content of a piece.
#include "core/engine/sums.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <vector>

#include "agent_pair.h"
#include "check.h"
#include "core/copy/crc32c.h"
#include "core/copy/footprint.h"
#include "core/engine/sources.h"
#include "core/system/epoll_reactor.h"

namespace kvxfer {
namespace {

// Pieces of one layer and one pair: `rows` runs of `nbytes`, all in one place.
struct Summed : Source {
  Summed(SessionKey session, TransferId transfer, std::byte* bytes, std::uint64_t nbytes, std::uint32_t rows,
         std::uint32_t num_pieces = 1) {
    auto local = std::make_shared<LocalRegion>();
    local->base = bytes;
    auto moves = std::make_shared<Move>(block_programs::heap_of(rows, rows, nbytes, num_pieces));
    moves->grid.pairs_per_piece = 1;
    moves->local = local;
    key = {session, transfer};
    move = std::move(moves);
  }
};

const std::shared_ptr<CopyWorkers> kAlone;

std::vector<Sums::Finished> round_of(Sums& sums) {
  std::vector<Sums::Finished> finished;
  sums.round([](SessionKey, auto&& turn) { turn(); },
             [&](Sums::Finished& each) { finished.push_back(std::move(each)); });
  return finished;
}

TEST(a_piece_without_end_keeps_no_other_session_from_its_sums) {
  std::array<std::byte, 64> memory{};
  const Summed endless(1, 2, memory.data(), memory.size(), UINT32_MAX);
  const Summed small(2, 2, memory.data(), memory.size(), 1, 3);
  Sums sums(Side::kSrc, kAlone);
  sums.add(endless, {0, 1});
  sums.add(small, {0, 2});
  sums.add(small, {2, 1});
  CHECK_EQ(sums.num_runs(small.key), 1u);  // they are neighbours
  const std::vector<Sums::Finished> finished = round_of(sums);
  REQUIRE_EQ(finished.size(), 1u);
  CHECK(finished[0].transfer == small.key);
  CHECK_EQ(finished[0].first_piece, 0u);
  CHECK(finished[0].sums == std::vector(3, crc32c(0, memory.data(), memory.size())));
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
  Sums sums(Side::kSrc, kAlone);
  sums.add(large, {0, 1});
  std::uint32_t expected = 0;
  for (int i = 0; i < 25; ++i) expected = crc32c(expected, memory.data(), memory.size());
  std::vector<Sums::Finished> finished;
  int num_rounds = 1;
  while ((finished = round_of(sums)).empty() && num_rounds < 100) ++num_rounds;
  REQUIRE_EQ(finished.size(), 1u);
  CHECK(finished[0].sums == std::vector{expected});
  CHECK(num_rounds > 5);
  CHECK(sums.empty());
}

// Pieces of a layer with `num_cells` runs of two bytes, in a program of kMaxLoops loops of which the first and
// the last have that layer: the others are passed.
TEST(a_round_ends_by_the_cells_and_loops_that_it_walked) {
  constexpr std::uint32_t kPieces = 64 * 1024;
  std::array<std::byte, 2> memory{};
  for (const std::uint32_t num_cells : {512u, 2u}) {
    Summed many(1, 2, memory.data(), memory.size(), 1, kPieces);
    auto program = std::make_shared<CopyProgram>(*many.move->program);
    program->num_layers = 2;
    program->loops.assign(num_cells == 2 ? wire::kMaxLoops : num_cells, program->loops[0]);
    for (std::size_t k = num_cells / 2; k < program->loops.size() - num_cells / 2; ++k)
      program->loops[k].first_layer = 1;
    REQUIRE_OK(check_program(*program));
    count(*program);
    auto moves = std::make_shared<Move>(*many.move);
    moves->program = program;
    many.move = moves;
    Sums sums(Side::kSrc, kAlone);
    sums.add(many, {0, kPieces});
    std::size_t num_sums = 0;
    for (const Sums::Finished& finished : round_of(sums)) num_sums += finished.sums.size();
    CHECK(num_sums > 0);
    // 4 MiB and a turn, at 128 bytes a cell and at 8 a loop.
    CHECK(num_sums * num_cells <= 41'000);
    CHECK(num_sums * program->loops.size() <= 660'000);
  }
}

// Its pieces lie side by side: blocks of one row.
struct SideBySide : Summed {
  SideBySide(SessionKey session, TransferId transfer, std::vector<std::byte>& bytes, std::uint64_t nbytes)
      : Summed(session, transfer, bytes.data(), nbytes, 1,
               static_cast<std::uint32_t>(bytes.size() / nbytes)) {
    auto moves = std::make_shared<Move>(*move);
    auto copies = std::make_shared<CopyProgram>(*moves->program);
    copies->loops[0].src_block_stride = nbytes;
    moves->program = copies;
    for (std::uint32_t i = 0; i < moves->src_ids.size(); ++i) moves->src_ids[i] = i;
    move = std::move(moves);
    for (std::uint64_t at = 0; at < bytes.size(); at += nbytes)
      expected.push_back(crc32c(0, bytes.data() + at, nbytes));
  }
  std::vector<std::uint32_t> expected;
};

TEST(threads_compute_what_one_computes_and_tell_it_in_order) {
  EpollReactor reactor;
  const auto workers = std::make_shared<CopyWorkers>(reactor, CopyWorkers::Options{.num_threads = 3});
  check::Random random(check::seed());
  std::vector<std::byte> memory(24 << 20);
  random.fill(memory.data(), memory.size());
  for (const std::uint64_t nbytes : {4096u, 384u << 10, 8u << 20}) {
    const SideBySide first(1, 2, memory, nbytes), second(2, 2, memory, nbytes), gone(3, 2, memory, nbytes);
    const auto num_pieces = static_cast<std::uint32_t>(first.expected.size());
    Sums sums(Side::kSrc, workers);
    sums.add(gone, {0, num_pieces});
    sums.add(second, {num_pieces / 2, num_pieces - num_pieces / 2});  // not in numerical order
    sums.add(first, {0, num_pieces});
    sums.add(second, {0, num_pieces / 2});
    std::map<TransferKey, std::vector<std::uint32_t>> heard;
    int num_rounds = 0;
    for (; !sums.empty(); ++num_rounds) {
      REQUIRE(num_rounds < 1000);
      for (const Sums::Finished& finished : round_of(sums)) {
        if (finished.transfer == gone.key) continue;
        std::vector<std::uint32_t>& sums_of = heard[finished.transfer];
        CHECK_EQ(finished.first_piece, finished.transfer == first.key
                                           ? sums_of.size()
                                           : (num_pieces / 2 + sums_of.size()) % num_pieces);
        sums_of.insert(sums_of.end(), finished.sums.begin(), finished.sums.end());
      }
      if (num_rounds == 1) sums.forget(gone.key);  // in the middle of some pieces
    }
    CHECK(num_rounds > 3);  // no round computes everything
    CHECK(heard[first.key] == first.expected);
    std::vector<std::uint32_t>& sums_of = heard[second.key];
    REQUIRE_EQ(sums_of.size(), second.expected.size());
    std::rotate(sums_of.begin(), sums_of.end() - num_pieces / 2, sums_of.end());
    CHECK(sums_of == second.expected);
  }
}

TEST(agents_whose_threads_compute_sums_hand_over_what_they_are_asked_for) {
  check::Random random(check::seed());
  agent_pair::Pair<> pair({.transports = {"unix"}, .layout = {64, 128 << 10, 2}, .copy_threads = 3});
  for (const bool write : {true, false}) {
    pair.fill_source(random);
    TransferRequest request = pair.request(write);
    request.integrity = true;
    CHECK(agent_pair::is_done(pair.end(write).post(std::move(request))));
    CHECK(pair.quiet());
    CHECK(pair.src.memory == pair.dst.memory);
  }
}

}  // namespace
}  // namespace kvxfer
