// Replaces native/gpu/rounding.cuh: gives the results that the PTX ISA defines for each instruction. A NaN
// that results from arithmetic is 0x7fffffff; a converted NaN is the canonical NaN of its new dtype, without
// its sign.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "cuda_threads.h"
#include "kvxfer/number.h"

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };

namespace kvxfer::gpu {

inline float canonical(float x) { return std::isnan(x) ? number::float_of(0x7fffffff) : x; }

// Each operation is rounded by itself, so that the compiler cannot fuse them.
inline float multiplied(float x, float by) {
  const volatile float product = x * by;
  return canonical(product);
}
inline float divided(float x, float by) {
  const volatile float quotient = x / by;
  return canonical(quotient);
}
inline float multiplied_plus(float x, float by, float plus) { return canonical(std::fma(x, by, plus)); }
inline float inverse_towards_zero(float x) {
  const float nearest = 1 / x;
  const bool is_beyond =
      std::fabs(static_cast<double>(nearest) * static_cast<double>(x)) > 1;  // 48 bits: exact
  return is_beyond ? std::nextafter(nearest, 0.0f) : nearest;
}

// cvt.rn to 16 bits: overflow gives infinity. cvt.rn.satfinite to 8 bits: anything greater than MAX_NORM,
// including infinity, gives MAX_NORM.
inline std::uint32_t instruction_gives(Dtype to, float x) {
  if (!std::isnan(x)) return from_float(to, x, itemsize(to) == 1);
  return (1u << (float_format(to).nbits - 1)) - 1;  // 0x7f, 0x7fff
}
inline float instruction_reads(Dtype from, std::uint32_t bits) { return canonical(to_float(from, bits)); }

inline std::uint32_t to_e4m3x4(float first, float second, float third, float fourth) {
  constexpr Dtype kTo = Dtype::kE4m3;
  return instruction_gives(kTo, first) | instruction_gives(kTo, second) << 8 |
         instruction_gives(kTo, third) << 16 | instruction_gives(kTo, fourth) << 24;
}
inline std::uint32_t to_e5m2x4(float first, float second, float third, float fourth) {
  constexpr Dtype kTo = Dtype::kE5m2;
  return instruction_gives(kTo, first) | instruction_gives(kTo, second) << 8 |
         instruction_gives(kTo, third) << 16 | instruction_gives(kTo, fourth) << 24;
}

inline float4 from_four(Dtype from, std::uint32_t word) {
  return {instruction_reads(from, word & 0xff), instruction_reads(from, word >> 8 & 0xff),
          instruction_reads(from, word >> 16 & 0xff), instruction_reads(from, word >> 24)};
}
inline float4 from_e4m3x4(std::uint32_t word) { return from_four(Dtype::kE4m3, word); }
inline float4 from_e5m2x4(std::uint32_t word) { return from_four(Dtype::kE5m2, word); }

inline float2 from_f16x2(std::uint32_t word) {
  return {instruction_reads(Dtype::kF16, word & 0xffff), instruction_reads(Dtype::kF16, word >> 16)};
}

inline std::uint32_t to_f16x2(float first, float second) {
  return instruction_gives(Dtype::kF16, first) | instruction_gives(Dtype::kF16, second) << 16;
}
inline std::uint32_t to_bf16x2(float first, float second) {
  return instruction_gives(Dtype::kBf16, first) | instruction_gives(Dtype::kBf16, second) << 16;
}

// cvt.rni.s32.f32 clamps, and makes 0 of NaN; cvt.pack.sat.s8.s32 clamps once more.
inline std::uint32_t clamped_to_int8(float x) {
  if (std::isnan(x)) return 0;
  const float rounded = std::nearbyint(x);
  const int clamped = rounded < -128 ? -128 : rounded > 127 ? 127 : static_cast<int>(rounded);
  return static_cast<std::uint32_t>(clamped) & 0xff;
}
inline std::uint32_t to_int8x4(float first, float second, float third, float fourth) {
  return clamped_to_int8(first) | clamped_to_int8(second) << 8 | clamped_to_int8(third) << 16 |
         clamped_to_int8(fourth) << 24;
}

}  // namespace kvxfer::gpu
