// Converts elements to another dtype: one by one as number.h defines it, or eight at once by instructions
// that give the same bits.
#pragma once

#include "gpu/convert_job.h"
#include "gpu/rounding.cuh"
#include "kvxfer/number.h"

namespace kvxfer::gpu {

// ---- one element ----

// The NaN that x86 gives if no operand was a NaN. An operand that is a NaN stays, and becomes quiet.
inline constexpr std::uint32_t kDefaultNan = number::kSign | number::kInfinity | number::kQuiet;

__device__ inline float with_nan(float result, float x, float scale) {
  if (x != x) return number::float_of(number::bits_of(x) | number::kQuiet);
  if (scale != scale) return number::float_of(number::kInfinity | number::kQuiet);
  return result == result ? result : number::float_of(kDefaultNan);
}

__device__ inline float scaled(float x, const Conversion& conversion, const Run& run) {
  if (conversion.src_scales != ScalePlace::kNone)
    x = with_nan(multiplied(x, run.src_scale), x, run.src_scale);
  return x;
}

__device__ inline std::uint32_t converted(std::uint32_t bits, const Conversion& conversion, const Run& run) {
  const bool has_dst = conversion.dst_scales != ScalePlace::kNone;
  if (conversion.src_dtype == conversion.dst_dtype && conversion.src_scales == ScalePlace::kNone &&
      !has_dst && !conversion.saturate)
    return bits;
  float x = scaled(to_float(conversion.src_dtype, bits), conversion, run);
  if (has_dst) x = with_nan(divided(x, run.dst_scale), x, run.dst_scale);
  return from_float(conversion.dst_dtype, x, conversion.saturate != 0);
}

// Returns the bits of the magnitude, or 0 if x is not finite.
__device__ inline std::uint32_t finite_magnitude(float x) {
  const std::uint32_t magnitude = number::bits_of(x) & ~number::kSign;
  return magnitude < number::kInfinity ? magnitude : 0;
}

// core/copy/convert.h: scale_for()
__device__ inline float scale_for(Dtype to, std::uint32_t amax_bits) {
  if (itemsize(to) != 1 || amax_bits == 0) return 1;
  const float scale = divided(number::float_of(amax_bits), largest(to));
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

// ---- factors ----

// The numbers that vectors are multiplied by. From two bytes to one, fma(x, high, x * low) stands for x /
// scale; from one to two, x * high stands for x * scale. high is NaN if that would give wrong bits.
struct Factors { float high, low; };

inline constexpr std::uint32_t kNoFactor = number::kInfinity | number::kQuiet;

// See core/copy/inverse.h, and the proof in inverse.cpp. Here high is 1 / scale rounded towards zero, so low
// has its sign; low has a relative error of 1.5 * 2^-23, which is 2^-46 of the inverse instead of 2^-47. With
// the rounding of x * low the error is 2^-45. The proof's margin, which is twice as wide here, allows for
// that.
__device__ inline Factors inverse_of(float scale) {
  constexpr std::uint32_t kModulus = 1u << 17, kNear = 64;
  const std::uint32_t bits = number::bits_of(scale), magnitude = bits & ~number::kSign;
  const bool is_moderate = magnitude >= 67u << 23 && magnitude <= 187u << 23;  // 2^-60 .. 2^60
  if ((bits & 0x7fffff) == 0 && is_moderate) {  // two halves: every step is exact
    const float half = number::float_of((bits & number::kSign) | ((253u << 23) - magnitude));
    return {half, half};
  }
  const std::uint32_t distance = bits % kModulus;
  const bool is_near = distance != 0 && (distance <= kNear || distance >= kModulus - kNear);
  if (!is_moderate || is_near) return {number::float_of(kNoFactor), 0};
  const float high = inverse_towards_zero(scale);
  return {high, multiplied(multiplied_plus(-scale, high, 1), high)};
}

__device__ inline Factors factors_of(const Conversion& conversion, float src_scale, float dst_scale) {
  const bool narrows = itemsize(conversion.dst_dtype) == 1;
  const bool has_src = conversion.src_scales != ScalePlace::kNone;
  const bool has_dst = conversion.dst_scales != ScalePlace::kNone;
  if (narrows ? has_src : has_dst) return {number::float_of(kNoFactor), 0};
  if (narrows) return inverse_of(has_dst ? dst_scale : 1);
  if (!has_src) src_scale = 1;
  // convert_vector() looks for infinities at the source. For all other elements, saturation must have no
  // effect.
  const float most = conversion.src_dtype == Dtype::kInt8 ? 128 : largest(conversion.src_dtype);
  const float bound = conversion.saturate ? largest(conversion.dst_dtype) : 0x1.fffffep127f;
  const float beyond = conversion.saturate ? multiplied(most, src_scale) : src_scale;
  const bool does = beyond <= bound && beyond >= -bound;
  return {does ? src_scale : number::float_of(kNoFactor), 0};
}

// ---- eight elements ----

template <std::size_t kItemsize>
struct VectorOf;
template <>
struct VectorOf<1> {
  using Type = uint2;
};
template <>
struct VectorOf<2> {
  using Type = uint4;
};
template <Dtype kDtype>
using Vector = typename VectorOf<itemsize(kDtype)>::Type;

struct Eight { float at[kAtomElements]; };

__device__ inline std::uint32_t splat(std::uint32_t byte) { return byte * 0x01010101; }

// Returns bit 7 of each byte of the two words whose value without sign is `least` or more; the words are
// ORed.
__device__ inline std::uint32_t bytes_from(uint2 vector, std::uint32_t least) {
  const std::uint32_t without_sign = splat(0x7f), to_carry = splat(0x80 - least);
  return (((vector.x & without_sign) + to_carry) | ((vector.y & without_sign) + to_carry)) & splat(0x80);
}

__device__ inline float2 from_bf16x2(std::uint32_t word) {
  return {number::float_of(word << 16), number::float_of(word & 0xffff0000)};
}

__device__ inline float4 from_int8x4(std::uint32_t word) {
  return {static_cast<float>(static_cast<std::int8_t>(word)),
          static_cast<float>(static_cast<std::int8_t>(word >> 8)),
          static_cast<float>(static_cast<std::int8_t>(word >> 16)),
          static_cast<float>(static_cast<std::int8_t>(word >> 24))};
}

template <Dtype kFrom>
__device__ inline Eight to_floats(uint4 vector) {
  const auto pair = [](std::uint32_t word) {
    if constexpr (kFrom == Dtype::kBf16) return from_bf16x2(word);
    if constexpr (kFrom == Dtype::kF16) return from_f16x2(word);
  };
  const float2 a = pair(vector.x), b = pair(vector.y), c = pair(vector.z), d = pair(vector.w);
  return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
}

template <Dtype kFrom>
__device__ inline Eight to_floats(uint2 vector) {
  const auto four = [](std::uint32_t word) {
    if constexpr (kFrom == Dtype::kE4m3) return from_e4m3x4(word);
    if constexpr (kFrom == Dtype::kE5m2) return from_e5m2x4(word);
    if constexpr (kFrom == Dtype::kInt8) return from_int8x4(word);
  };
  const float4 a = four(vector.x), b = four(vector.y);
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

template <Dtype kTo>
__device__ inline std::uint32_t to_bytes_of(float first, float second, float third, float fourth) {
  if constexpr (kTo == Dtype::kE4m3) return to_e4m3x4(first, second, third, fourth);
  if constexpr (kTo == Dtype::kE5m2) return to_e5m2x4(first, second, third, fourth);
  if constexpr (kTo == Dtype::kInt8) return to_int8x4(first, second, third, fourth);
}

// The largest float32 that does not overflow; it need not be a number of the dtype.
template <Dtype kTo>
constexpr float kLastFinite = kTo == Dtype::kE4m3 ? 0x1.dp8f : 0x1.dffffep15f;

// The functions below return true if all elements have the bits that number.h defines.

template <Dtype kFrom, Dtype kTo>
__device__ inline bool convert_vector(uint4 from, Factors factors, bool saturate, uint2& to) {
  Eight x = to_floats<kFrom>(from);
#pragma unroll
  for (float& each : x.at) each = multiplied_plus(each, factors.high, multiplied(each, factors.low));
  to.x = to_bytes_of<kTo>(x.at[0], x.at[1], x.at[2], x.at[3]);
  to.y = to_bytes_of<kTo>(x.at[4], x.at[5], x.at[6], x.at[7]);
  if constexpr (kTo == Dtype::kInt8) return factors.high == factors.high;
  // The largest code may mean the largest number or overflow; a NaN's code lies above it.
  if (bytes_from(to, float_format(kTo).largest) == 0) return true;
  const float most = saturate ? 0x1.fffffep127f : kLastFinite<kTo>;
  bool right = true;
#pragma unroll
  for (const float each : x.at) right &= fabsf(each) <= most;
  return right;
}

template <Dtype kFrom, Dtype kTo>
__device__ inline bool convert_vector(uint2 from, Factors factors, bool, uint4& to) {
  Eight x = to_floats<kFrom>(from);
#pragma unroll
  for (float& each : x.at) each = multiplied(each, factors.high);
  const auto pair = [](float first, float second) {
    return kTo == Dtype::kBf16 ? to_bf16x2(first, second) : to_f16x2(first, second);
  };
  to = {pair(x.at[0], x.at[1]), pair(x.at[2], x.at[3]), pair(x.at[4], x.at[5]), pair(x.at[6], x.at[7])};
  bool right = factors.high == factors.high;
  if constexpr (kFrom != Dtype::kInt8) right &= bytes_from(from, float_format(kFrom).overflow) == 0;
  return right;
}

// Finds the bits of the largest magnitude among eight elements, times `scale`. Returns false if it is not
// finite.
template <Dtype kFrom>
__device__ inline bool amax_of_vector(uint4 from, float scale, std::uint32_t& amax_bits) {
  std::uint32_t most = 0;  // the magnitude, above 17 bits that mean nothing
  const std::uint32_t words[] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (const std::uint32_t word : words) {
    most = max(most, word << 1);
    most = max(most, word << 17);
  }
  amax_bits = number::bits_of(multiplied(to_float(kFrom, most >> 17), scale)) & ~number::kSign;
  return amax_bits < number::kInfinity;
}

}  // namespace kvxfer::gpu
