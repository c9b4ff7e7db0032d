// The arguments of the conversion kernel besides a job.
#pragma once

#include "gpu/copy_job.h"
#include "kvxfer/copy_program.h"

namespace kvxfer::gpu {

// An atom of a loop with a conversion has this many elements of one run; the run's last atom may have fewer.
inline constexpr std::uint32_t kAtomElements = 8;

// A warp's slice has atoms of at most this many runs: each lane finds the place of one run. That costs as
// much as to convert some hundred atoms, so a slice has many: six times as many as the lanes load at once.
inline constexpr std::uint32_t kMostRunsPerSlice = kWarp;
inline constexpr std::uint32_t kAtomsPerRound = 3 * kWarp;
inline constexpr std::uint32_t kMostConvertedPerSlice = 6 * kAtomsPerRound;

// One loop of the job: what its JobLoop does not hold.
//
// For scales in a region, the conversion's offsets are addresses, as in a Side.
//
// If the kernel finds the scales, the atoms of a granule are consecutive: if runs i = 0, 1, ... share a scale
// and runs j = 0, 1, ... do not, the loop's axes are exchanged, here and in the job.
struct ConvertLoop {
  Conversion conversion;
  Divisor runs_per_granule;
  std::uint32_t lanes_per_granule;  // a power of two: how many neighbouring lanes have atoms of one granule
  std::uint32_t in_vectors;  // 1: atoms are aligned to their own size on both sides
  std::uint32_t atoms_per_part;  // if a CTA takes a granule: how many atoms of it one warp takes at once
};

// Which threads take a slice, and what it contains.
enum class Team : std::uint32_t {
  kOneWarp = 0,  // a warp takes it: atoms, or whole granules if the kernel finds scales
  kWholeCta = 1,  // all warps of a CTA take it: one granule
};

struct ConvertJob {
  const float* scales;  // the program's table, in memory that the device reaches
  Team team;
  ConvertLoop loops[kMaxLoops];  // of job.loops
};
static_assert(sizeof(CopyJob) + sizeof(ConvertJob) <= 4096, "more than a kernel's arguments may take");

// Where a run of a slice lies, and the numbers that its elements are multiplied and divided by. Warps keep
// runs in shared memory.
struct alignas(16) Run {
  const std::byte* src;
  std::byte* dst;
  float factors[2];  // for vectors (convert.cuh: Factors); NaN: convert elements one by one
  float src_scale, dst_scale;
};

struct WarpMemory {
  Run runs[kMostRunsPerSlice];
  std::uint32_t amax[kMostRunsPerSlice];  // of the slice's granules: float32's bits
};

inline constexpr std::uint32_t kMostConvertWarps = 16;

struct ConvertMemory {
  WarpMemory warps[kMostConvertWarps];
  std::uint32_t amax;  // of the CTA's granule
};

}  // namespace kvxfer::gpu
