// The two instructions of device.cuh, as PTX. At system scope: whoever acquires the word may be the host.
#pragma once

namespace kvxfer {

__device__ inline void store_release(unsigned* word, unsigned value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ inline void add_release(unsigned* word, unsigned count) {
  asm volatile("red.release.sys.add.u32 [%0], %1;" ::"l"(word), "r"(count) : "memory");
}

}  // namespace kvxfer
