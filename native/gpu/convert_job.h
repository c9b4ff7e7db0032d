// What the conversion kernel is launched with beside a job.
#pragma once

#include "gpu/copy_job.h"
#include "kvxfer/copy_program.h"

namespace kvxfer::gpu {

// An atom of a loop with a conversion: so many elements of one run, at its end fewer.
inline constexpr std::uint32_t kAtomElements = 8;

// A warp's slices have atoms of this many runs at most: a lane finds the place of each. That costs as much as
// to convert some hundred atoms, so there are many in a slice: six times as many as a lane loads at once.
inline constexpr std::uint32_t kMostRunsPerSlice = kWarp;
inline constexpr std::uint32_t kAtomsPerRound = 3 * kWarp;
inline constexpr std::uint32_t kMostConvertedPerSlice = 6 * kAtomsPerRound;

// Of one loop of the job, beside what is in its JobLoop.
//
// Scales in a region have addresses in the place of offsets, as sides have.
//
// Where scales are found, atoms of a granule are in a row: where runs i = 0, 1, ... share a scale and runs
// j = 0, 1, ... do not, the loop's axes have changed places, here as in the job.
struct ConvertLoop {
  Conversion conversion;
  Divisor runs_per_granule;
  std::uint32_t lanes_per_granule;  // a power of two: so many neighbours have atoms of one granule
  std::uint32_t in_vectors;         // 1: atoms are aligned to their own size on both sides
  std::uint32_t atoms_per_part;     // of a granule that a CTA takes: what one warp takes of it at once
};

// What a slice is.
enum class Team : std::uint32_t {
  kOneWarp = 0,   // atoms for a warp; where scales are found, of whole granules
  kWholeCta = 1,  // one granule, for all warps of a CTA
};

struct ConvertJob {
  const float* scales;  // the program's table, in memory that the device reaches
  Team team;
  ConvertLoop loops[kMaxLoops];  // of job.loops
};
static_assert(sizeof(CopyJob) + sizeof(ConvertJob) <= 4096, "more than a kernel's arguments may take");

// Where a run of a slice lies, and what its elements are multiplied and divided by. Warps keep them in
// shared memory.
struct alignas(16) Run {
  const std::byte* src;
  std::byte* dst;
  float factors[2];  // for vectors (convert.cuh: Factors); NaN: elements are converted one by one
  float src_scale, dst_scale;
};

struct WarpMemory {
  Run runs[kMostRunsPerSlice];
  std::uint32_t amax[kMostRunsPerSlice];  // of the slice's granules: float32's bits
};

inline constexpr std::uint32_t kMostConvertWarps = 16;

struct ConvertMemory {
  WarpMemory warps[kMostConvertWarps];
  std::uint32_t amax;  // of a CTA's granule
};

}  // namespace kvxfer::gpu
