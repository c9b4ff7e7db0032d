// The factors with which a vector kernel applies a conversion's scales.
#pragma once

#include <cstdint>

#include "core/copy/convert.h"
#include "core/copy/fp8_code.h"
#include "core/copy/inverse.h"
#include "kvxfer/number.h"

namespace kvxfer {

// For any conversion. Lanes are multiplied by `times`. Then one of three: they are divided by `over`,
// multiplied by `high`, or replaced by fma(x, high, x * low). See Inverse.
struct Factors {
  float times, over, high, low;
  bool has_times, has_over, has_high, has_high_low;
};

// A NaN scale must not bring in a payload: kernels look for payloads in the elements alone.
inline float without_nan_payload(float scale) noexcept {
  return scale == scale ? scale : number::float_of(number::kInfinity | number::kQuiet);
}

inline Factors factors_of(const Scaling& scaling, Dtype to) noexcept {
  Inverse inverse;
  if (scaling.has_dst) inverse = inverse_of(scaling.dst);
  const bool has_high = inverse.kind == Inverse::kHigh;
  const bool has_high_low = inverse.kind == Inverse::kHighLow && itemsize(to) == 1;
  return {without_nan_payload(scaling.src),
          without_nan_payload(scaling.dst),
          inverse.high,
          inverse.low,
          scaling.has_src,
          scaling.has_dst && !has_high && !has_high_low,
          has_high,
          has_high_low};
}

// For a conversion from bf16 to an 8-bit float that needs only one positive factor: what most caches need.
struct NarrowFactor {
  float factor = 0;  // 0: one factor does not do; apply Factors
  float limit = 0;   // rounded down to bf16 it becomes largest_code, and so does everything beyond it
  // The largest code that is wanted: that of the largest number, or of overflow.
  std::uint32_t largest_code = 0;
};

inline NarrowFactor narrow_factor(const Scaling& scaling, Dtype to) noexcept {
  if (scaling.has_src || (scaling.has_dst && !(scaling.dst > 0))) return {};
  const float factor = scaling.has_dst ? inverse_of(scaling.dst).bf16 : 1;
  const FloatFormat format = float_format(to);
  const std::uint32_t largest_code = scaling.saturate ? format.largest : format.overflow;
  // Rounded down to bf16 it is at most 2^-7 smaller, and becomes the same code.
  const float limit =
      number::float_of(fp8_number(format, largest_code)) * (scaling.has_dst ? scaling.dst : 1);
  return {factor, limit, largest_code};
}

}  // namespace kvxfer
