#include "core/copy/inverse.h"

#include <array>
#include <cmath>
#include <cstdint>

#include "kvxfer/number.h"

namespace kvxfer {
namespace {

constexpr std::uint32_t significand_of(float x) { return (number::bits_of(x) & 0x7fffff) | 0x800000; }

// Products with it do not underflow unless they are far below the smallest number of 8 bits, and do not
// overflow unless they are far above the largest.
bool is_moderate(float scale) noexcept { return std::abs(scale) >= 0x1p-60f && std::abs(scale) <= 0x1p60f; }

// Whether q = fma(x, high, x * low) may stand for RN(x / scale) where that is rounded to 8 bits.
//
// q is RN(x / scale * (1 + e)), |e| < 2^-45: high + low is 1 / scale to 2^-46, and the product that
// is rounded by itself is 2^-23 of the sum. Rounding to 8 bits tells the two apart only if a tie t
// lies between them or is one of them. Then a midpoint h of t and a float beside it lies between
// x / scale and x / scale * (1 + e). In integers, each a power of two times the number: scale is S,
// 2^23 <= S < 2^24; t is T < 2^8 (int8's are longest); h is H = T * 2^k +- 1, k >= 17,
// 2^24 < H < 2^26; and x, near S * H > 2^47 and a float, is a multiple of 2^17, as is S * T * 2^k.
// So x - S * H is S or -S modulo 2^17. It is not 0: H is odd, so S * H has more than 24 bits. So
// |x - S * H| is at least the distance of S from the next multiple of 2^17, or 2^17 if that is 0.
// But it would have to be at most 2^50 * 2^-45.
bool high_and_low_do(float scale) noexcept {
  constexpr std::uint32_t kModulus = 1u << 17, kNear = 32;
  const std::uint32_t distance = significand_of(scale) % kModulus;
  return distance == 0 || (distance > kNear && distance < kModulus - kNear);
}

// Whether x * inverse, `inverse` being 1 / scale to 3 * 2^-24, may stand for x / scale where x is a bf16
// and the quotient becomes an 8-bit float.
//
// Both are x / scale to 2^-22, rounding included, so they differ only if x / scale is as near to a
// tie. A tie is T, a bf16 X, with 16 <= T < 32 and 128 <= X < 256, each times a power of two: S * T
// would lie within 2^29 * 2^-22 of X times 2^20 or 2^21. There are 16 candidates of X, to be tried.
bool product_does(float scale, float inverse) noexcept {
  constexpr std::uint32_t kNear = 1u << 8;
  const std::uint32_t significand = significand_of(scale);
  for (std::uint32_t tie = 16; tie < 32; ++tie) {
    const std::uint32_t product = significand * tie;
    const int shift = product < 1u << 28 ? 20 : 21;
    const std::uint32_t nearest = (product + (1u << (shift - 1))) >> shift;
    const std::uint32_t distance = product - (nearest << shift) + kNear;  // wraps where it is far
    const auto x = static_cast<float>(nearest);
    if (distance <= 2 * kNear && x * inverse != x / scale) return false;
  }
  return true;
}

Inverse find_inverse(float scale) noexcept {
  Inverse out;
  if (!is_moderate(scale)) return out;
  const double inverse = 1.0 / static_cast<double>(scale);
  const auto nearest = static_cast<float>(inverse);
  if (significand_of(scale) == 0x800000) return {Inverse::kHigh, nearest, 0, nearest};
  const std::uint32_t bits = number::bits_of(nearest);
  if (high_and_low_do(scale)) {
    // Of high's sign, and not 0: infinities and the sign of 0 stay what they are.
    const bool too_large = std::abs(static_cast<double>(nearest)) > std::abs(inverse);
    out.kind = Inverse::kHighLow;
    out.high = number::float_of(too_large ? bits - 1 : bits);
    out.low = static_cast<float>(inverse - static_cast<double>(out.high));
  }
  for (const std::uint32_t candidate : {bits, bits - 1, bits + 1})
    if (out.bf16 == 0 && product_does(scale, number::float_of(candidate)))
      out.bf16 = number::float_of(candidate);
  return out;
}

}  // namespace

Inverse inverse_of(float scale) noexcept {
  struct Known {
    float scale = 1;
    Inverse inverse = {Inverse::kHigh, 1, 0, 1};
  };
  thread_local std::array<Known, 64> known;
  const std::uint32_t bits = number::bits_of(scale);
  Known& place = known[bits * 0x9e3779b1u >> 26];
  if (number::bits_of(place.scale) != bits) place = {scale, find_inverse(scale)};
  return place.inverse;
}

}  // namespace kvxfer
