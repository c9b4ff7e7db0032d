// Loads and stores with the cache policy and the order that copies want, as PTX.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvxfer/device_memory.cuh"

namespace kvxfer::gpu {

// Streamed: a page is read once and written once, and should leave the L2 cache to the model.
__device__ inline uint4 load_streamed(const uint4* at) { return __ldcs(at); }
__device__ inline uint2 load_streamed(const uint2* at) { return __ldcs(at); }
__device__ inline unsigned load_streamed(const unsigned* at) { return __ldcs(at); }
__device__ inline unsigned short load_streamed(const unsigned short* at) { return __ldcs(at); }
__device__ inline unsigned char load_streamed(const unsigned char* at) { return __ldcs(at); }

// Through the L1 cache, for what is read once more soon.
__device__ inline uint4 load_cached(const uint4* at) { return __ldca(at); }

template <class Vector>
__device__ inline void store_streamed(Vector* at, Vector value) {
  __stcs(at, value);
}

// The same number, of which the compiler does not know that: what follows from it is computed anew
// instead of being kept.
__device__ inline std::uint32_t forgotten(std::uint32_t number) {
  asm volatile("" : "+r"(number));
  return number;
}

__device__ inline void store_release_system(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

}  // namespace kvxfer::gpu
