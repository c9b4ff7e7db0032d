// The instructions of device.cuh, as PTX. At system scope, unless they say so: whoever acquires or releases may be
// the host.
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

// Between kernels of one GPU.
__device__ inline void store_release_on_device(unsigned* word, unsigned value) {
  asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ inline unsigned load_acquire_on_device(const unsigned* word) {
  unsigned value;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// The CTA's memory that its kernel was launched with (dynamic shared memory); the same bytes as any array
// that a kernel declares `extern __shared__`.
__device__ inline void* shared_memory() {
  extern __shared__ __align__(1024) unsigned char of_the_cta[];
  return of_the_cta;
}
__device__ inline bool is_shared(const void* at) { return __isShared(at) != 0; }

// Until `num_threads` threads of the CTA, whole warps, have come to this barrier, of which a CTA has 16.
__device__ inline void sync_at(unsigned barrier, unsigned num_threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

}  // namespace kvxfer
