// In the place of native/include/kvxfer/device_memory.cuh.
#pragma once

#include <atomic>

#include "cuda_threads.h"

namespace kvxfer {

inline void store_release(unsigned* word, unsigned value) {
  cuda_threads::check_aligned(word);
  std::atomic_ref(*word).store(value, std::memory_order_release);
}

inline void add_release(unsigned* word, unsigned count) {
  cuda_threads::check_aligned(word);
  std::atomic_ref(*word).fetch_add(count, std::memory_order_release);
}

}  // namespace kvxfer
