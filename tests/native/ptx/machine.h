// What translated kernels are made of.
#pragma once

#include "arithmetic.h"
#include "bulk.h"
#include "memory.h"
#include "warp.h"

namespace ptx {

// A struct that a kernel is passed.
template <std::size_t kNbytes, std::size_t kAlignment>
struct alignas(kAlignment) Bytes {
  std::byte bytes[kNbytes];
};

// As .maxntid has it; 0 where a kernel says nothing. A device refuses the launch.
inline void check_launch(const Place& at, u32 most_threads) {
  if (most_threads != 0 && blockDim.x > most_threads)
    trap(at, "launched with %u threads in a CTA", blockDim.x);
}

}  // namespace ptx
