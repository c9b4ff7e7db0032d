// Arithmetic and conversions as the hardware does them. A resulting NaN is the hardware's NaN, without sign
// and payload, and overflow gives what the instruction defines. The caller makes the bits those of number.h.
#pragma once

#include <cstdint>

#include "kvxfer/number.h"

namespace kvxfer::gpu {

// Rounded to float32, even if the compiler runs with fast-math options.
__device__ inline float multiplied(float x, float by) { return __fmul_rn(x, by); }
__device__ inline float divided(float x, float by) { return __fdiv_rn(x, by); }
__device__ inline float multiplied_plus(float x, float by, float plus) { return __fmaf_rn(x, by, plus); }
__device__ inline float inverse_towards_zero(float x) { return __frcp_rz(x); }

// Converts two f16 in a word. The first of several elements is always in the low bits.
__device__ inline float2 from_f16x2(std::uint32_t word) {
  float2 x;
  asm("{\n .reg .b16 low, high;\n"
      " mov.b32 {low, high}, %2;\n"
      " cvt.f32.f16 %0, low;\n"
      " cvt.f32.f16 %1, high;\n}"
      : "=f"(x.x), "=f"(x.y)
      : "r"(word));
  return x;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890

// Saturates: numbers beyond the largest one become the largest one.
__device__ inline std::uint32_t to_e4m3x4(float first, float second, float third, float fourth) {
  std::uint32_t word;
  asm("{\n .reg .b16 low, high;\n"
      " cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      " mov.b32 %0, {low, high};\n}"
      : "=r"(word)
      : "f"(first), "f"(second), "f"(third), "f"(fourth));
  return word;
}
__device__ inline std::uint32_t to_e5m2x4(float first, float second, float third, float fourth) {
  std::uint32_t word;
  asm("{\n .reg .b16 low, high;\n"
      " cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
      " cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
      " mov.b32 %0, {low, high};\n}"
      : "=r"(word)
      : "f"(first), "f"(second), "f"(third), "f"(fourth));
  return word;
}

// Through f16, which has all numbers of both dtypes.
__device__ inline float4 from_e4m3x4(std::uint32_t word) {
  std::uint32_t low, high;
  asm("{\n .reg .b16 low, high;\n"
      " mov.b32 {low, high}, %2;\n"
      " cvt.rn.f16x2.e4m3x2 %0, low;\n"
      " cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(low), "=r"(high)
      : "r"(word));
  const float2 first = from_f16x2(low), second = from_f16x2(high);
  return {first.x, first.y, second.x, second.y};
}
__device__ inline float4 from_e5m2x4(std::uint32_t word) {
  std::uint32_t low, high;
  asm("{\n .reg .b16 low, high;\n"
      " mov.b32 {low, high}, %2;\n"
      " cvt.rn.f16x2.e5m2x2 %0, low;\n"
      " cvt.rn.f16x2.e5m2x2 %1, high;\n}"
      : "=r"(low), "=r"(high)
      : "r"(word));
  const float2 first = from_f16x2(low), second = from_f16x2(high);
  return {first.x, first.y, second.x, second.y};
}

#else  // sm_80 has no 8-bit floats

template <Dtype kTo>
__device__ inline std::uint32_t to_bytes(float first, float second, float third, float fourth) {
  return from_float(kTo, first, true) | from_float(kTo, second, true) << 8 |
         from_float(kTo, third, true) << 16 | from_float(kTo, fourth, true) << 24;
}
__device__ inline std::uint32_t to_e4m3x4(float first, float second, float third, float fourth) {
  return to_bytes<Dtype::kE4m3>(first, second, third, fourth);
}
__device__ inline std::uint32_t to_e5m2x4(float first, float second, float third, float fourth) {
  return to_bytes<Dtype::kE5m2>(first, second, third, fourth);
}

template <Dtype kFrom>
__device__ inline float4 from_bytes(std::uint32_t word) {
  return {to_float(kFrom, word & 0xff), to_float(kFrom, word >> 8 & 0xff), to_float(kFrom, word >> 16 & 0xff),
          to_float(kFrom, word >> 24)};
}
__device__ inline float4 from_e4m3x4(std::uint32_t word) { return from_bytes<Dtype::kE4m3>(word); }
__device__ inline float4 from_e5m2x4(std::uint32_t word) { return from_bytes<Dtype::kE5m2>(word); }

#endif

// Overflow is infinite.
__device__ inline std::uint32_t to_f16x2(float first, float second) {
  std::uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(first), "f"(second));
  return word;
}
__device__ inline std::uint32_t to_bf16x2(float first, float second) {
  std::uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(first), "f"(second));
  return word;
}

// Clamped to -128 .. 127; NaN is 0.
__device__ inline std::uint32_t to_int8x4(float first, float second, float third, float fourth) {
  std::uint32_t word;
  asm("{\n .reg .s32 a, b, c, d;\n .reg .b32 upper;\n"
      " cvt.rni.s32.f32 a, %1;\n"
      " cvt.rni.s32.f32 b, %2;\n"
      " cvt.rni.s32.f32 c, %3;\n"
      " cvt.rni.s32.f32 d, %4;\n"
      " cvt.pack.sat.s8.s32.b32 upper, d, c, 0;\n"
      " cvt.pack.sat.s8.s32.b32 %0, b, a, upper;\n}"
      : "=r"(word)
      : "f"(first), "f"(second), "f"(third), "f"(fourth));
  return word;
}

}  // namespace kvxfer::gpu
