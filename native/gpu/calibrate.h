// Measures how pages are copied fastest between a GPU and the host's memory: by how many CTAs, or by copy
// engines.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/copy_stream.h"
#include "gpu/copy_way.h"
#include "gpu/cta_choice.h"
#include "gpu/driver.h"
#include "kvxfer/status.h"

namespace kvxfer::gpu {

// How long a calibration takes at most, give or take a round of copies. A quarter is for the number of CTAs,
// which takes a hundredth of a second by arithmetic. The remainder is for kernels against copy engines, which
// takes half a second as planned. What is left over is slack for a busy machine.
inline constexpr std::uint64_t kMostCalibrationNs = 800'000'000;

struct Measured {
  std::vector<CtaSample> ctas;
  std::vector<WaySample> ways;
  // Why `ways` is empty: kUnsupported if the copy engines cannot be used, else ok.
  Status engines;
};

// Copies pages that lie apart on the device to and from packed pinned memory, as staging does. Pieces follow
// each other without a pause; the time runs from the first piece's submission to the last one's end, and the
// best of several rounds counts. First it measures kernels by number of CTAs. Each round goes through all
// numbers, so that a busy moment of the device does not affect one number alone. Then it compares kernels
// with the number of CTAs that this gives (`staging_ctas_of`) with copy engines, long runs first. Samples for
// which there was no time are left out; of the CTAs' samples, all or none. `options` are those of the stream,
// except num_ctas.
//
// Takes 4 MiB of pinned memory and 8 MiB of the device, and gives them back. Waits for its own copies alone.
// kSystem if memory cannot be allocated or the device fails.
Result<Measured> calibrate(const Driver& driver, Context context, const Kernels& kernels,
                           const CopyStreamOptions& options, std::uint64_t most_ns = kMostCalibrationNs);

}  // namespace kvxfer::gpu
