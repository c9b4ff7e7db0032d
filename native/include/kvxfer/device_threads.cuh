// A group of threads of a CTA that do something together and report it with one arrival.
#pragma once

#include "kvxfer/device_memory.cuh"

namespace kvxfer {

// A thread's place in its group. If the group is not the whole CTA, it consists of whole warps, and `barrier`
// is one of the CTA's barriers 1 to 15 that no other threads use meanwhile (PTX: barrier.sync).
struct Threads {
  unsigned index;        // of this thread
  unsigned count;
  unsigned barrier = 0;  // 0: the group is the whole CTA
};

__device__ inline Threads this_cta() {
  return {threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z),
          blockDim.x * blockDim.y * blockDim.z};
}

// Waits for all threads of the group. Each of them calls it, outside of divergent branches.
__device__ inline void sync(const Threads& threads) {
  if (threads.barrier == 0)
    __syncthreads();
  else
    sync_at(threads.barrier, threads.count);
}

// Adds one to a word for the whole group. The word lies in the host's memory or in a peer's. Each thread of
// the group calls it, after its last store and outside of divergent branches: it contains a barrier. Any
// number of groups may arrive at one word, in any order.
__device__ inline void arrive(unsigned* word, const Threads& threads) {
  sync(threads);
  if (threads.index != 0) return;
  __threadfence_system();
  add_release(word, 1);
}

}  // namespace kvxfer
