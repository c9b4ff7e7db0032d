// The functions that translated kernels call.
#pragma once

#include "arithmetic.h"
#include "bulk.h"
#include "memory.h"
#include "warp.h"

namespace ptx {

// A struct that is passed to a kernel.
template <std::size_t kNbytes, std::size_t kAlignment>
struct alignas(kAlignment) Bytes {
  std::byte bytes[kNbytes];
};

// From .maxntid; 0 if the kernel has none. A device refuses a larger launch.
inline void check_launch(const Place& at, u32 most_threads) {
  if (most_threads != 0 && blockDim.x > most_threads)
    trap(at, "launched with %u threads in a CTA", blockDim.x);
}

}  // namespace ptx
