// Loads and stores with the cache policy and the memory order that copies need.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvxfer/device_memory.cuh"

namespace kvxfer::gpu {

// Streamed: a page is read once and written once, so it should not displace the model's data in the L2 cache.
__device__ inline uint4 load_streamed(const uint4* at) { return __ldcs(at); }
__device__ inline uint2 load_streamed(const uint2* at) { return __ldcs(at); }
__device__ inline unsigned load_streamed(const unsigned* at) { return __ldcs(at); }
__device__ inline unsigned short load_streamed(const unsigned short* at) { return __ldcs(at); }
__device__ inline unsigned char load_streamed(const unsigned char* at) { return __ldcs(at); }

// Through the L1 cache, for data that is soon read again.
__device__ inline uint4 load_cached(const uint4* at) { return __ldca(at); }

template <class Vector>
__device__ inline void store_streamed(Vector* at, Vector value) {
  __stcs(at, value);
}

// Returns the same number, but the compiler does not know that it is the same. So it computes derived values
// anew instead of keeping them in registers.
__device__ inline std::uint32_t forgotten(std::uint32_t number) {
  asm volatile("" : "+r"(number));
  return number;
}

__device__ inline void store_release_system(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

}  // namespace kvxfer::gpu
