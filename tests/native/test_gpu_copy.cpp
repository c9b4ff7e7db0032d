// The GPU's copy kernels, run by threads (emulated/cuda_threads.h): they move every byte of a part of a
// transfer and no other, all before the end is announced.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda_threads.h"
#include "gpu/make_job.h"
#include "gpu_memory.h"
#include "program_samples.h"

extern "C" void kvxfer_copy_vectors(kvxfer::gpu::CopyJob job);
extern "C" void kvxfer_copy_bulk(kvxfer::gpu::CopyJob job);

namespace {

using namespace gpu_memory;
using namespace program_samples;
using gpu::CopyJob;
using gpu::Launch;
using gpu::Part;

// Some consecutive layers and pairs of a transfer, as a move.
Move any_part(check::Random& random, const Move& whole) {
  Move part = whole;
  const PieceGrid& grid = whole.grid;
  const std::uint32_t first_pair = any(random, 0, grid.num_pairs - 1);
  part.grid.num_pairs = any(random, 1, grid.num_pairs - first_pair);
  const std::uint32_t behind = grid.num_pairs - first_pair - part.grid.num_pairs;
  part.grid.num_fine = std::min(grid.num_fine - std::min(grid.num_fine, behind), part.grid.num_pairs);
  part.grid.first_layer = any(random, 0, grid.num_layers - 1);
  part.grid.num_layers = any(random, 1, grid.num_layers - part.grid.first_layer);
  part.src_ids.assign(whole.src_ids.begin() + first_pair,
                      whole.src_ids.begin() + first_pair + part.grid.num_pairs);
  part.dst_ids.assign(whole.dst_ids.begin() + first_pair,
                      whole.dst_ids.begin() + first_pair + part.grid.num_pairs);
  return part;
}

struct Grid { unsigned num_ctas = 1, num_warps = 1; };

void launch(const Launch& launch, Grid grid) {
  const bool bulk = launch.kernel == gpu::Kernel::kCopyBulk;
  cuda_threads::launch(grid.num_ctas, grid.num_warps * gpu::kWarp,
                       bulk ? grid.num_warps * sizeof(gpu::Ring) : 0,
                       bulk ? kvxfer_copy_bulk : kvxfer_copy_vectors, launch.job);
}

// The words by which launches announce their ends, and a reader of them.
struct Ends {
  std::uint32_t arrivals = 0;
  std::uint64_t done = 0;

  // Waits for done == last, and compares the destination at once. Gives up when `over` is set.
  bool come_after(std::uint64_t last, const std::byte* dst, const std::vector<std::byte>& expected,
                  const std::atomic<bool>& over) {
    for (bool was_over = false; std::atomic_ref(done).load(std::memory_order_acquire) != last;) {
      if (was_over) return false;
      was_over = over.load(std::memory_order_relaxed);
      std::this_thread::yield();
    }
    return std::memcmp(dst, expected.data(), expected.size()) == 0;
  }
};

enum class Way { kVectors, kBulk, kBulkOfShortRuns };

// Turns a launch of 16-byte vectors into one in which each run is one bulk copy, however short.
void make_bulk(Launch& launch) {
  launch.kernel = gpu::Kernel::kCopyBulk;
  launch.job.num_slices = 0;
  std::uint32_t begin = 0;
  for (std::uint32_t k = 0; k < launch.job.num_loops; ++k) {
    gpu::JobLoop& loop = launch.job.loops[k];
    const std::uint32_t num_layers = (loop.slice_end - begin) / loop.slices_per_layer.value;
    begin = loop.slice_end;
    const std::uint32_t per_run = loop.atoms_per_run.value;
    loop.src.atom_nbytes = loop.dst.atom_nbytes = loop.last_atom_nbytes = 16 * per_run;
    loop.num_atoms /= per_run;
    loop.atoms_per_pair = gpu::divisor(loop.atoms_per_pair.value / per_run);
    loop.atoms_per_run = gpu::divisor(1);
    loop.atoms_per_slice = gpu::kWarp;
    loop.slices_per_layer = gpu::divisor((loop.num_atoms + gpu::kWarp - 1) / gpu::kWarp);
    loop.slice_end = launch.job.num_slices += num_layers * loop.slices_per_layer.value;
  }
}

// Launches all that the part needs, and compares the destination with what the program means.
void check_copies(check::Random& random, const Move& part, Memory& src, Memory& dst, Grid grid, Way way) {
  random.fill(dst.data(), dst.size());
  std::vector<std::byte> expected(dst.data(), dst.data() + dst.size());
  for (std::uint32_t piece = 0; piece < part.grid.num_pieces(); ++piece)
    apply(part, piece, src.data(), expected.data());

  auto made = gpu::make_launches(
      *part.program, {part.grid.first_layer, part.grid.num_layers, part.grid.num_pairs, part.grid.num_fine},
      part.src_ids, part.dst_ids, placement_of(src), placement_of(dst), way == Way::kBulk);
  REQUIRE_OK(made);
  std::vector<Launch> launches = std::move(made.value());
  if (way == Way::kBulkOfShortRuns) std::for_each(launches.begin(), launches.end(), make_bulk);
  for (const Launch& each : launches)
    REQUIRE((each.kernel == gpu::Kernel::kCopyVectors) == (way == Way::kVectors));
  random.shuffle(launches);

  Ends ends;
  std::atomic<bool> over = false;
  bool seen_in_order = false;
  std::jthread waiting([&] { seen_in_order = ends.come_after(launches.size(), dst.data(), expected, over); });
  for (std::uint64_t k = 0; k < launches.size(); ++k) {
    CopyJob& job = launches[k].job;
    job.src_ids = part.src_ids.data();
    job.dst_ids = part.dst_ids.data();
    job.arrivals = &ends.arrivals;
    job.done = &ends.done;
    job.done_value = k + 1;
    launch(launches[k], grid);
  }
  over = true;
  waiting.join();
  CHECK(seen_in_order);
  CHECK_EQ(ends.arrivals, 0);
  CHECK_EQ(ends.done, launches.size());
  REQUIRE(std::memcmp(dst.data(), expected.data(), expected.size()) == 0);
}

// A wish without conversions, aligned to at most what the fastest loads need.
Wish any_copy(check::Random& random) {
  Wish wish = any_wish(random);
  wish.conversions.reset();
  wish.alignment = 1u << random.below(5);
  wish.run_elements = (wish.run_elements + wish.alignment - 1) / wish.alignment * wish.alignment;
  return wish;
}

TEST(vectors_move_what_the_program_says_before_they_tell) {
  check::Random random(check::seed());
  for (int round = 0; round < 30; ++round) {
    const Wish wish = any_copy(random);
    Sample sample(random, wish, random.chance(20) ? random.below(16) : 0);
    Memory src(sample.src.end, random.chance(20) ? random.below(16) : 0),
        dst(sample.dst.end, random.chance(20) ? random.below(16) : 0);
    sample.fill_source(src.data());
    const Grid grid{any(random, 1, 5), any(random, 1, 3)};
    check_copies(random, random.chance(50) ? any_part(random, sample.move) : sample.move, src, dst, grid,
                 Way::kVectors);
  }
}

// A wish of a few runs that bulk copies accept.
Wish any_bulk_copy(check::Random& random) {
  constexpr std::uint32_t kRuns[] = {
      gpu::kLeastBulkNbytes, gpu::kLeastBulkNbytes + 16, 4096,     5008, 8192, 8208,
      gpu::kStageNbytes,     gpu::kStageNbytes + 16,     40 * 1024};
  Wish wish = any_wish(random);
  wish.conversions.reset();
  wish.alignment = 16;
  wish.num_layers = any(random, 1, 2);
  wish.unit_tokens = any(random, 1, 3);
  wish.num_coarse = random.chance(30) ? 1 : any(random, 2, 6);
  wish.num_fine = random.chance(50) ? any(random, 1, 4) : 0;
  wish.num_heads = any(random, 1, 2);
  wish.more_heads = 1;
  wish.run_elements = kRuns[random.below(std::size(kRuns))];
  return wish;
}

TEST(bulk_copies_move_what_the_program_says_before_they_tell) {
  check::Random random(check::seed());
  for (int round = 0; round < 12; ++round) {
    Sample sample(random, any_bulk_copy(random));
    Memory src(sample.src.end), dst(sample.dst.end);
    sample.fill_source(src.data());
    const Grid grid{any(random, 1, 4), any(random, 1, 3)};
    check_copies(random, random.chance(50) ? any_part(random, sample.move) : sample.move, src, dst, grid,
                 Way::kBulk);
  }
}

// Loops whose runs differ in length, and so in how they fill a stage.
Move mixed_runs(check::Random& random) {
  constexpr std::uint32_t kRuns[] = {gpu::kLeastBulkNbytes, 2 * gpu::kStageNbytes + 48, 5008,
                                     gpu::kStageNbytes};
  auto program = std::make_shared<CopyProgram>();
  program->num_layers = 2;
  std::uint64_t src_end = 16, dst_end = 32;
  for (const std::uint32_t nbytes : kRuns) {
    CopyLoop loop{};
    loop.num_layers = 2;
    loop.counts[0] = any(random, 1, 2);
    loop.counts[1] = any(random, 1, 5);
    loop.nbytes = nbytes;
    loop.src_offset = src_end;
    loop.dst_offset = dst_end;
    loop.src_strides[1] = nbytes + random.below(3) * 16;
    loop.dst_strides[1] = nbytes + random.below(3) * 16;
    loop.src_strides[0] = loop.counts[1] * loop.src_strides[1];
    loop.dst_strides[0] = loop.counts[1] * loop.dst_strides[1] + 16;
    src_end += loop.counts[0] * loop.src_strides[0];
    dst_end += loop.counts[0] * loop.dst_strides[0];
    program->loops.push_back(loop);
  }
  Move move;
  move.grid = {0, 2, 3, 3, 0};
  move.src_ids = {2, 0, 1};
  move.dst_ids = {0, 3, 1};
  for (CopyLoop& loop : program->loops) {
    loop.src_block_stride = src_end;
    loop.dst_block_stride = dst_end;
    loop.src_layer_stride = 3 * src_end;
    loop.dst_layer_stride = 4 * dst_end;
  }
  move.program = program;
  return move;
}

TEST(bulk_copies_of_all_lengths_share_a_ring) {
  check::Random random(check::seed());
  for (int round = 0; round < 6; ++round) {
    const Move move = mixed_runs(random);
    const CopyLoop& loop = move.program->loops[0];
    Memory src(2 * loop.src_layer_stride + 64), dst(2 * loop.dst_layer_stride + 64);
    random.fill(src.data(), src.size());
    check_copies(random, move, src, dst, {any(random, 1, 2), any(random, 1, 4)}, Way::kBulk);
  }
}

TEST(a_stage_holds_as_many_short_runs_as_a_warp_has_lanes) {
  check::Random random(check::seed());
  for (int round = 0; round < 6; ++round) {
    Wish wish = any_bulk_copy(random);
    wish.num_heads = any(random, 1, 5);
    wish.run_elements = any(random, 1, gpu::kStageNbytes / gpu::kWarp / 16) * 16;
    Sample sample(random, wish);
    Memory src(sample.src.end), dst(sample.dst.end);
    sample.fill_source(src.data());
    check_copies(random, sample.move, src, dst, {1, any(random, 1, 2)}, Way::kBulkOfShortRuns);
  }
}

TEST(a_launch_that_nobody_waits_for_tells_nobody) {
  check::Random random(check::seed());
  Sample sample(random, Wish{});
  Memory src(sample.src.end), dst(sample.dst.end);
  sample.fill_source(src.data());
  auto launches = gpu::make_launches(*sample.move.program, {0, 2, 8, 0}, sample.move.src_ids,
                                     sample.move.dst_ids, placement_of(src), placement_of(dst), false);
  REQUIRE_OK(launches);
  for (Launch& one : launches.value()) {
    one.job.src_ids = sample.move.src_ids.data();
    one.job.dst_ids = sample.move.dst_ids.data();
    launch(one, {2, 1});  // announcing an end would store to a null pointer
  }
}

}  // namespace
