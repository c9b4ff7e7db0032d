// Replaces native/core/copy/avx512.h: AVX-512 without a processor that has it. SIMDe emulates most of the
// intrinsics on AVX2, in two halves of a vector; this file has those that SIMDe 0.7.4 lacks. Other intrinsics
// do not compile.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// The target that the whole file is compiled for: no instruction of AVX-512 is generated.
#define KVXFER_AVX512_TARGET target("avx2,f16c,fma")

namespace kvxfer {

inline bool has_avx512() noexcept {  // in fact, its emulation
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
}

namespace emulated {

template <class To, class From>
inline To part_of(const From& vector, int index) {
  To part;
  std::memcpy(&part, reinterpret_cast<const char*>(&vector) + index * static_cast<int>(sizeof part),
              sizeof part);
  return part;
}
template <class Vector, class Half>
inline Vector joined(const Half& low, const Half& high) {
  static_assert(sizeof(Vector) == 2 * sizeof(Half));
  Vector vector;
  std::memcpy(&vector, &low, sizeof low);
  std::memcpy(reinterpret_cast<char*>(&vector) + sizeof low, &high, sizeof high);
  return vector;
}

// Touches only the bytes of the mask, so that a sanitizer sees any other access.
inline __m512i maskz_loadu_epi8(__mmask64 mask, const void* from) {
  char bytes[64] = {};
  for (int i = 0; i < 64; ++i)
    if (mask >> i & 1) bytes[i] = static_cast<const char*>(from)[i];
  return part_of<__m512i>(bytes, 0);
}
inline void mask_storeu_epi8(void* to, __mmask64 mask, __m512i vector) {
  for (int i = 0; i < 64; ++i)
    if (mask >> i & 1) static_cast<char*>(to)[i] = part_of<char>(vector, i);
}
inline void stream_si512(__m512i* to, __m512i vector) {
  if (reinterpret_cast<std::uintptr_t>(to) % 64 != 0) {
    std::fprintf(stderr, "vmovntdq to %p, which is no multiple of 64: a processor would end the program\n",
                 static_cast<void*>(to));
    std::abort();
  }
  std::memcpy(to, &vector, sizeof vector);
}

inline __m512i cvtepu16_epi32(__m256i x) {
  return joined<__m512i>(_mm256_cvtepu16_epi32(part_of<__m128i>(x, 0)),
                         _mm256_cvtepu16_epi32(part_of<__m128i>(x, 1)));
}
inline __m512i cvtepi8_epi32(__m128i x) {
  return joined<__m512i>(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)));
}
inline __m512 cvtepi32_ps(__m512i x) {
  return joined<__m512>(_mm256_cvtepi32_ps(part_of<__m256i>(x, 0)),
                        _mm256_cvtepi32_ps(part_of<__m256i>(x, 1)));
}
inline __m512i cvtps_epi32(__m512 x) {
  return joined<__m512i>(_mm256_cvtps_epi32(part_of<__m256>(x, 0)),
                         _mm256_cvtps_epi32(part_of<__m256>(x, 1)));
}
inline __m512 cvtph_ps(__m256i x) {
  return joined<__m512>(_mm256_cvtph_ps(part_of<__m128i>(x, 0)), _mm256_cvtph_ps(part_of<__m128i>(x, 1)));
}
template <int kRounding>
inline __m256i cvtps_ph(__m512 x) {
  return joined<__m256i>(_mm256_cvtps_ph(part_of<__m256>(x, 0), kRounding),
                         _mm256_cvtps_ph(part_of<__m256>(x, 1), kRounding));
}

inline __mmask32 cmpgt_epi16_mask(__m512i a, __m512i b) {
  __mmask32 mask = 0;
  for (int i = 0; i < 32; ++i)
    mask |= static_cast<__mmask32>(part_of<std::int16_t>(a, i) > part_of<std::int16_t>(b, i)) << i;
  return mask;
}
inline __mmask32 cmpeq_epi16_mask(__m512i a, __m512i b) {
  __mmask32 mask = 0;
  for (int i = 0; i < 32; ++i)
    mask |= static_cast<__mmask32>(part_of<std::int16_t>(a, i) == part_of<std::int16_t>(b, i)) << i;
  return mask;
}
inline __mmask32 kunpackw(__mmask32 high, __mmask32 low) { return high << 16 | (low & 0xffff); }
inline __mmask64 kunpackd(__mmask64 high, __mmask64 low) { return high << 32 | (low & 0xffffffff); }

}  // namespace emulated
}  // namespace kvxfer

#define _mm512_maskz_loadu_epi8 ::kvxfer::emulated::maskz_loadu_epi8
#define _mm512_mask_storeu_epi8 ::kvxfer::emulated::mask_storeu_epi8
#define _mm512_stream_si512 ::kvxfer::emulated::stream_si512
#define _mm512_cvtepu16_epi32 ::kvxfer::emulated::cvtepu16_epi32
#define _mm512_cvtepi8_epi32 ::kvxfer::emulated::cvtepi8_epi32
#define _mm512_cvtepi32_ps ::kvxfer::emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 ::kvxfer::emulated::cvtps_epi32
#define _mm512_cvtph_ps ::kvxfer::emulated::cvtph_ps
#undef _mm512_madd_epi16  // SIMDe's macro is of another intrinsic, with four arguments
#define _mm512_madd_epi16 simde_mm512_madd_epi16
#undef _mm512_cvtps_ph  // without optimization it is a macro of the compiler
#define _mm512_cvtps_ph(x, rounding) ::kvxfer::emulated::cvtps_ph<rounding>(x)
#define _mm512_cmpgt_epi16_mask ::kvxfer::emulated::cmpgt_epi16_mask
#define _mm512_cmpeq_epi16_mask ::kvxfer::emulated::cmpeq_epi16_mask
#define _mm512_kunpackw ::kvxfer::emulated::kunpackw
#define _mm512_kunpackd ::kvxfer::emulated::kunpackd
