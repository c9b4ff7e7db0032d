// AVX-512's intrinsics, and what a function that uses them says of itself. A test puts a header of this
// name before this one, which emulates them: tests/native/emulated/core/copy/avx512.h.
#pragma once

// GCC 12 takes what its own intrinsics leave undefined for a mistake (its bug 105593).
#pragma GCC diagnostic push
#ifndef __clang__  // which does not know the first
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

// In every processor that has AVX-512 at all, but for Xeon Phis.
#define KVXFER_AVX512_TARGET target("avx512f,avx512bw,avx512vl")

namespace kvxfer {

// Whether the processor has it, and the system keeps its registers.
inline bool has_avx512() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

}  // namespace kvxfer
