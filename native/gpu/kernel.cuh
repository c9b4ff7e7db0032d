// What kernels have in common: which slices a warp takes, and how the end of a launch is told.
#pragma once

#include "gpu/copy_job.h"
#include "gpu/memory.cuh"

namespace kvxfer::gpu {

inline constexpr unsigned kAllLanes = 0xffffffff;

__device__ inline std::uint32_t lane_index() { return threadIdx.x % kWarp; }

// Which slices the warp takes: `first` and every `step`-th after it. Warps of a CTA take neighbouring
// slices, so that a CTA reads on in a page; the grid goes round until all are taken, however few CTAs it
// has.
struct Share { std::uint32_t first, step; };

__device__ inline Share share_of_warp() {
  const std::uint32_t num_warps = blockDim.x / kWarp;
  return {blockIdx.x * num_warps + threadIdx.x / kWarp, gridDim.x * num_warps};
}

template <class Take>
__device__ inline void for_each_slice(const CopyJob& job, Take&& take) {
  const Share share = share_of_warp();
  for (std::uint32_t index = share.first; index < job.num_slices; index += share.step)
    take(slice_at(job, index));
}

// Called by every thread after its last store. The last CTA to come tells the host, or a peer: stores of
// all CTAs are seen by whoever acquires the word. Each thread's stores go to the barrier, from there to
// the counter by the fence of the CTA's first thread, and on to the word by the last one's.
__device__ inline void tell_done(std::uint64_t* done, std::uint64_t value, unsigned* arrivals) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  if (atomicInc(arrivals, gridDim.x - 1) != gridDim.x - 1) return;  // the last leaves 0 there
  __threadfence_system();
  store_release_system(done, value);
}

__device__ inline void tell_done(const CopyJob& job) {
  if (job.done != nullptr) tell_done(job.done, job.done_value, job.arrivals);
}

}  // namespace kvxfer::gpu
