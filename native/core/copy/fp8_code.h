// The constants by which vector kernels round float32 to an 8-bit float with one addition.
//
// Let 2^e be the magnitude's power of two, or the smallest normal number's. Adding 2^(e + drop) puts
// the code's last bit in place of the sum's last bit: the addition rounds, ties to even, and leaves
// 2^mantissa + (the code's mantissa), or just the mantissa of a subnormal, in the sum's low half. The
// exponent's share is e - e_min, for the leading bit counts for one more: the upper half holds it,
// kShift too far left. One instruction (vpmaddwd) shifts and adds both.
//
//   power = max(bits(magnitude) & infinity, kLeastPower)
//   sum   = fma(power, kRounder, magnitude)
//   code << kShift = madd(bits(sum), kPlaces<0>), of a magnitude of at most kBeyond
#pragma once

#include <cstdint>

#include "kvxfer/number.h"

namespace kvxfer {

// The magnitude that a code would have if it did not mean infinity or NaN, as float32's bits.
constexpr std::uint32_t fp8_number(FloatFormat format, std::uint32_t code) {
  return (code << (23 - format.mantissa)) + (static_cast<std::uint32_t>(127 - format.bias) << 23);
}

template <Dtype kTo>
struct Fp8Code {
  static constexpr std::uint32_t kMantissa = float_format(kTo).mantissa, kDrop = 23 - kMantissa;
  static constexpr std::uint32_t kSmallest = 128 - float_format(kTo).bias;  // exponent of 2^e_min
  static constexpr std::uint32_t kLeastPower = kSmallest << 23;

  // The least magnitude that is overflow however the conversion continues (e4m3: the place of its NaN,
  // 480; e5m2: that of its infinity, 2^16).
  static constexpr std::uint32_t kBeyond = fp8_number(float_format(kTo), float_format(kTo).overflow);

  // 2^drop, and an offset that lies in the sum's low half beforehand, where it is a negative number: minus
  // the share of an exponent e_min + drop. It is even, so ties stay ties.
  static constexpr std::uint32_t kOffset = -((kSmallest + kDrop) << kMantissa) & 0xffff;
  static_assert(kOffset % 2 == 0);
  static constexpr std::uint32_t kRounder = ((127 + kDrop) << 23) + kOffset;

  // The result has this many zeros below the code, and kFurther more.
  static constexpr int kShift = 7 - float_format(kTo).mantissa;
  template <int kFurther>
  static constexpr std::uint32_t kPlaces = 1u << (16 + kFurther) | 1u << (kShift + kFurther);
};

}  // namespace kvxfer
