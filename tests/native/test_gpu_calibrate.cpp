// The choice of how many CTAs copy between a GPU and the host, for any samples; and calibration: what it
// measures, in which order, and what it does without engines, time or memory. Over an emulated driver.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu/calibrate.h"
#include "gpu/copy_bench.h"

namespace gpu_calibrate_test {
namespace {

using namespace kvxfer;
using emulated::device;
using emulated::driver;
using gpu::CtaSample;
using gpu::Direction;
using gpu::Form;
using gpu::kMostStagingCtas;
using gpu::kUnmeasuredCtas;
using gpu::staging_ctas_of;

// ---- the choice ----

constexpr std::uint64_t kMiB = 1024 * 1024;
using Ladder = std::map<std::uint32_t, std::uint64_t>;  // ns by CTAs

std::vector<CtaSample> samples_of(const Ladder& to_host, const Ladder& to_device) {
  std::vector<CtaSample> samples;
  for (const auto& [num, ns] : to_host) samples.push_back({Direction::kToHost, num, kMiB, ns});
  for (const auto& [num, ns] : to_device) samples.push_back({Direction::kToDevice, num, kMiB, ns});
  return samples;
}

TEST(the_fewest_ctas_that_are_near_the_best_both_ways_are_taken) {
  CHECK_EQ(staging_ctas_of({}), kUnmeasuredCtas);
  const Ladder by_two = {{1, 3200}, {2, 1700}, {4, 1600}, {8, 1600}};
  const Ladder by_four = {{1, 3200}, {2, 1701}, {4, 1600}, {8, 1600}};
  CHECK_EQ(staging_ctas_of(samples_of(by_two, by_two)), 2);  // a sixteenth more
  CHECK_EQ(staging_ctas_of(samples_of(by_four, by_four)), 4);
  CHECK_EQ(staging_ctas_of(samples_of(by_two, by_four)), 4);
  CHECK_EQ(staging_ctas_of(samples_of(by_four, by_two)), 4);
  const Ladder by_one = {{1, 1600}, {2, 1600}, {4, 1600}, {8, 1600}};
  CHECK_EQ(staging_ctas_of(samples_of(by_one, by_one)), 1);
  const Ladder by_eight = {{1, 8000}, {2, 4000}, {4, 2000}, {8, 1000}};
  CHECK_EQ(staging_ctas_of(samples_of(by_one, by_eight)), 8);
}

TEST(ladders_that_fall_again_are_judged_number_by_number) {
  // More CTAs than necessary may cost time; a dip at one number does not speak for its neighbours.
  const Ladder falls = {{1, 2000}, {2, 1000}, {4, 3000}, {8, 3000}};
  CHECK_EQ(staging_ctas_of(samples_of(falls, falls)), 2);
  const Ladder dips = {{1, 2000}, {2, 1000}, {4, 3000}, {8, 1000}};
  CHECK_EQ(staging_ctas_of(samples_of(dips, {{1, 9000}, {2, 2000}, {4, 1000}, {8, 1000}})), 8);
  // The directions want different numbers: the number with the best worse direction is chosen.
  const Ladder few = {{1, 1000}, {2, 1300}, {4, 2000}, {8, 4000}};
  const Ladder many = {{1, 4000}, {2, 1400}, {4, 1200}, {8, 1000}};
  CHECK_EQ(staging_ctas_of(samples_of(few, many)), 2);
  CHECK_EQ(staging_ctas_of(samples_of(many, few)), 2);
}

TEST(samples_that_are_missing_or_come_twice_or_differ_in_length_are_no_harm) {
  const Ladder whole = {{1, 3200}, {2, 1600}, {4, 1500}, {8, 1500}};
  CHECK_EQ(staging_ctas_of(samples_of(whole, {})), 4);  // a direction without samples is ignored
  CHECK_EQ(staging_ctas_of(samples_of({}, whole)), 4);
  CHECK_EQ(staging_ctas_of(samples_of({{8, 1}}, {})), 8);
  CHECK_EQ(staging_ctas_of(samples_of(whole, {{1, 3200}, {8, 1500}})), 8);  // 4 was not measured both ways
  CHECK_EQ(staging_ctas_of(samples_of({{1, 10}}, {{2, 10}})), kUnmeasuredCtas);

  std::vector<CtaSample> twice = samples_of(whole, whole);
  for (const Direction direction : {Direction::kToHost, Direction::kToDevice})
    twice.push_back({direction, 1, kMiB, 1500});  // the best of several samples counts
  CHECK_EQ(staging_ctas_of(twice), 1);
  // Twice the time for twice the bytes.
  const CtaSample longer[] = {{Direction::kToHost, 1, 2 * kMiB, 2000}, {Direction::kToHost, 8, kMiB, 1000}};
  CHECK_EQ(staging_ctas_of(longer), 1);
}

TEST(what_cannot_have_been_measured_has_no_say) {
  const CtaSample hostile[] = {
      {Direction::kOnDevice, 1, kMiB, 1},        {Direction::kToHost, 0, kMiB, 1},
      {Direction::kToHost, UINT32_MAX, kMiB, 1}, {Direction::kToHost, kMostStagingCtas + 1, kMiB, 1},
      {Direction::kToDevice, 2, kMiB, 0},        {Direction::kToDevice, 1, 0, 1}};
  CHECK_EQ(staging_ctas_of(hostile), kUnmeasuredCtas);
  std::vector<CtaSample> samples = samples_of({{1, 2000}, {2, 1000}}, {{1, 2000}, {2, 1000}});
  samples.insert(samples.end(), std::begin(hostile), std::end(hostile));
  CHECK_EQ(staging_ctas_of(samples), 2);
  const CtaSample extremes[] = {{Direction::kToHost, 1, 1, UINT64_MAX},
                                {Direction::kToHost, 2, UINT64_MAX, 1}};
  CHECK_EQ(staging_ctas_of(extremes), 2);
}

// Checked in another way: the chosen number is good enough and no smaller one is; or none is, and none is
// better.
TEST(any_samples_give_a_number_that_was_measured) {
  check::Random random(check::seed());
  for (int round = 0; round < 2000; ++round) {
    std::map<Direction, Ladder> ladders;
    for (const Direction direction : {Direction::kToHost, Direction::kToDevice})
      for (std::uint32_t num = 1; num <= kMostStagingCtas; ++num)
        if (random.chance(60)) ladders[direction][num] = 1000 + random.below(1000);
    std::vector<CtaSample> samples = samples_of(ladders[Direction::kToHost], ladders[Direction::kToDevice]);
    std::erase_if(ladders, [](const auto& each) { return each.second.empty(); });
    // How far a number is from the best; nothing if it was not measured.
    const auto excess = [&](std::uint32_t num) -> std::optional<double> {
      double worst = 0;
      for (const auto& [direction, ladder] : ladders) {
        const auto least = std::min_element(ladder.begin(), ladder.end(),
                                            [](const auto& a, const auto& b) { return a.second < b.second; });
        const auto found = ladder.find(num);
        if (found == ladder.end()) return {};
        worst = std::max(worst, static_cast<double>(found->second) / static_cast<double>(least->second));
      }
      return ladders.empty() ? std::optional<double>() : worst;
    };
    std::optional<std::uint32_t> expected;
    for (std::uint32_t num = kMostStagingCtas; num >= 1; --num)
      if (excess(num) && *excess(num) <= 1.0625) expected = num;
    if (!expected)
      for (std::uint32_t num = kMostStagingCtas; num >= 1; --num)
        if (excess(num) && (!expected || *excess(num) <= *excess(*expected))) expected = num;
    const std::uint32_t chosen = staging_ctas_of(samples);
    CHECK_EQ(chosen, expected.value_or(kUnmeasuredCtas));
    std::reverse(samples.begin(), samples.end());
    CHECK_EQ(staging_ctas_of(samples), chosen);
  }
}

// ---- the calibration ----

constexpr std::uint64_t kLong = 600'000'000'000;  // a quarter of it goes to CTAs, enough under any sanitizer
constexpr std::size_t kPiecesOfRound = gpu::kBenchNbytes / (512 * 1024);

// The CTAs of launches, in order; how many of them are not slowed down; and whether bytes are copied, which
// takes a minute under a sanitizer.
struct Launched {
  std::mutex mutex;
  std::vector<unsigned> ctas;
  std::atomic<unsigned> fast{0};
  std::atomic<bool> copies{false};

  std::vector<unsigned> taken() {
    const std::lock_guard lock(mutex);
    return std::exchange(ctas, {});
  }
};
Launched& launched() {
  static Launched one;
  return one;
}

void run(unsigned num_ctas, unsigned, unsigned, void** arguments) {
  {
    const std::lock_guard lock(launched().mutex);
    launched().ctas.push_back(num_ctas);
  }
  const unsigned fast = launched().fast;
  if (fast != 0 && num_ctas != fast) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const auto& job = *static_cast<gpu::CopyJob*>(arguments[0]);
  if (launched().copies)
    emulated::copy_on_host(job);
  else if (job.done != nullptr)
    std::atomic_ref(*job.done).store(job.done_value, std::memory_order_release);
}
gpu::FunctionHandle counted_copy{&run, {sizeof(gpu::CopyJob)}};
const gpu::Kernels kKernels = {{&counted_copy, nullptr, &emulated::convert}};

struct Bench {
  Bench() : context(take(gpu::PrimaryContext::retain(driver(), 0))) { launched().taken(); }
  ~Bench() {
    launched().fast = 0;
    launched().copies = false;
    device().engine_error = 0;
    device().launches_until_failure = -1;
    device().num_multiprocessors = 132;
    device().most_host_nbytes = device().most_nbytes = SIZE_MAX;
  }
  template <class T>
  static T take(Result<T> result) {
    REQUIRE_OK(result);
    return std::move(result).value();
  }
  Result<gpu::Measured> calibrate(std::uint64_t most_ns = kLong, const gpu::Driver& calls = driver()) {
    return gpu::calibrate(calls, context.get(), kKernels, {}, most_ns);
  }

  gpu::PrimaryContext context;
};

std::set<std::uint32_t> numbers_of(const std::vector<CtaSample>& samples, Direction direction) {
  std::set<std::uint32_t> numbers;
  for (const CtaSample& sample : samples)
    if (sample.direction == direction && sample.nbytes == gpu::kBenchNbytes && sample.ns > 0)
      numbers.insert(sample.num_ctas);
  return numbers;
}

TEST(ctas_are_measured_round_by_round_in_both_directions) {
  Bench bench;
  gpu::Driver older = driver();
  older.copy_batch = nullptr;  // so that calibration ends here
  const gpu::Measured measured = Bench::take(bench.calibrate(kLong, older));
  CHECK_EQ(measured.ctas.size(), 8);
  for (const Direction direction : {Direction::kToHost, Direction::kToDevice})
    CHECK_EQ(numbers_of(measured.ctas, direction), (std::set<std::uint32_t>{1, 2, 4, 8}));
  // Pieces of half a MiB have work for all CTAs of a launch, and each round tries every number.
  const std::vector<unsigned> ctas = launched().taken();
  constexpr std::size_t kLaunches = 6 * 4 * 2 * kPiecesOfRound;
  REQUIRE(ctas.size() == kLaunches);
  for (std::size_t k = 0; k < kLaunches; ++k) CHECK_EQ(ctas[k], 1u << (k / (2 * kPiecesOfRound) % 4));
}

TEST(no_more_ctas_are_measured_than_the_device_has_multiprocessors) {
  Bench bench;
  gpu::Driver older = driver();
  older.copy_batch = nullptr;
  for (const auto& [num, expected] :
       std::map<int, std::set<std::uint32_t>>{{1, {1}}, {3, {1, 2}}, {4, {1, 2, 4}}, {0, {1}}}) {
    device().num_multiprocessors = num;
    const gpu::Measured measured = Bench::take(bench.calibrate(kLong, older));
    for (const Direction direction : {Direction::kToHost, Direction::kToDevice})
      CHECK_EQ(numbers_of(measured.ctas, direction), expected);
    CHECK(staging_ctas_of(measured.ctas) <= *expected.rbegin());
  }
}

TEST(both_ways_are_measured_with_the_number_that_was_found) {
  Bench bench;
  launched().fast = 2;
  launched().copies = true;
  const std::uint64_t batches = device().num_batches, rows = device().num_2d_copies;
  const gpu::Measured measured = Bench::take(bench.calibrate());
  CHECK(measured.engines.ok());
  // Runs of four lengths and rows of three, in two directions, at two alignments.
  std::set<std::tuple<Direction, Form, std::uint32_t, std::uint64_t>> kinds;
  for (const gpu::WaySample& sample : measured.ways) {
    kinds.insert({sample.direction, sample.form, sample.alignment, sample.run_nbytes});
    CHECK(sample.kernel_ns > 0 && sample.engine_ns > 0);
  }
  CHECK_EQ(measured.ways.size(), 28);
  CHECK_EQ(kinds.size(), 28);
  CHECK(device().num_batches > batches);
  CHECK(device().num_2d_copies > rows);

  // After the CTAs' rounds come pieces of 256 KiB, which have work for four CTAs, or for more if they are not
  // aligned.
  const std::vector<unsigned> ctas = launched().taken();
  const std::uint32_t chosen = staging_ctas_of(measured.ctas);
  constexpr std::size_t kOfCtas = 6 * 4 * 2 * kPiecesOfRound;
  REQUIRE(ctas.size() > kOfCtas);
  const std::set<unsigned> of_ways(ctas.begin() + kOfCtas, ctas.end());
  CHECK_EQ(*of_ways.rbegin(), chosen);
  CHECK_EQ(*of_ways.begin(), std::min(chosen, 4u));
}

TEST(without_engines_ctas_are_measured_all_the_same_and_it_says_why) {
  Bench bench;
  std::vector<gpu::Driver> drivers(3, driver());
  drivers[0].copy_batch = nullptr;
  drivers[1].stream_write_64 = nullptr;
  for (std::size_t k = 0; k < drivers.size(); ++k) {
    if (k == 2) device().engine_error = gpu::kNotSupported;  // the driver has the calls, and refuses them
    const gpu::Measured measured = Bench::take(bench.calibrate(kLong, drivers[k]));
    CHECK_EQ(measured.ctas.size(), 8);
    CHECK(measured.ways.empty());
    CHECK_REFUSED(measured.engines, Code::kUnsupported, "CUDA 12.8");
  }
}

TEST(without_time_nothing_is_found_and_nothing_is_wrong) {
  Bench bench;
  const gpu::Measured none = Bench::take(bench.calibrate(0));
  CHECK(none.ctas.empty() && none.ways.empty());
  CHECK(none.engines.ok());
  CHECK(launched().taken().empty());
  // With any time limit, both directions have the same numbers measured.
  for (std::uint64_t most_ns = 1'000'000; most_ns < 200'000'000; most_ns *= 3) {
    const gpu::Measured some = Bench::take(bench.calibrate(most_ns));
    CHECK(some.ctas.empty() || some.ctas.size() == 8);
    for (const CtaSample& sample : some.ctas) CHECK(sample.ns > 0 && sample.ns < UINT64_MAX);
    for (const gpu::WaySample& sample : some.ways)
      CHECK(sample.kernel_ns < UINT64_MAX && sample.engine_ns < UINT64_MAX);
  }
}

TEST(a_device_that_fails_meanwhile_ends_it_in_words) {
  Bench bench;
  // The failure comes among the CTAs' launches, or among those of ways and copies by engines.
  for (const int launches : {0, 40, 384, 400, 600}) {
    device().launches_until_failure = launches;
    const Result<gpu::Measured> failed = bench.calibrate();
    device().launches_until_failure = -1;
    CHECK_EQ(failed.status().code(), Code::kSystem);
  }
  gpu::Driver ignorant = driver();
  ignorant.device_attribute = [](int*, int, gpu::Device) { return emulated::kInvalidValue; };
  const Result<gpu::Measured> failed = bench.calibrate(kLong, ignorant);
  CHECK_REFUSED(failed.status(), Code::kSystem, "multiprocessors");
}

TEST(memory_that_is_not_to_be_had_is_said_and_what_was_taken_is_given_back) {
  Bench bench;
  const auto count = [&] {
    const std::lock_guard lock(device().mutex);
    return std::pair(device().blocks.size(), device().pinned.size());
  };
  const auto before = count();
  for (const bool on_host : {true, false}) {
    device().most_host_nbytes = on_host ? 2 * kMiB : SIZE_MAX;
    device().most_nbytes = on_host ? SIZE_MAX : 2 * kMiB;
    const Result<gpu::Measured> failed = bench.calibrate();
    CHECK_REFUSED(failed.status(), Code::kSystem, "OUT_OF_MEMORY");
  }
  device().most_host_nbytes = device().most_nbytes = SIZE_MAX;
  gpu::Driver older = driver();
  older.copy_batch = nullptr;
  Bench::take(bench.calibrate(kLong, older));
  CHECK(count() == before);
}

}  // namespace
}  // namespace gpu_calibrate_test
