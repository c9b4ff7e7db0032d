// Bulk copies as PTX: copies of many bytes that a thread begins and others do, on sm_90 and later. Sections
// are those of the PTX ISA.
//
// A copy reads and writes through the async proxy, all other code through the generic one. Where both touch
// the same bytes a proxy fence must lie between; the end of a copy brings one ("Async proxy"). Copies of one
// CTA to and from the same place need none between them ("Proxy-preserved base causality order").
#pragma once

#include "kvxfer/bulk_ring.h"

namespace kvxfer::bulk {

// Whether the architecture that is compiled for has them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kAreHere = true;
#else
inline constexpr bool kAreHere = false;
#endif

__device__ inline unsigned shared_address(const void* at) {
  return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// For one arrival a phase.
__device__ inline void init_barrier(Barrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// What this thread has written to shared memory, or to the device's, is what copies read that are begun
// behind this; by other threads: behind a barrier that comes after this. Barriers of this thread are known to
// the copies that will count there. For both kinds of memory at once this would be a fence of the whole
// device as well (sm_90a, NVRTC 13.5).
__device__ inline void publish_shared_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void publish_global_writes() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// The phase's one arrival, and the bytes that end it. Copies may begin before: no phase ends without its
// arrival ("Phase Completion of the mbarrier object").
__device__ inline void arrive_and_expect(Barrier* barrier, unsigned nbytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(nbytes)
               : "memory");
}

// Waits for the end of the phase; phases have the parities 0, 1, 0... The barrier must not be two phases on.
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

// The cache's first choice of what to drop.
__device__ inline unsigned long long streamed_policy() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Addresses and nbytes are multiples of 16. The barrier counts the bytes when they are there.
__device__ inline void load(void* to_shared, const void* from, unsigned nbytes, Barrier* barrier,
                            unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to_shared)),
      "l"(__cvta_generic_to_global(from)), "r"(nbytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// A part of the thread's group of stores, which end_group() closes. Addresses and nbytes are multiples of 16.
__device__ inline void store(void* to, const void* from_shared, unsigned nbytes, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint"
      " [%0], [%1], %2, %3;" ::"l"(__cvta_generic_to_global(to)),
      "r"(shared_address(from_shared)), "r"(nbytes), "l"(policy)
      : "memory");
}
__device__ inline void end_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all of the thread's groups but the last `kButLast` have read what they store.
template <int kButLast>
__device__ inline void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kButLast) : "memory");
}

// Until all of the thread's groups have stored, and what this thread releases then releases their bytes.
// The end of a copy is a proxy fence of its own for who waits; whether for others, who learn of it by a
// word, is not said, and beside the system fence that comes before that word this one is little.
__device__ inline void wait_until_stored() {
  asm volatile("cp.async.bulk.wait_group 0;\n\tfence.proxy.async;" ::: "memory");
}

}  // namespace kvxfer::bulk
