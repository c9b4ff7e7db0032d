// Threads of a CTA that do something together, and tell of it as one.
#pragma once

#include "kvxfer/device_memory.cuh"

namespace kvxfer {

// A thread's place among them. Where they are not the whole CTA they are whole warps, and `barrier` is one of
// the CTA's barriers 1 to 15 that nobody else uses meanwhile (PTX: barrier.sync).
struct Threads {
  unsigned index;        // of this one
  unsigned count;
  unsigned barrier = 0;  // of the whole CTA
};

__device__ inline Threads this_cta() {
  return {threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z),
          blockDim.x * blockDim.y * blockDim.z};
}

// Called by each of them, outside of branches that not all of them take.
__device__ inline void sync(const Threads& threads) {
  if (threads.barrier == 0)
    __syncthreads();
  else
    sync_at(threads.barrier, threads.count);
}

// Adds one for all of them, to a word of the host's or of a peer's. Called by each, behind its last store and
// outside of branches that not all of them take: there is a barrier in it. Any number may arrive at a word,
// in any order.
__device__ inline void arrive(unsigned* word, const Threads& threads) {
  sync(threads);
  if (threads.index != 0) return;
  __threadfence_system();
  add_release(word, 1);
}

}  // namespace kvxfer
