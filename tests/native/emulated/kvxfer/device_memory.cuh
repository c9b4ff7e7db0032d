// Replaces native/include/kvxfer/device_memory.cuh.
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

inline unsigned load_acquire(const unsigned* word) {
  cuda_threads::check_aligned(word);
  return std::atomic_ref(*const_cast<unsigned*>(word)).load(std::memory_order_acquire);
}

inline void store_release_on_device(unsigned* word, unsigned value) { store_release(word, value); }
inline unsigned load_acquire_on_device(const unsigned* word) { return load_acquire(word); }

inline void* shared_memory() { return cuda_threads::this_cta->shared.get(); }
inline bool is_shared(const void* at) { return cuda_threads::is_shared(at); }
inline void sync_at(unsigned barrier, unsigned num_threads) {
  cuda_threads::this_cta->sync_at(barrier, num_threads);
}

}  // namespace kvxfer
