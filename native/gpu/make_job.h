// Divides copy programs into jobs for kernels. Pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gpu/bulk_ring.h"
#include "gpu/convert_job.h"
#include "gpu/copy_job.h"
#include "gpu/engine_share.h"
#include "gpu/placement.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/status.h"

namespace kvxfer::gpu {

// The kernel for a job: `native/gpu/<name>.cu`.
enum class Kernel : std::uint8_t {
  kCopyVectors = 0,  // every loop without a conversion, at any alignment
  kCopyBulk = 1,     // runs of kLeastBulkNbytes or more on 16-byte boundaries; sm_90 and later
  kConvert = 2,      // loops with a conversion
};
inline constexpr std::size_t kNumKernels = 3;

// Some layers, and the same pairs in each of them; the last num_fine pairs count in tokens. A Piece is a part
// with one layer. The tables begin with the part's first pair.
struct Part {
  std::uint32_t first_layer = 0;
  std::uint32_t num_layers = 0;
  std::uint32_t num_pairs = 0;
  std::uint32_t num_fine = 0;
};

struct Launch {
  Kernel kernel;
  CopyJob job;
  ConvertJob conversions;  // kConvert; the launcher copies the table of scales to the device
};

// A vector kernel's atom has at most 16 bytes; its slice has up to eight atoms per lane.
inline constexpr std::uint32_t kVectorNbytes = 16;
inline constexpr std::uint32_t kVectorsPerLane = 8;
// A bulk kernel's slice fills one stage (bulk_ring.h) with a part of one run, or with whole shorter runs.
inline constexpr std::uint32_t kLeastBulkNbytes = 2 * 1024;

// Returns the launches for a part of a transfer, in no particular order. The tables are the part's, with ids
// below 2^31. Pointers to tables and counters are left null. `bulk`: kCopyBulk may be used.
//
// kUnsupported if one pair has 2^31 atoms or more; kOutOfRange if a layer's blocks do not lie in one piece of
// a region's memory.
Result<std::vector<Launch>> make_launches(const CopyProgram& program, const Part& part,
                                          std::span<const std::uint32_t> src_ids,
                                          std::span<const std::uint32_t> dst_ids, const Placement& src,
                                          const Placement& dst, bool bulk);

// The same, but copy engines get the shares that the calibration assigns to them in this direction.
struct JobWork {
  std::vector<Launch> launches;
  std::vector<EngineShare> copies;
};
Result<JobWork> make_work(const CopyProgram& program, const Part& part,
                          std::span<const std::uint32_t> src_ids, std::span<const std::uint32_t> dst_ids,
                          const Placement& src, const Placement& dst, bool bulk, Direction direction,
                          const Calibration& calibration);

Divisor divisor(std::uint32_t value) noexcept;

}  // namespace kvxfer::gpu
