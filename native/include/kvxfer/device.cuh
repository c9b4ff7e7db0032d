// For kernels: tells kvxfer from inside that pages are final.
//
// The word is a kvxfer.Trigger's (`trigger.address`, passed to the kernel as a pointer), in pinned memory. A
// transfer that was posted with it (`after=`) goes when the word holds what it waits for. Compile with the
// folder that kvxfer.gpu.include_path() returns; nothing else is included, and no library is linked.
//
//   __global__ void layer(..., unsigned* word) {
//     ...                      // stores of every thread, to pages of the cache
//     kvxfer::arrive(word);    // by every thread, behind its last store
//   }
//
// With `num_ctas` CTAs a launch: after=trigger.at(num_ctas) waits for one of them, and
// after=trigger.by_layer(num_ctas, num_ctas) for one a layer. gpu/examples/write_layer.cu is such a kernel.
#pragma once

#include "kvxfer/device_memory.cuh"

namespace kvxfer {

// Stores a value that is more than what the word holds. Called by one thread: what it wrote, and what it has
// learnt by a barrier that others wrote, is seen by whoever sees the value.
__device__ inline void fire(unsigned* word, unsigned value) {
  __threadfence_system();
  store_release(word, value);
}

// Adds one for the whole CTA. Called by every thread of it, behind its last store and outside of branches that
// not all of them take: there is a barrier in it. Any number of CTAs may arrive at a word, in any order.
__device__ inline void arrive(unsigned* word) {
  __syncthreads();
  if (threadIdx.x != 0 || threadIdx.y != 0 || threadIdx.z != 0) return;
  __threadfence_system();
  add_release(word, 1);
}

}  // namespace kvxfer
