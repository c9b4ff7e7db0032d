// Arithmetic as the PTX ISA defines it, on the bits that registers hold. T is the type that an instruction
// gives them: u16 to s64. Floats have separate functions.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "gpu/rounding.cuh"
#include "place.h"

namespace ptx {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using s8 = std::int8_t;
using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;

template <class T>
using Bits = std::make_unsigned_t<T>;
template <class T>
inline constexpr unsigned kNbits = 8 * sizeof(T);

// What a register holds before it is set: an arbitrary value, as on a device.
template <class T>
inline constexpr T kUnset = static_cast<T>(0xa5a5a5a5a5a5a5a5);

// A value of type T in a register that may be wider: sign-extended if T is signed.
template <class T, class Register>
constexpr Register widened(Bits<T> value) {
  return static_cast<Register>(static_cast<T>(value));
}

// ---- integers ----

template <class T>
constexpr Bits<T> add(Bits<T> a, Bits<T> b) {
  return static_cast<Bits<T>>(u64{a} + u64{b});
}
template <class T>
constexpr Bits<T> sub(Bits<T> a, Bits<T> b) {
  return static_cast<Bits<T>>(u64{a} - u64{b});
}
template <class T>
constexpr Bits<T> neg(Bits<T> a) {
  return static_cast<Bits<T>>(-u64{a});
}
template <class T>
constexpr Bits<T> mul_lo(Bits<T> a, Bits<T> b) {
  return static_cast<Bits<T>>(u64{a} * u64{b});
}
template <class T>
constexpr Bits<T> mul_hi(Bits<T> a, Bits<T> b) {
  __extension__ using Product = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  const Product product = Product{static_cast<T>(a)} * Product{static_cast<T>(b)};
  return static_cast<Bits<T>>(product >> kNbits<T>);
}
template <class T>
constexpr auto mul_wide(Bits<T> a, Bits<T> b) {
  using Wide = std::conditional_t<sizeof(T) == 2, u32, u64>;
  const Wide extended_a = widened<T, Wide>(a), extended_b = widened<T, Wide>(b);
  return static_cast<Wide>(extended_a * extended_b);
}
template <class T>
constexpr Bits<T> mad_lo(Bits<T> a, Bits<T> b, Bits<T> c) {
  return add<T>(mul_lo<T>(a, b), c);
}
template <class T>
constexpr auto mad_wide(Bits<T> a, Bits<T> b, decltype(mul_wide<T>(0, 0)) c) {
  return static_cast<decltype(c)>(mul_wide<T>(a, b) + c);
}
template <class T>
Bits<T> div(const Place& at, Bits<T> a, Bits<T> b) {
  if (b == 0) trap(at, "a division by zero, which gives anything");
  if (std::is_signed_v<T> && static_cast<s64>(static_cast<T>(b)) == -1) return neg<T>(a);
  return static_cast<Bits<T>>(static_cast<T>(a) / static_cast<T>(b));
}
template <class T>
Bits<T> rem(const Place& at, Bits<T> a, Bits<T> b) {
  return sub<T>(a, mul_lo<T>(div<T>(at, a, b), b));
}
template <class T>
constexpr Bits<T> min(Bits<T> a, Bits<T> b) {
  return static_cast<T>(a) < static_cast<T>(b) ? a : b;
}
template <class T>
constexpr Bits<T> max(Bits<T> a, Bits<T> b) {
  return static_cast<T>(a) > static_cast<T>(b) ? a : b;
}
template <class T>
constexpr Bits<T> abs(Bits<T> a) {
  return static_cast<T>(a) < 0 ? neg<T>(a) : a;
}

// ---- bits ----

template <class T>
constexpr T land(T a, T b) {
  return static_cast<T>(a & b);
}
template <class T>
constexpr T lor(T a, T b) {
  return static_cast<T>(a | b);
}
template <class T>
constexpr T lxor(T a, T b) {
  return static_cast<T>(a ^ b);
}
template <class T>
constexpr T lnot(T a) {
  return static_cast<T>(~a);
}
template <>
constexpr bool lnot<bool>(bool a) {
  return !a;
}

// Shift amounts above the width count as the width.
template <class T>
constexpr Bits<T> shl(Bits<T> a, u32 by) {
  return by >= kNbits<T> ? Bits<T>{0} : static_cast<Bits<T>>(u64{a} << by);
}
template <class T>
constexpr Bits<T> shr(Bits<T> a, u32 by) {
  const u32 clamped = std::min(by, kNbits<T>);
  if (std::is_signed_v<T>) return static_cast<Bits<T>>(static_cast<T>(a) >> std::min(clamped, kNbits<T> - 1));
  return clamped == kNbits<T> ? Bits<T>{0} : static_cast<Bits<T>>(a >> clamped);
}
template <bool kWraps>
constexpr u32 shift_amount(u32 by) {
  return kWraps ? by % 32 : std::min(by, u32{32});
}
// The high half of the word pair {b, a} after a shift to the left, and its low half after a shift to the
// right.
template <bool kWraps>
constexpr u32 shf_l(u32 a, u32 b, u32 by) {
  return static_cast<u32>((((u64{b} << 32) | a) << shift_amount<kWraps>(by)) >> 32);
}
template <bool kWraps>
constexpr u32 shf_r(u32 a, u32 b, u32 by) {
  return static_cast<u32>(((u64{b} << 32) | a) >> shift_amount<kWraps>(by));
}

// Positions and lengths use their low byte. Beyond the highest bit, a signed field is extended by the sign of
// its existing part.
template <class T>
constexpr Bits<T> bfe(Bits<T> a, u32 position, u32 length) {
  position &= 0xff;
  length &= 0xff;
  constexpr u32 kLast = kNbits<T> - 1;
  Bits<T> field = 0;
  const bool sign = std::is_signed_v<T> && length != 0 && (a >> std::min(position + length - 1, kLast) & 1);
  for (u32 k = 0; k <= kLast; ++k) {
    const bool bit = k < length && position + k <= kLast ? (a >> (position + k) & 1) : sign;
    field = static_cast<Bits<T>>(field | Bits<T>{bit} << k);
  }
  return field;
}
template <class T>
constexpr T bfi(T field, T into, u32 position, u32 length) {
  position &= 0xff;
  length &= 0xff;
  for (u32 k = 0; k < length && position + k < kNbits<T>; ++k) {
    const T bit = T{1} << (position + k);
    into = (into & ~bit) | ((field >> k & 1) << (position + k));
  }
  return into;
}
// Each nibble selects one of eight bytes or, if its high bit is set, eight copies of that byte's sign.
constexpr u32 prmt(u32 a, u32 b, u32 selectors) {
  u32 word = 0;
  for (u32 k = 0; k < 4; ++k) {
    const u32 selector = selectors >> 4 * k & 0xf;
    const u32 byte = static_cast<u32>((u64{b} << 32 | a) >> 8 * (selector & 7)) & 0xff;
    word |= (selector & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * k;
  }
  return word;
}
constexpr u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 word = 0;
  for (u32 k = 0; k < 32; ++k)
    word |= (table >> ((a >> k & 1) << 2 | (b >> k & 1) << 1 | (c >> k & 1)) & 1) << k;
  return word;
}
template <class T>
constexpr u32 popc(T a) {
  return static_cast<u32>(std::popcount(a));
}
template <class T>
constexpr u32 clz(T a) {
  return static_cast<u32>(std::countl_zero(a));
}

// ---- comparisons and choices ----

template <class T>
constexpr bool eq(Bits<T> a, Bits<T> b) {
  return a == b;
}
template <class T>
constexpr bool ne(Bits<T> a, Bits<T> b) {
  return a != b;
}
template <class T>
constexpr bool lt(Bits<T> a, Bits<T> b) {
  return static_cast<T>(a) < static_cast<T>(b);
}
template <class T>
constexpr bool le(Bits<T> a, Bits<T> b) {
  return static_cast<T>(a) <= static_cast<T>(b);
}
template <class T>
constexpr bool gt(Bits<T> a, Bits<T> b) {
  return lt<T>(b, a);
}
template <class T>
constexpr bool ge(Bits<T> a, Bits<T> b) {
  return le<T>(b, a);
}
template <class T>
constexpr T selp(T a, T b, bool first) {
  return first ? a : b;
}

// ---- float32 ----

inline constexpr u32 kSign = 0x80000000, kNan = 0x7fffffff;  // the NaN that arithmetic gives

constexpr float value(u32 bits) { return std::bit_cast<float>(bits); }
constexpr u32 bits(float value) { return std::bit_cast<u32>(value); }
constexpr bool is_nan(u32 x) { return (x & ~kSign) > 0x7f800000; }

// Each operation is rounded by itself, so that the compiler cannot fuse them.
inline u32 rounded(float x) {
  const volatile float result = x;
  const float once = result;
  return std::isnan(once) ? kNan : bits(once);
}
inline u32 add_f32(u32 a, u32 b) { return rounded(value(a) + value(b)); }
inline u32 sub_f32(u32 a, u32 b) { return rounded(value(a) - value(b)); }
inline u32 mul_f32(u32 a, u32 b) { return rounded(value(a) * value(b)); }
inline u32 fma_f32(u32 a, u32 b, u32 c) { return rounded(std::fma(value(a), value(b), value(c))); }
inline u32 div_f32(u32 a, u32 b) { return rounded(value(a) / value(b)); }
inline u32 rcp_rn_f32(u32 a) { return rounded(1 / value(a)); }
inline u32 rcp_rz_f32(u32 a) {
  const float x = value(a);
  if (std::isinf(x) || x == 0) return rounded(1 / x);
  const float towards_zero = kvxfer::gpu::inverse_towards_zero(x);
  // Towards zero nothing overflows.
  return std::isinf(towards_zero) ? bits(std::copysign(std::numeric_limits<float>::max(), x))
                                  : rounded(towards_zero);
}
// For a NaN they give an unspecified NaN.
constexpr u32 abs_f32(u32 a) { return is_nan(a) ? kNan : a & ~kSign; }
constexpr u32 neg_f32(u32 a) { return is_nan(a) ? kNan : a ^ kSign; }
// The sign of the first operand, and the rest of the second.
constexpr u32 copysign_f32(u32 a, u32 b) { return (a & kSign) | (b & ~kSign); }
// If one operand is a NaN, the other is the result; -0 is less than +0.
constexpr u32 min_f32(u32 a, u32 b) {
  if (is_nan(a) || is_nan(b)) return is_nan(a) ? (is_nan(b) ? kNan : b) : a;
  if (value(a) == value(b)) return a | b;
  return value(a) < value(b) ? a : b;
}
constexpr u32 max_f32(u32 a, u32 b) {
  if (is_nan(a) || is_nan(b)) return is_nan(a) ? (is_nan(b) ? kNan : b) : a;
  if (value(a) == value(b)) return a & b;
  return value(a) > value(b) ? a : b;
}

constexpr bool is_unordered(u32 a, u32 b) { return is_nan(a) || is_nan(b); }
constexpr bool eq_f32(u32 a, u32 b) { return value(a) == value(b); }
constexpr bool ne_f32(u32 a, u32 b) { return !is_unordered(a, b) && value(a) != value(b); }
constexpr bool lt_f32(u32 a, u32 b) { return value(a) < value(b); }
constexpr bool le_f32(u32 a, u32 b) { return value(a) <= value(b); }
constexpr bool gt_f32(u32 a, u32 b) { return value(a) > value(b); }
constexpr bool ge_f32(u32 a, u32 b) { return value(a) >= value(b); }
// With a u: true also if an operand is NaN.
constexpr bool equ_f32(u32 a, u32 b) { return is_unordered(a, b) || eq_f32(a, b); }
constexpr bool neu_f32(u32 a, u32 b) { return is_unordered(a, b) || ne_f32(a, b); }
constexpr bool ltu_f32(u32 a, u32 b) { return is_unordered(a, b) || lt_f32(a, b); }
constexpr bool leu_f32(u32 a, u32 b) { return is_unordered(a, b) || le_f32(a, b); }
constexpr bool gtu_f32(u32 a, u32 b) { return is_unordered(a, b) || gt_f32(a, b); }
constexpr bool geu_f32(u32 a, u32 b) { return is_unordered(a, b) || ge_f32(a, b); }
constexpr bool num_f32(u32 a, u32 b) { return !is_unordered(a, b); }
constexpr bool nan_f32(u32 a, u32 b) { return is_unordered(a, b); }

// ---- conversions ----

template <class From, class To>
constexpr Bits<To> cvt(Bits<From> a) {
  return static_cast<Bits<To>>(static_cast<To>(static_cast<From>(a)));
}
template <class From>
u32 cvt_rn_f32(Bits<From> a) {
  return rounded(static_cast<float>(static_cast<From>(a)));
}
// Clamped to the range of To; NaN gives 0.
template <class To>
Bits<To> clamped(float integral) {
  static_assert(sizeof(To) == 4, "of 64 bits a NaN is something else");
  constexpr double kLeast = std::numeric_limits<To>::min(), kMost = std::numeric_limits<To>::max();
  if (std::isnan(integral)) return 0;
  return static_cast<Bits<To>>(static_cast<To>(std::clamp<double>(integral, kLeast, kMost)));
}
template <class To>
Bits<To> cvt_rni(u32 a) {
  return clamped<To>(std::nearbyint(value(a)));
}
template <class To>
Bits<To> cvt_rzi(u32 a) {
  return clamped<To>(std::trunc(value(a)));
}

using kvxfer::Dtype;

inline u32 cvt_f32_f16(u16 a) { return bits(kvxfer::gpu::instruction_reads(Dtype::kF16, a)); }
// Two numbers to half a register each, the first one to the high half.
inline u32 cvt_f16x2(u32 high, u32 low) { return kvxfer::gpu::to_f16x2(value(low), value(high)); }
inline u32 cvt_bf16x2(u32 high, u32 low) { return kvxfer::gpu::to_bf16x2(value(low), value(high)); }
template <Dtype kTo>
u16 cvt_x2(u32 high, u32 low) {
  return static_cast<u16>(kvxfer::gpu::instruction_gives(kTo, value(high)) << 8 |
                          kvxfer::gpu::instruction_gives(kTo, value(low)));
}
// Through f16, which has all numbers of both dtypes.
template <Dtype kFrom>
u32 cvt_f16x2_from(u16 pair) {
  const auto half = [](u32 byte) {
    return kvxfer::gpu::instruction_gives(Dtype::kF16, kvxfer::gpu::instruction_reads(kFrom, byte));
  };
  return half(pair >> 8) << 16 | half(pair & 0xff);
}
// Two integers to the two low bytes, the first one to the higher of them; above them the low half of c.
constexpr u32 cvt_pack_sat_s8(u32 a, u32 b, u32 c) {
  const auto byte = [](u32 word) {
    return static_cast<u32>(std::clamp(static_cast<s32>(word), -128, 127)) & 0xff;
  };
  return c << 16 | byte(a) << 8 | byte(b);
}

}  // namespace ptx
