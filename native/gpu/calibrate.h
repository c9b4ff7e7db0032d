// Measures how pages go fastest between a GPU and the host's memory: by how many CTAs, and which way.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/copy_stream.h"
#include "gpu/copy_way.h"
#include "gpu/cta_choice.h"
#include "gpu/driver.h"
#include "kvxfer/status.h"

namespace kvxfer::gpu {

// So long at most, a round of copies more or less: a quarter for CTAs, which take a hundredth of a second by
// arithmetic, and what is left for the ways, half a second for what is planned. The rest is for a machine
// that is busy.
inline constexpr std::uint64_t kMostCalibrationNs = 800'000'000;

struct Measured {
  std::vector<CtaSample> ctas;
  std::vector<WaySample> ways;
  // Why there is nothing of ways: kUnsupported where there are no copy engines to be used, else ok.
  Status engines;
};

// Copies pages that lie apart on the device to and from packed pinned memory, as staging does: pieces that
// follow each other without a pause, from the first's submission to the last's end, the best of some rounds.
// First by kernels, by number of CTAs, round by round through all numbers, so that a moment in which the
// device is busy is none of one number alone. Then by kernels of so many CTAs as that says
// (`staging_ctas_of`), and by copy engines, long runs first. What there was no time for is left out; of CTAs
// that is all or none. `options`: of the stream, but for num_ctas.
//
// Takes 4 MiB of pinned memory and 8 MiB of the device, and gives them back. Waits for its own copies alone.
// kSystem where memory cannot be had or the device fails.
Result<Measured> calibrate(const Driver& driver, Context context, const Kernels& kernels,
                           const CopyStreamOptions& options, std::uint64_t most_ns = kMostCalibrationNs);

}  // namespace kvxfer::gpu
