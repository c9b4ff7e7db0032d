// AVX-512's intrinsics, and the attributes of functions that use them. A test puts a header of this name
// before this one, which emulates the intrinsics: tests/native/emulated/core/copy/avx512.h.
#pragma once

// GCC 12 warns of values that its own intrinsics leave undefined on purpose (its bug 105593).
#pragma GCC diagnostic push
#ifndef __clang__  // clang does not know the first of these warnings
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

// Every processor with AVX-512 has these, except Xeon Phis.
#define KVXFER_AVX512_TARGET target("avx512f,avx512bw,avx512vl")

namespace kvxfer {

// True if the processor has it, and the system saves its registers.
inline bool has_avx512() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

}  // namespace kvxfer
