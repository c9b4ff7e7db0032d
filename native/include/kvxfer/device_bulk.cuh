// Bulk copies (cp.async.bulk) as PTX, for sm_90 and later: one thread begins a copy of many bytes, and the
// hardware carries it out. Quoted titles are sections of the PTX ISA.
//
// A copy reads and writes through the async proxy; all other code uses the generic proxy. If both access the
// same bytes, a proxy fence must lie between the accesses. The end of a copy implies one ("Async proxy").
// Copies of one CTA to and from the same place need no fence between them ("Proxy-preserved base causality
// order").
#pragma once

#include "kvxfer/bulk_ring.h"

namespace kvxfer::bulk {

// True if the architecture that this is compiled for has bulk copies.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kAreHere = true;
#else
inline constexpr bool kAreHere = false;
#endif

__device__ inline unsigned shared_address(const void* at) {
  return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// Each phase of the barrier expects one arrival.
__device__ inline void init_barrier(Barrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// Copies that begin after this read what this thread has written to shared memory, or to the device's memory.
// If another thread begins them, a barrier must lie between this call and the copy. publish_shared_writes()
// also lets copies count at mbarriers that this thread has initialized. One fence for both kinds of memory
// would also be a fence of the whole device (sm_90a, NVRTC 13.5).
__device__ inline void publish_shared_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void publish_global_writes() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Makes the phase's one arrival, and says how many bytes end the phase. Copies may begin before this call: no
// phase ends without its arrival ("Phase Completion of the mbarrier object").
__device__ inline void arrive_and_expect(Barrier* barrier, unsigned nbytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(nbytes)
               : "memory");
}

// Waits for the end of the phase with this parity; phases have the parities 0, 1, 0... The barrier must not
// be two phases ahead.
__device__ inline void wait_for_phase(const Barrier* barrier, unsigned parity) {
  unsigned ended = 0;
  while (ended == 0)
    asm volatile(
        "{\n\t.reg .pred ended;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, ended;\n\t}"
        : "=r"(ended)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

// A cache policy: the L2 cache evicts these lines first.
__device__ inline unsigned long long streamed_policy() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Begins a copy from the device's memory to shared memory. Addresses and nbytes are multiples of 16. The
// barrier counts the bytes when they have arrived.
__device__ inline void load(void* to_shared, const void* from, unsigned nbytes, Barrier* barrier,
                            unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to_shared)),
      "l"(__cvta_generic_to_global(from)), "r"(nbytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Begins a copy from shared memory to the device's memory, in the thread's current group of stores.
// end_group() closes the group. Addresses and nbytes are multiples of 16.
__device__ inline void store(void* to, const void* from_shared, unsigned nbytes, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint"
      " [%0], [%1], %2, %3;" ::"l"(__cvta_generic_to_global(to)),
      "r"(shared_address(from_shared)), "r"(nbytes), "l"(policy)
      : "memory");
}
__device__ inline void end_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all of the thread's groups but the last `kButLast` have read their sources.
template <int kButLast>
__device__ inline void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kButLast) : "memory");
}

// Waits until all of the thread's groups have stored. What this thread releases afterwards also releases
// their bytes. The end of a copy is a proxy fence for the thread that waits for it. The PTX ISA does not say
// whether it is one for other threads too, which learn of the end by a word; so this adds a fence, which
// costs little beside the system fence that comes before that word.
__device__ inline void wait_until_stored() {
  asm volatile("cp.async.bulk.wait_group 0;\n\tfence.proxy.async;" ::: "memory");
}

}  // namespace kvxfer::bulk
