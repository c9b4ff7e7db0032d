// The PTX instructions that device.cuh uses. They have system scope unless their names say otherwise, since
// the other side may be the host.
#pragma once

namespace kvxfer {

__device__ inline void store_release(unsigned* word, unsigned value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ inline void add_release(unsigned* word, unsigned count) {
  asm volatile("red.release.sys.add.u32 [%0], %1;" ::"l"(word), "r"(count) : "memory");
}

__device__ inline unsigned load_acquire(const unsigned* word) {
  unsigned value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Device scope: between kernels of one GPU.
__device__ inline void store_release_on_device(unsigned* word, unsigned value) {
  asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ inline unsigned load_acquire_on_device(const unsigned* word) {
  unsigned value;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Returns the CTA's dynamic shared memory, whose size the launch gave. Every array that the kernel declares
// `extern __shared__` has the same bytes.
__device__ inline void* shared_memory() {
  extern __shared__ __align__(1024) unsigned char of_the_cta[];
  return of_the_cta;
}
__device__ inline bool is_shared(const void* at) { return __isShared(at) != 0; }

// Waits until `num_threads` threads of the CTA, in whole warps, have reached this barrier. A CTA has 16
// barriers.
__device__ inline void sync_at(unsigned barrier, unsigned num_threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

}  // namespace kvxfer
