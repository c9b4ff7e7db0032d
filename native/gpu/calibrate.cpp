#include "gpu/calibrate.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "gpu/bulk_ring.h"
#include "gpu/copy_bench.h"

namespace kvxfer::gpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 5;  // after one warm-up round
constexpr Direction kDirections[] = {Direction::kToHost, Direction::kToDevice};

// To measure numbers of CTAs: the pieces of a stream (transport.h: Capabilities::piece_nbytes), since one
// launch copies one piece, and what more CTAs gain is partly lost between launches. Each run fills a stage of
// the bulk kernel, as longer runs do piece by piece: shorter runs might give another number, longer ones do
// not.
constexpr std::uint64_t kStreamPieceNbytes = 512 * 1024;
constexpr std::uint64_t kCtaRunNbytes = kStageNbytes;
static_assert(kStreamPieceNbytes / (kRings * kStageNbytes) == kMostStagingCtas);

// To measure ways: the shortest copies for which copy engines are used.
constexpr std::uint64_t kWayPieceNbytes = Calibration::kLeastCopyNbytes;
constexpr std::uint64_t kWayRunNbytes[] = {256 * 1024, 64 * 1024, 16 * 1024, 4 * 1024};

Status no_engines() {
  return {Code::kUnsupported,
          "the NVIDIA driver has no batched copies (cuMemcpyBatchAsync, CUDA 12.8) for this device: kernels "
          "copy instead"};
}

Result<std::uint32_t> num_multiprocessors(const Driver& driver, Context context) {
  const ContextScope scope(driver, context);
  Device device = 0;
  if (const int error = driver.context_device(&device); error != 0)
    return driver.status(error, "cuCtxGetDevice");
  int num = 0;
  if (const int error = driver.device_attribute(&num, kMultiprocessorCount, device); error != 0)
    return driver.status(error, "cuDeviceGetAttribute of the number of multiprocessors");
  return static_cast<std::uint32_t>(std::max(num, 1));
}

// Returns samples of every number in both directions, or none.
Result<std::vector<CtaSample>> measure_ctas(CopyBench& bench, std::uint32_t most, Clock::time_point until) {
  std::vector<CtaSample> samples;
  for (std::uint32_t num = 1; num <= std::min(most, kMostStagingCtas); num *= 2)
    for (const Direction direction : kDirections)
      samples.push_back({direction, num, kBenchNbytes, UINT64_MAX});
  bench.set_way(Way::kKernel);
  for (int round = 0; round <= kRounds; ++round)
    for (CtaSample& sample : samples) {
      if (Clock::now() >= until) return round < 2 ? std::vector<CtaSample>() : samples;
      bench.set_num_ctas(sample.num_ctas);
      const Result<std::uint64_t> taken =
          bench.measure({sample.direction, Form::kRuns, kKernelAlignment, kCtaRunNbytes, kStreamPieceNbytes});
      if (!taken.ok()) return taken.status();
      if (round != 0) sample.ns = std::min(sample.ns, taken.value());
    }
  return samples;
}

// Returns the shortest time in ns, or UINT64_MAX if there was no time for a round after the warm-up.
Result<std::uint64_t> measure_way(CopyBench& bench, const WaySample& sample, Way way,
                                  Clock::time_point until) {
  bench.set_way(way);
  std::uint64_t best = UINT64_MAX;
  for (int round = 0; round <= kRounds && Clock::now() < until; ++round) {
    const Result<std::uint64_t> taken =
        bench.measure({sample.direction, sample.form, sample.alignment, sample.run_nbytes, kWayPieceNbytes});
    if (!taken.ok()) return taken.status();
    if (round != 0) best = std::min(best, taken.value());
  }
  return best;
}

// kUnsupported if the driver refuses copies by the device's engines.
Result<std::vector<WaySample>> measure_ways(CopyBench& bench, Clock::time_point until) {
  std::vector<WaySample> samples;
  for (const std::uint32_t alignment : {kKernelAlignment, kLooseAlignment})
    for (const std::uint64_t run_nbytes : kWayRunNbytes)
      for (const Form form : {Form::kRuns, Form::kRows})
        for (const Direction direction : kDirections) {
          if (form == Form::kRows && run_nbytes >= kMostRowNbytes) continue;
          WaySample sample{direction, form, alignment, run_nbytes, 0, 0};
          for (const Way way : {Way::kKernel, Way::kCopyEngine}) {
            const Result<std::uint64_t> taken = measure_way(bench, sample, way, until);
            if (!taken.ok()) return taken.status();
            if (!bench.has_copy_engines()) return no_engines();
            if (taken.value() == UINT64_MAX) return samples;
            (way == Way::kKernel ? sample.kernel_ns : sample.engine_ns) = taken.value();
          }
          samples.push_back(sample);
        }
  return samples;
}

}  // namespace

Result<Measured> calibrate(const Driver& driver, Context context, const Kernels& kernels,
                           const CopyStreamOptions& options, std::uint64_t most_ns) {
  const Clock::time_point begin = Clock::now();
  const Result<std::uint32_t> most_ctas = num_multiprocessors(driver, context);
  if (!most_ctas.ok()) return most_ctas.status();
  CopyBench bench(driver, context);
  if (Status opened = bench.open(kernels, options); !opened.ok()) return opened;

  Measured measured;
  Result<std::vector<CtaSample>> ctas =
      measure_ctas(bench, most_ctas.value(), begin + std::chrono::nanoseconds(most_ns / 4));
  if (!ctas.ok()) return ctas.status();
  measured.ctas = std::move(ctas).value();

  if (!driver.has_copy_engines()) {
    measured.engines = no_engines();
    return measured;
  }
  bench.set_num_ctas(staging_ctas_of(measured.ctas));
  Result<std::vector<WaySample>> ways = measure_ways(bench, begin + std::chrono::nanoseconds(most_ns));
  if (ways.ok())
    measured.ways = std::move(ways).value();
  else if (ways.status().code() == Code::kUnsupported)
    measured.engines = ways.status();
  else
    return ways.status();
  return measured;
}

}  // namespace kvxfer::gpu
