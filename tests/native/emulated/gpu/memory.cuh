// Replaces native/gpu/memory.cuh.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cuda_threads.h"
#include "kvxfer/device_memory.cuh"

namespace kvxfer::gpu {

template <class Vector>
inline Vector load_streamed(const Vector* at) {
  return __ldcs(at);
}
template <class Vector>
inline Vector load_cached(const Vector* at) {
  return __ldcs(at);
}
template <class Vector>
inline void store_streamed(Vector* at, Vector value) {
  __stcs(at, value);
}

inline std::uint32_t forgotten(std::uint32_t number) { return number; }

inline void store_release_system(std::uint64_t* at, std::uint64_t value) {
  cuda_threads::check_aligned(at);
  std::atomic_ref(*at).store(value, std::memory_order_release);
}

}  // namespace kvxfer::gpu
