// Functions that all kernels use: which slices a warp takes, and how a launch reports its end.
#pragma once

#include "gpu/copy_job.h"
#include "gpu/memory.cuh"

namespace kvxfer::gpu {

inline constexpr unsigned kAllLanes = 0xffffffff;

__device__ inline std::uint32_t lane_index() { return threadIdx.x % kWarp; }

// The slices that a warp takes: `first` and every `step`-th after it. Warps of a CTA take neighbouring
// slices, so that a CTA reads a page in order. The warps go on until all slices are taken, however few CTAs
// the grid has.
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

// Every thread calls it after its last store. The last CTA to arrive stores the word; the host or a peer that
// acquires the word sees the stores of all CTAs. The order is: each thread's stores before the CTA's barrier;
// the barrier before the counter, by the fence of the CTA's first thread; the counter before the word, by the
// fence of the last CTA's first thread.
__device__ inline void tell_done(std::uint64_t* done, std::uint64_t value, unsigned* arrivals) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  if (atomicInc(arrivals, gridDim.x - 1) != gridDim.x - 1) return;  // the last CTA leaves 0 there
  __threadfence_system();
  store_release_system(done, value);
}

__device__ inline void tell_done(const CopyJob& job) {
  if (job.done != nullptr) tell_done(job.done, job.done_value, job.arrivals);
}

}  // namespace kvxfer::gpu
