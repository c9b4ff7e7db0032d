// Measures which way is faster between a GPU and the host's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/copy_stream.h"
#include "gpu/copy_way.h"
#include "gpu/driver.h"
#include "kvxfer/status.h"

namespace kvxfer::gpu {

// So long at most: half a second for what is planned, and the rest for a machine that is busy.
inline constexpr std::uint64_t kMostCalibrationNs = 800'000'000;

// Copies pages that lie apart on the device to and from packed pinned memory, as staging does, by kernels with
// these options and by copy engines: pieces that follow each other without a pause, from the first's
// submission to the last's end. Takes 4 MiB of pinned memory and 8 MiB of the device, and gives them back.
// Waits for its own copies alone. Long runs come first; what there was no time for is left out.
//
// kUnsupported where there are no copy engines to be used; kSystem where memory cannot be had or the device
// fails.
Result<std::vector<Sample>> calibrate(const Driver& driver, Context context, const Kernels& kernels,
                                      const CopyStreamOptions& options,
                                      std::uint64_t most_ns = kMostCalibrationNs);

}  // namespace kvxfer::gpu
