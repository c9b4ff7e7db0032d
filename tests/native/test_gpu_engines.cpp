// Copies between a GPU and the host's memory by copy engines: which way runs take, what arrives, how ends are
// announced, and what happens if the driver lacks the calls or they fail. Over an emulated driver.
#include <cstring>
#include <optional>
#include <thread>

#include "block_programs.h"
#include "check.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu/copy_stream.h"
#include "gpu_memory.h"
#include "held_launches.h"
#include "program_samples.h"

namespace gpu_engines_test {
namespace {

using namespace gpu_memory;
using namespace program_samples;
using emulated::device;
using emulated::driver;
using emulated::launches;
using gpu::Calibration;
using gpu::CopyStream;
using gpu::Direction;
using gpu::Form;
using gpu::Runs;
using gpu::Way;

constexpr std::uint64_t kKiB = 1024;

// ---- the choice ----

TEST(without_a_calibration_everything_goes_by_kernels) {
  for (const Direction direction : {Direction::kToHost, Direction::kToDevice, Direction::kOnDevice})
    for (const Form form : {Form::kRuns, Form::kRows})
      CHECK(gpu::way_of(direction, Runs{UINT64_MAX, UINT64_MAX, 16, form}, Calibration()) == Way::kKernel);
  CHECK(!Calibration().uses_engines());
  CHECK(!gpu::calibration_of({}).uses_engines());
}

TEST(a_device_s_own_memory_is_never_for_engines) {
  CHECK(Calibration::always().uses_engines());
  CHECK(gpu::way_of(Direction::kToHost, Runs{1, 1, 1}, Calibration::always()) == Way::kCopyEngine);
  CHECK(gpu::way_of(Direction::kOnDevice, Runs{1 << 30, 1, 16}, Calibration::always()) == Way::kKernel);
}

TEST(runs_go_by_engines_from_the_length_on_that_was_found) {
  Calibration calibration;
  calibration.least_run_nbytes[0][0][0] = 16 * kKiB;  // to the host, runs, aligned
  calibration.least_run_nbytes[0][0][1] = 4 * kKiB;  // less alignment
  calibration.least_run_nbytes[1][1][0] = 64 * kKiB;  // to the device, rows, aligned
  const auto way = [&](Direction direction, std::uint64_t nbytes, std::uint64_t num, std::uint32_t alignment,
                       Form form = Form::kRuns) {
    return gpu::way_of(direction, Runs{nbytes, num, alignment, form}, calibration);
  };
  CHECK(way(Direction::kToHost, 16 * kKiB, 16, 16) == Way::kCopyEngine);
  CHECK(way(Direction::kToHost, 16 * kKiB, 16, 64) == Way::kCopyEngine);
  CHECK(way(Direction::kToHost, 16 * kKiB - 16, 1000, 16) == Way::kKernel);
  CHECK(way(Direction::kToHost, 16 * kKiB - 16, 1000, 8) == Way::kCopyEngine);
  CHECK(way(Direction::kToHost, 4 * kKiB - 1, 1000, 1) == Way::kKernel);
  CHECK(way(Direction::kToHost, 64 * kKiB, 100, 16, Form::kRows) == Way::kKernel);
  CHECK(way(Direction::kToDevice, 64 * kKiB, 100, 16, Form::kRows) == Way::kCopyEngine);
  CHECK(way(Direction::kToDevice, 64 * kKiB, 100, 16) == Way::kKernel);
  // Copies this small were not measured.
  CHECK(way(Direction::kToHost, 16 * kKiB, 15, 16) == Way::kKernel);
  CHECK(way(Direction::kToHost, Calibration::kLeastCopyNbytes, 1, 16) == Way::kCopyEngine);
  CHECK(way(Direction::kToHost, UINT64_MAX / 2, 4, 16) == Way::kCopyEngine);  // a product beyond 2^64
  CHECK(way(Direction::kToHost, 16 * kKiB, 0, 16) == Way::kKernel);
}

TEST(engines_begin_where_they_are_as_fast_at_every_longer_run) {
  const auto sample = [](std::uint64_t nbytes, std::uint64_t kernel, std::uint64_t engine,
                         Direction direction = Direction::kToHost, std::uint32_t alignment = 16) {
    return gpu::WaySample{direction, Form::kRuns, alignment, nbytes, kernel, engine};
  };
  // Faster at 4 KiB by chance, slower at 16, a tie at 64 (within a thirty-second), faster at 256.
  const gpu::WaySample samples[] = {sample(256 * kKiB, 3200, 3000),
                                    sample(4 * kKiB, 3200, 3100),
                                    sample(64 * kKiB, 3200, 3300),
                                    sample(16 * kKiB, 3200, 3301),
                                    sample(16 * kKiB, 3200, 100, Direction::kToDevice),
                                    sample(4 * kKiB, 3200, 100, Direction::kToHost, 8),
                                    sample(4 * kKiB, 3200, 100, Direction::kOnDevice)};
  const Calibration found = gpu::calibration_of(samples);
  CHECK_EQ(found.least_run_nbytes[0][0][0], 64 * kKiB);
  CHECK_EQ(found.least_run_nbytes[1][0][0], 16 * kKiB);
  CHECK_EQ(found.least_run_nbytes[0][0][1], 4 * kKiB);
  CHECK_EQ(found.least_run_nbytes[0][1][0], Calibration::kNever);
  CHECK_EQ(found.least_run_nbytes[1][0][1], Calibration::kNever);
  CHECK(!gpu::calibration_of(std::span(samples + 3, 1)).uses_engines());
}

// ---- what engines are told ----

TEST(runs_that_follow_each_other_are_one_and_even_ones_are_rows) {
  CopyLoop loop{};
  loop.num_layers = 1;
  loop.nbytes = 512;
  loop.counts[0] = 4;
  loop.counts[1] = 2;
  loop.src_strides[0] = loop.dst_strides[0] = 1024;
  loop.src_strides[1] = loop.dst_strides[1] = 512;
  gpu::PairRuns runs = gpu::runs_of_pair(loop);
  CHECK_EQ(runs.nbytes, 4096);
  CHECK_EQ(runs.counts[0] * runs.counts[1], 1);
  CHECK(gpu::form_of(runs) == Form::kRuns);
  loop.src_strides[0] = 8192;
  runs = gpu::runs_of_pair(loop);
  CHECK_EQ(runs.nbytes, 1024);
  CHECK_EQ(runs.counts[1], 4);
  CHECK_EQ(runs.src_strides[1], 8192);
  CHECK(gpu::form_of(runs) == Form::kRows);
  loop.src_strides[0] = 0;  // every row is read from the same place: no pitch
  CHECK(gpu::form_of(gpu::runs_of_pair(loop)) == Form::kRuns);
  loop.src_strides[0] = gpu::kMostPitch + 1;
  CHECK(gpu::form_of(gpu::runs_of_pair(loop)) == Form::kRuns);
}

// ---- copies ----

struct Bench {
  explicit Bench(Calibration calibration = Calibration::always(), const gpu::Driver& calls = driver(),
                 gpu::Kernels kernels = emulated::fast_kernels()) {
    launches().reset();
    context.emplace(take(gpu::PrimaryContext::retain(calls, 0)));
    stream =
        take(CopyStream::create(calls, context->get(), kernels,
                                {.num_ctas = 1, .tables_nbytes = 64 * 1024, .calibration = calibration}));
  }
  ~Bench() {
    launches().let_all();
    stream.reset();
    device().engine_error = device().word_error = device().stream_error = 0;
    device().launches_until_failure = -1;
    device().hangs = false;
  }
  template <class T>
  static T take(Result<T> result) {
    REQUIRE_OK(result);
    return std::move(result).value();
  }
  Result<CopyStream::Ticket> submit(const Move& move, const DeviceMemory& src, const DeviceMemory& dst,
                                    Direction direction = Direction::kToHost) {
    return stream->submit(
        *move.program, {move.grid.first_layer, move.grid.num_layers, move.grid.num_pairs, move.grid.num_fine},
        move.src_ids, move.dst_ids, gpu::Placement(src.address()), gpu::Placement(dst.address()), direction);
  }
  void await(CopyStream::Ticket ticket) const {
    while (stream->done() < ticket) {
      REQUIRE(stream->check().ok());
      std::this_thread::yield();
    }
  }

  std::optional<gpu::PrimaryContext> context;
  std::unique_ptr<CopyStream> stream;
};

std::vector<std::byte> expected_of(const Move& move, const std::byte* src, const DeviceMemory& dst) {
  std::vector<std::byte> expected(dst.data(), dst.data() + dst.size());
  for (std::uint32_t piece = 0; piece < move.grid.num_pieces(); ++piece)
    apply(move, piece, src, expected.data());
  return expected;
}

// A transfer between two caches, and the expected result.
struct Transfer {
  Transfer(check::Random& random, const Wish& wish)
      : sample(random, wish), src(sample.src.end), dst(sample.dst.end) {
    random.fill(dst.data(), dst.size());
    sample.fill_source(src.data());
    expected = expected_of(sample.move, src.data(), dst);
  }
  bool arrived() const { return std::memcmp(dst.data(), expected.data(), expected.size()) == 0; }

  Sample sample;
  DeviceMemory src, dst;
  std::vector<std::byte> expected;
};

TEST(programs_of_every_kind_arrive_by_engines_and_what_converts_by_kernels) {
  check::Random random(check::seed());
  Bench bench(Calibration::always(), driver(), emulated::kernels());
  const std::uint64_t batches = device().num_batches, rows = device().num_2d_copies;
  for (int round = 0; round < 60; ++round) {
    Wish wish = any_wish(random);
    if (round % 4 != 0) wish.conversions.reset();
    Transfer transfer(random, wish);
    const auto ticket = bench.submit(transfer.sample.move, transfer.src, transfer.dst,
                                     random.chance(50) ? Direction::kToHost : Direction::kToDevice);
    REQUIRE_OK(ticket);
    bench.await(ticket.value());
    REQUIRE(transfer.arrived());
  }
  CHECK(device().num_batches > batches);
  CHECK(device().num_2d_copies > rows);
}

// Blocks of one layer, some of which are adjacent at one end.
Move blocks(const std::vector<std::uint32_t>& src_ids, const std::vector<std::uint32_t>& dst_ids,
            std::uint64_t nbytes) {
  Move move;
  move.program = std::make_shared<CopyProgram>(block_programs::pages_of(nbytes));
  const auto num = static_cast<std::uint32_t>(src_ids.size());
  move.grid = {0, 1, num, num, 0};
  move.src_ids = src_ids;
  move.dst_ids = dst_ids;
  return move;
}

TEST(more_copies_than_a_batch_holds_are_several_and_neighbours_are_one) {
  constexpr std::uint32_t kNum = 3 * gpu::EngineCopies::kMostCopies + 1;
  constexpr std::uint64_t kNbytes = 64;
  check::Random random(check::seed());
  Bench bench;
  DeviceMemory src(kNum * kNbytes), dst(kNum * kNbytes);
  random.fill(src.data(), src.size());
  std::vector<std::uint32_t> straight(kNum), back(kNum);
  for (std::uint32_t k = 0; k < kNum; ++k) straight[k] = k, back[k] = kNum - 1 - k;
  std::uint64_t batches = device().num_batches;
  auto ticket = bench.submit(blocks(straight, back, kNbytes), src, dst);
  REQUIRE_OK(ticket);
  bench.await(ticket.value());
  for (std::uint32_t k = 0; k < kNum; ++k)
    REQUIRE(std::memcmp(src.data() + k * kNbytes, dst.data() + back[k] * kNbytes, kNbytes) == 0);
  CHECK_EQ(device().num_batches - batches, 4);

  batches = device().num_batches;
  const std::uint64_t copies = device().num_copies;
  ticket = bench.submit(blocks(straight, straight, kNbytes), src, dst);
  REQUIRE_OK(ticket);
  bench.await(ticket.value());
  CHECK(std::memcmp(src.data(), dst.data(), src.size()) == 0);
  CHECK_EQ(device().num_batches - batches, 1);
  CHECK_EQ(device().num_copies - copies, 1);
}

// Short runs that are adjacent count as one long run.
TEST(the_choice_counts_neighbours_as_one_run) {
  constexpr std::uint32_t kNum = 128;
  constexpr std::uint64_t kNbytes = 4 * kKiB;
  Calibration calibration;
  calibration.least_run_nbytes[0][0][0] = 64 * kKiB;
  Bench bench(calibration);
  DeviceMemory src(2 * kNum * kNbytes), dst(2 * kNum * kNbytes);
  std::vector<std::uint32_t> straight(kNum), apart(kNum);
  for (std::uint32_t k = 0; k < kNum; ++k) straight[k] = k, apart[k] = 2 * k;
  for (const bool together : {true, false}) {
    const std::uint64_t batches = device().num_batches;
    const auto ticket = bench.submit(blocks(together ? straight : apart, straight, kNbytes), src, dst);
    REQUIRE_OK(ticket);
    bench.await(ticket.value());
    CHECK_EQ(device().num_batches - batches, together ? 1 : 0);
  }
}

TEST(ends_of_both_ways_are_told_in_order_by_one_word) {
  check::Random random(check::seed());
  Bench bench(Calibration::always(), driver(), {{&emulated::held_copy, nullptr, &emulated::convert}});
  Wish wish;
  Transfer first(random, wish), second(random, wish), third(random, wish);
  launches().let(0);
  const auto by_engine = bench.submit(first.sample.move, first.src, first.dst, Direction::kToHost);
  const auto by_kernel = bench.submit(second.sample.move, second.src, second.dst, Direction::kOnDevice);
  const auto again = bench.submit(third.sample.move, third.src, third.dst, Direction::kToDevice);
  REQUIRE_OK(by_engine);
  REQUIRE_OK(by_kernel);
  REQUIRE_OK(again);
  launches().await_held(1);
  CHECK_EQ(bench.stream->done(), 0);
  CHECK(bench.stream->check().ok());
  launches().let_all();
  bench.await(by_engine.value());
  CHECK(first.arrived());
  bench.await(by_kernel.value());
  CHECK(second.arrived());
  bench.await(again.value());
  CHECK(third.arrived());
}

// ---- failures ----

TEST(a_driver_without_the_calls_copies_by_kernels) {
  check::Random random(check::seed());
  for (const bool batch : {true, false}) {
    gpu::Driver older = driver();
    if (batch)
      older.copy_batch = nullptr;
    else
      older.stream_write_64 = nullptr;
    Bench bench(Calibration::always(), older);
    CHECK(!bench.stream->has_copy_engines());
    const std::uint64_t batches = device().num_batches;
    Transfer transfer(random, Wish{});
    const auto ticket = bench.submit(transfer.sample.move, transfer.src, transfer.dst);
    REQUIRE_OK(ticket);
    bench.await(ticket.value());
    CHECK(transfer.arrived());
    CHECK_EQ(device().num_batches, batches);
  }
}

TEST(a_device_that_refuses_engines_goes_on_by_kernels) {
  check::Random random(check::seed());
  for (const bool at_word : {true, false}) {
    Bench bench;
    (at_word ? device().word_error : device().engine_error) = gpu::kNotSupported;
    for (int round = 0; round < 3; ++round) {
      Transfer transfer(random, Wish{});
      const auto ticket = bench.submit(transfer.sample.move, transfer.src, transfer.dst);
      REQUIRE_OK(ticket);
      bench.await(ticket.value());
      CHECK(transfer.arrived());
      CHECK(!bench.stream->has_copy_engines());
    }
  }
}

TEST(a_call_that_fails_says_so_and_nothing_follows) {
  check::Random random(check::seed());
  for (const bool at_word : {true, false}) {
    Bench bench;
    (at_word ? device().word_error : device().engine_error) = emulated::kInvalidValue;
    Transfer transfer(random, Wish{});
    const auto failed = bench.submit(transfer.sample.move, transfer.src, transfer.dst);
    device().word_error = device().engine_error = 0;
    CHECK_REFUSED(failed.status(), Code::kSystem, at_word ? "cuStreamWriteValue64" : "cuMemcpyBatchAsync");
    // Kernels do not copy them either: it is unknown whether some of the copy is under way.
    CHECK_EQ(bench.submit(transfer.sample.move, transfer.src, transfer.dst).status().code(), Code::kSystem);
    CHECK_EQ(bench.stream->check().code(), Code::kSystem);
  }
}

TEST(memory_that_is_gone_is_refused_or_the_device_s_end) {
  check::Random random(check::seed());
  {
    Bench bench;
    std::optional<DeviceMemory> src(std::in_place, 4096), dst(std::in_place, 4096);
    const gpu::Address gone = dst->address();
    dst.reset();
    const auto refused =
        bench.stream->submit(*blocks({0}, {0}, 4096).program, {0, 1, 1, 0}, std::vector<std::uint32_t>{0},
                             std::vector<std::uint32_t>{0}, gpu::Placement(src->address()),
                             gpu::Placement(gone), Direction::kToDevice);
    CHECK_EQ(refused.status().code(), Code::kSystem);
  }
  Bench bench;
  launches().let(0);
  std::optional<DeviceMemory> src(std::in_place, 4096), dst(std::in_place, 4096);
  const auto ticket = bench.submit(blocks({0}, {0}, 4096), *src, *dst, Direction::kToDevice);
  REQUIRE_OK(ticket);
  launches().await_held(1);
  dst.reset();
  launches().let_all();
  const Status ended = bench.stream->synchronize();
  CHECK_REFUSED(ended, Code::kSystem, "ILLEGAL_ADDRESS");
  CHECK(bench.stream->done() < ticket.value());
  CHECK_EQ(bench.stream->check().code(), Code::kSystem);
}

TEST(copies_that_never_end_are_the_device_s_end_when_it_says_so) {
  check::Random random(check::seed());
  Bench bench;
  device().hangs = true;
  Transfer transfer(random, Wish{});
  const auto ticket = bench.submit(transfer.sample.move, transfer.src, transfer.dst);
  REQUIRE_OK(ticket);
  device().stream_error = emulated::kLaunchFailed;
  CHECK_EQ(bench.stream->check().code(), Code::kSystem);
  CHECK_EQ(bench.submit(transfer.sample.move, transfer.src, transfer.dst).status().code(), Code::kSystem);
  CHECK_EQ(bench.stream->done(), 0);
}

}  // namespace
}  // namespace gpu_engines_test
