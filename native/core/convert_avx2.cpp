// Conversions with AVX2, F16C and FMA.
#include "core/convert_kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvxfer {
namespace {

#define KVXFER_AVX2_MEMBER __attribute__((target("avx2,f16c,fma"), always_inline)) inline
#define KVXFER_AVX2 KVXFER_AVX2_MEMBER static

// What stands for x / scale without a division, which costs as much as all the rest.
struct Inverse {
  enum Kind : std::uint8_t {
    kNone,    // nothing: divide
    kHigh,    // x * high is x / scale, to the bit
    kHighLow  // fma(x, high, x * low) rounds to the same 8-bit number as x / scale
  };
  Kind kind = kNone;
  float high = 1, low = 0;
  float bf16 = 0;  // x * bf16 rounds to the same 8-bit float as x / scale where x is a bf16; 0: there is none
};

constexpr std::uint32_t significand_of(float x) { return (number::bits_of(x) & 0x7fffff) | 0x800000; }

// Far from underflow of any product that is not far below the smallest number of 8 bits, and
// from overflow of any that is not far above the largest.
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

// The same, remembered: runs are short, and there are as many scales as heads, often just one.
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

// A scale that is NaN must not bring a payload in: see Avx2Loops::store().
float without_nan_payload(float scale) noexcept {
  return scale == scale ? scale : number::float_of(number::kInfinity | number::kQuiet);
}

// 32 elements, in order: one vector of 8-bit elements, two of 16-bit ones.
struct Lanes { __m256 at[4]; };
constexpr std::size_t kStep = 32;

struct Avx2Loops {
  // ---- elements to lanes ----

  KVXFER_AVX2 __m256i vector_at(const std::byte* src, std::size_t index) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src) + index);
  }
  KVXFER_AVX2 __m128i half_at(const std::byte* src, std::size_t index) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(src) + index);
  }

  // 16 bytes, the same in both halves of a vector: a load alone, where widening costs a shuffle
  // across the halves.
  KVXFER_AVX2 __m256i twice_at(const std::byte* src, std::size_t index) {
    return _mm256_broadcastsi128_si256(half_at(src, index));
  }
  // Eight bf16 in the upper halves of as many lanes: float32 already. (-1: a zero byte)
  KVXFER_AVX2 __m256 widen_bf16(__m256i twice) {
    return _mm256_castsi256_ps(_mm256_shuffle_epi8(
        twice, _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15)));
  }
  // 16 bytes as the upper halves of 16-bit numbers.
  KVXFER_AVX2 __m256i widen_bytes(__m256i twice) {
    return _mm256_shuffle_epi8(
        twice, _mm256_setr_epi8(-1, 0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7,  //
                                -1, 8, -1, 9, -1, 10, -1, 11, -1, 12, -1, 13, -1, 14, -1, 15));
  }

  // 16 e5m2 in the high bytes are f16 already; a NaN becomes the quiet one.
  KVXFER_AVX2 __m256i e5m2_to_f16(__m256i high) {
    const __m256i magnitude = _mm256_and_si256(high, _mm256_set1_epi16(0x7fff));
    const __m256i nan = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(0x7c00));
    const __m256i quiet = _mm256_or_si256(high, _mm256_and_si256(nan, _mm256_set1_epi16(0x0200)));
    return _mm256_andnot_si256(_mm256_and_si256(nan, _mm256_set1_epi16(0x0100)), quiet);
  }

  // 16 e4m3 in the high bytes to f16 that are 2^8 too small, for the exponent's bias is 7 and not
  // 15. In f16, and not in float32, because its subnormals cost nothing and know no DAZ.
  KVXFER_AVX2 __m256i e4m3_to_small_f16(__m256i high) {
    // The shift doubles the sign; its copy is cleared to be the exponent's leading bit.
    const __m256i number = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(-0x4080));
    const __m256i magnitude = _mm256_and_si256(high, _mm256_set1_epi16(0x7f00));
    const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f00));
    // 0x3f80, the code that means NaN, to the NaN of f16.
    return _mm256_xor_si256(number, _mm256_and_si256(nan, _mm256_set1_epi16(0x3f80 ^ 0x7e00)));
  }

  template <Dtype kFrom>
  KVXFER_AVX2 Lanes load(const std::byte* src) {
    Lanes x;
    if constexpr (kFrom == Dtype::kF32) {
      for (std::size_t k = 0; k < 4; ++k) x.at[k] = _mm256_castsi256_ps(vector_at(src, k));
    } else if constexpr (kFrom == Dtype::kBf16) {
      for (std::size_t k = 0; k < 4; ++k) x.at[k] = widen_bf16(twice_at(src, k));
    } else if constexpr (kFrom == Dtype::kF16) {
      for (std::size_t k = 0; k < 4; ++k) x.at[k] = _mm256_cvtph_ps(half_at(src, k));
    } else if constexpr (kFrom == Dtype::kInt8) {
      for (std::size_t k = 0; k < 4; ++k)
        x.at[k] = _mm256_cvtepi32_ps(
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(src + 8 * k))));
    } else {
      for (std::size_t k = 0; k < 2; ++k) {
        const __m256i high = widen_bytes(twice_at(src, k));
        const __m256i f16 = kFrom == Dtype::kE5m2 ? e5m2_to_f16(high) : e4m3_to_small_f16(high);
        x.at[2 * k] = _mm256_cvtph_ps(_mm256_castsi256_si128(f16));
        x.at[2 * k + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(f16, 1));
      }
      if constexpr (kFrom == Dtype::kE4m3)
        for (__m256& lanes : x.at) lanes = _mm256_mul_ps(lanes, _mm256_set1_ps(256));
    }
    return x;
  }

  // ---- lanes to elements ----

  KVXFER_AVX2 __m256i bits_of(__m256 x) { return _mm256_castps_si256(x); }
  KVXFER_AVX2 __m256i splat(std::uint32_t bits) { return _mm256_set1_epi32(static_cast<int>(bits)); }
  KVXFER_AVX2 __m256i magnitude_of(__m256 x) { return _mm256_and_si256(bits_of(x), splat(~number::kSign)); }

  // Four vectors of 32-bit integers to one of bytes, with signed saturation. Packing works on each
  // half of a vector by itself: in_order() puts the bytes right.
  KVXFER_AVX2 __m256i pack_bytes(__m256i a, __m256i b, __m256i c, __m256i d) {
    return _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  }
  KVXFER_AVX2 __m256i in_order(__m256i bytes) {
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }

  template <bool kHasPayload>
  KVXFER_AVX2 __m256i bf16_code(__m256 x) {
    const __m256i bits = bits_of(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), splat(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, splat(0x7fff)), odd);
    if constexpr (kHasPayload) {  // rounding up could carry it into the sign, or make it an infinity
      const __m256i sign = _mm256_and_si256(bits, splat(number::kSign));
      const __m256i quiet = _mm256_or_si256(sign, splat(number::kInfinity | number::kQuiet));
      rounded = _mm256_blendv_epi8(rounded, quiet, bits_of(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    }
    return _mm256_srli_epi32(rounded, 16);
  }

  // 16 f16 whose NaNs are the hardware's (quiet, with payload): takes the payload away.
  KVXFER_AVX2 __m256i without_payload(__m256i f16) {
    const __m256i magnitude = _mm256_and_si256(f16, _mm256_set1_epi16(0x7fff));
    const __m256i nan = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(0x7c00));
    return _mm256_andnot_si256(_mm256_and_si256(nan, _mm256_set1_epi16(0x01ff)), f16);
  }

  // The least magnitude that is overflow however one goes on from there (e4m3: the place of its NaN,
  // 480; e5m2: of its infinity, 2^16).
  template <Dtype kTo>
  static constexpr std::uint32_t kBeyond = (float_format(kTo).overflow << (23 - float_format(kTo).mantissa)) +
                                           (static_cast<std::uint32_t>(127 - float_format(kTo).bias) << 23);

  // What fp8_codes() gives has this many zeros below the code.
  template <Dtype kTo>
  static constexpr int kCodeShift = 7 - float_format(kTo).mantissa;

  // The codes, shifted, of magnitudes of which none lies beyond kBeyond.
  //
  // Let 2^e be the magnitude's power of two, or the smallest normal number's. Adding 2^(e + drop)
  // puts the code's last bit in place of the sum's last bit: the addition rounds, ties to even,
  // and leaves 2^mantissa + (the code's mantissa), or just the mantissa of a subnormal, in the
  // sum's low half. The exponent's share is e - e_min, for the leading bit counts for one more: the
  // upper half holds it, kCodeShift too far left. One instruction shifts and adds both.
  template <Dtype kTo, int kFurther = 0>
  KVXFER_AVX2 __m256i fp8_codes(__m256 magnitude) {
    constexpr std::uint32_t mantissa = float_format(kTo).mantissa, drop = 23 - mantissa;
    constexpr std::uint32_t smallest = 128 - float_format(kTo).bias;
    // Lies in the sum's low half beforehand, a negative number there: minus the share of an exponent
    // e_min + drop. Even, so that ties are not touched.
    constexpr std::uint32_t offset = -((smallest + drop) << mantissa) & 0xffff;
    static_assert(offset % 2 == 0);
    const __m256i power = _mm256_max_epi32(_mm256_and_si256(bits_of(magnitude), splat(number::kInfinity)),
                                           splat(smallest << 23));
    // times 2^drop, and the offset with it
    const __m256 sum = _mm256_fmadd_ps(_mm256_castsi256_ps(power),
                                       _mm256_castsi256_ps(splat(((127 + drop) << 23) + offset)), magnitude);
    return _mm256_madd_epi16(bits_of(sum), splat(1u << (16 + kFurther) | 1u << (kCodeShift<kTo> + kFurther)));
  }

  // Rounded to an integer; NaN is 0. Below -128 packing saturates: what the conversion gives
  // there is negative even where it overflows.
  KVXFER_AVX2 __m256i int8_code(__m256 x) {
    const __m256 ordered = _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q));
    return _mm256_cvtps_epi32(_mm256_min_ps(ordered, _mm256_set1_ps(127)));
  }

  KVXFER_AVX2 void put(__m256i* to, __m256i elements, bool stream) {
    if (stream)
      _mm256_stream_si256(to, elements);
    else
      _mm256_storeu_si256(to, elements);
  }

  // kHasPayload: a NaN among them may be any, and not just the quiet one of either sign.
  template <Dtype kTo, bool kHasPayload>
  KVXFER_AVX2 void store(std::byte* dst, const Lanes& x, bool stream) {
    auto* to = reinterpret_cast<__m256i*>(dst);
    if constexpr (kTo == Dtype::kF32) {
      for (std::size_t k = 0; k < 4; ++k) put(to + k, bits_of(x.at[k]), stream);
    } else if constexpr (kTo == Dtype::kBf16) {
      for (std::size_t k = 0; k < 2; ++k) {
        const __m256i codes =
            _mm256_packus_epi32(bf16_code<kHasPayload>(x.at[2 * k]), bf16_code<kHasPayload>(x.at[2 * k + 1]));
        put(to + k, _mm256_permute4x64_epi64(codes, 0b11'01'10'00), stream);
      }
    } else if constexpr (kTo == Dtype::kF16) {
      for (std::size_t k = 0; k < 2; ++k) {
        const __m128i low = _mm256_cvtps_ph(x.at[2 * k], _MM_FROUND_TO_NEAREST_INT);
        const __m128i high = _mm256_cvtps_ph(x.at[2 * k + 1], _MM_FROUND_TO_NEAREST_INT);
        const __m256i codes = _mm256_set_m128i(high, low);
        put(to + k, kHasPayload ? without_payload(codes) : codes, stream);
      }
    } else if constexpr (kTo == Dtype::kInt8) {
      const __m256i codes =
          pack_bytes(int8_code(x.at[0]), int8_code(x.at[1]), int8_code(x.at[2]), int8_code(x.at[3]));
      put(to, in_order(codes), stream);
    } else {
      __m256i magnitude[4], codes[4];
      for (std::size_t k = 0; k < 4; ++k) {
        magnitude[k] = magnitude_of(x.at[k]);
        codes[k] = fp8_codes<kTo>(_mm256_castsi256_ps(_mm256_min_epi32(magnitude[k], splat(kBeyond<kTo>))));
      }
      const __m256i low = _mm256_srli_epi16(_mm256_packs_epi32(codes[0], codes[1]), kCodeShift<kTo>);
      const __m256i high = _mm256_srli_epi16(_mm256_packs_epi32(codes[2], codes[3]), kCodeShift<kTo>);
      // Saturation keeps a sign, and a code's top bit is free.
      const __m256i signs =
          _mm256_and_si256(pack_bytes(bits_of(x.at[0]), bits_of(x.at[1]), bits_of(x.at[2]), bits_of(x.at[3])),
                           _mm256_set1_epi8(static_cast<char>(0x80)));
      __m256i bytes = _mm256_packs_epi16(low, high);
      if constexpr (float_format(kTo).nan != float_format(kTo).overflow) {
        const __m256i infinity = splat(number::kInfinity);
        const __m256i nan = pack_bytes(
            _mm256_cmpgt_epi32(magnitude[0], infinity), _mm256_cmpgt_epi32(magnitude[1], infinity),
            _mm256_cmpgt_epi32(magnitude[2], infinity), _mm256_cmpgt_epi32(magnitude[3], infinity));
        bytes = with_nan<kTo>(bytes, nan);
      }
      put(to, in_order(_mm256_or_si256(bytes, signs)), stream);
    }
  }

  // The NaN's code, the largest of all, where `nan` is -1.
  template <Dtype kTo>
  KVXFER_AVX2 __m256i with_nan(__m256i codes, __m256i nan) {
    return _mm256_max_epu8(codes, _mm256_and_si256(nan, _mm256_set1_epi8(float_format(kTo).nan)));
  }

  // ---- loops ----

  // How the source's and the destination's scale are applied. A branch of the loop's own, always
  // taken alike, in place of four loops a pair.
  struct Factors {
    __m256 times, over, high, low;
    bool has_times, has_over, has_high, has_high_low;
  };

  template <Dtype kTo>
  KVXFER_AVX2 Factors factors_of(const Scaling& scaling) {
    Inverse inverse;
    if (scaling.has_dst) inverse = inverse_of(scaling.dst);
    const bool has_high = inverse.kind == Inverse::kHigh;
    const bool has_high_low = inverse.kind == Inverse::kHighLow && itemsize(kTo) == 1;
    return {_mm256_set1_ps(without_nan_payload(scaling.src)),
            _mm256_set1_ps(without_nan_payload(scaling.dst)),
            _mm256_set1_ps(inverse.high),
            _mm256_set1_ps(inverse.low),
            scaling.has_src,
            scaling.has_dst && !has_high && !has_high_low,
            has_high,
            has_high_low};
  }

  // A step converts kStep elements. Between any two dtypes:
  template <Dtype kFrom, Dtype kTo>
  struct AnyStep {
    Factors factors;
    bool saturate;

    KVXFER_AVX2_MEMBER void operator()(const std::byte* src, std::byte* dst, bool stream) const {
      Lanes x = load<kFrom>(src);
      if (factors.has_times)
        for (__m256& lanes : x.at) lanes = _mm256_mul_ps(lanes, factors.times);
      if (factors.has_over)
        for (__m256& lanes : x.at) lanes = _mm256_div_ps(lanes, factors.over);
      if (factors.has_high)
        for (__m256& lanes : x.at) lanes = _mm256_mul_ps(lanes, factors.high);
      if (factors.has_high_low && itemsize(kTo) == 1)
        for (__m256& lanes : x.at)
          lanes = _mm256_fmadd_ps(lanes, factors.high, _mm256_mul_ps(lanes, factors.low));
      if (saturate && kTo != Dtype::kInt8)  // int8 clamps anyway; the operands' order keeps a NaN
        for (__m256& lanes : x.at)
          lanes = _mm256_max_ps(_mm256_set1_ps(-largest(kTo)),
                                _mm256_min_ps(_mm256_set1_ps(largest(kTo)), lanes));
      store<kTo, itemsize(kFrom) != 1>(dst, x, stream);  // no room for a payload in 8 bits
    }
  };

  // From bf16 to 8-bit floats, times a positive factor: what most caches need. Elements are two in a
  // lane of 32 bits for as long as that will do. One is a float32 as soon as the other is gone, the
  // other by a shift; the codes are put beside each other again by a factor.
  template <Dtype kTo>
  struct NarrowStep {
    __m256 factor;
    __m256i limit;  // a bf16 that becomes the largest code that is wanted, in 16 lanes
    bool keeps_nan;  // which is not that code

    KVXFER_AVX2_MEMBER void operator()(const std::byte* src, std::byte* dst, bool stream) const {
      const __m256i number[2] = {vector_at(src, 0), vector_at(src, 1)};
      const __m256i without_sign = _mm256_set1_epi16(0x7fff);
      const __m256i magnitude[2] = {_mm256_and_si256(number[0], without_sign),
                                    _mm256_and_si256(number[1], without_sign)};
      __m256i bytes = _mm256_packus_epi32(pairs_of(magnitude[0]), pairs_of(magnitude[1]));
      if (keeps_nan) {
        const __m256i infinity = _mm256_set1_epi16(0x7f80);
        bytes = with_nan<kTo>(bytes, _mm256_packs_epi16(_mm256_cmpgt_epi16(magnitude[0], infinity),
                                                        _mm256_cmpgt_epi16(magnitude[1], infinity)));
      }
      // Saturation keeps a sign.
      const __m256i signs = _mm256_and_si256(_mm256_packs_epi16(number[0], number[1]),
                                             _mm256_set1_epi8(static_cast<char>(0x80)));
      put(reinterpret_cast<__m256i*>(dst),
          _mm256_permute4x64_epi64(_mm256_or_si256(bytes, signs), 0b11'01'10'00), stream);
    }

   private:
    // The codes of 16 elements, two bytes in each lane.
    KVXFER_AVX2_MEMBER __m256i pairs_of(__m256i magnitude) const {
      const __m256i clamped = _mm256_min_epi16(magnitude, limit);
      const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(clamped, 16));
      const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(clamped, splat(0xffff0000)));
      const __m256i pairs = _mm256_add_epi32(fp8_codes<kTo>(_mm256_mul_ps(even, factor)),
                                             fp8_codes<kTo, 8>(_mm256_mul_ps(odd, factor)));
      return _mm256_srli_epi32(pairs, kCodeShift<kTo>);
    }
  };

  // The factor of a NarrowStep, or 0 where an AnyStep must do it.
  static float narrow_factor(const Scaling& scaling) noexcept {
    if (scaling.has_src) return 0;
    if (!scaling.has_dst) return 1;
    return scaling.dst > 0 ? inverse_of(scaling.dst).bf16 : 0;
  }

  template <Dtype kTo>
  KVXFER_AVX2 NarrowStep<kTo> narrow_step(float factor, const Scaling& scaling) {
    // Rounded down to bf16 it is at most 2^-7 smaller, and becomes the same code.
    const float limit = (scaling.saturate ? largest(kTo) : number::float_of(kBeyond<kTo>)) *
                        (scaling.has_dst ? scaling.dst : 1.0f);
    return {_mm256_set1_ps(factor), _mm256_set1_epi16(static_cast<short>(number::bits_of(limit) >> 16)),
            scaling.saturate || float_format(kTo).nan != float_format(kTo).overflow};
  }

  template <Dtype kFrom, Dtype kTo, class Step>
  KVXFER_AVX2 void convert_steps(const std::byte* src, std::byte* dst, std::size_t count,
                                 const Traffic& traffic, const Step& step) {
    constexpr std::size_t from_nbytes = kStep * itemsize(kFrom), to_nbytes = kStep * itemsize(kTo);
    // Lines that are stored in part had better be in the cache.
    const bool stream =
        traffic.stream && (reinterpret_cast<std::uintptr_t>(dst) | (count * itemsize(kTo))) % 64 == 0;
    const std::byte* ahead = src + Traffic::kAheadNbytes;
    const std::size_t last_steps = std::min(count / kStep, Traffic::kAheadNbytes / from_nbytes);
    for (std::size_t left = count / kStep; left != 0; --left) {
      if (left == last_steps) ahead = traffic.next != nullptr ? traffic.next : src;
      for (std::size_t line = 0; line < from_nbytes; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(ahead + line), _MM_HINT_T0);
      step(src, dst, stream);
      src += from_nbytes;
      dst += to_nbytes;
      ahead += from_nbytes;
    }
    count %= kStep;
    if (count == 0) return;
    std::byte last_src[from_nbytes] = {}, last_dst[to_nbytes];
    std::memcpy(last_src, src, count * itemsize(kFrom));
    step(last_src, last_dst, false);
    std::memcpy(dst, last_dst, count * itemsize(kTo));
  }

  template <Dtype kFrom, Dtype kTo>
  __attribute__((target("avx2,f16c,fma"))) static void convert(const std::byte* src, std::byte* dst,
                                                               std::size_t count, const Scaling& scaling,
                                                               const Traffic& traffic) noexcept {
    if constexpr (kFrom == Dtype::kBf16 && (kTo == Dtype::kE4m3 || kTo == Dtype::kE5m2)) {
      if (const float factor = narrow_factor(scaling); factor != 0)
        return convert_steps<kFrom, kTo>(src, dst, count, traffic, narrow_step<kTo>(factor, scaling));
    }
    convert_steps<kFrom, kTo>(src, dst, count, traffic,
                              AnyStep<kFrom, kTo>{factors_of<kTo>(scaling), scaling.saturate});
  }

  template <Dtype kFrom>
  KVXFER_AVX2 __m256i amax_step(const std::byte* src, __m256 scale, __m256i largest_yet) {
    const Lanes x = load<kFrom>(src);
    for (const __m256& lanes : x.at) {
      const __m256i magnitude = magnitude_of(_mm256_mul_ps(lanes, scale));
      const __m256i finite = _mm256_cmpgt_epi32(splat(number::kInfinity), magnitude);
      // Magnitudes order as integers do.
      largest_yet = _mm256_max_epi32(largest_yet, _mm256_and_si256(magnitude, finite));
    }
    return largest_yet;
  }

  template <Dtype kFrom>
  __attribute__((target("avx2,f16c,fma"))) static float amax(const std::byte* src, std::size_t count,
                                                             float scale) noexcept {
    const __m256 scales = _mm256_set1_ps(scale);
    __m256i largest_yet = _mm256_setzero_si256();
    for (; count >= kStep; count -= kStep) {
      largest_yet = amax_step<kFrom>(src, scales, largest_yet);
      src += kStep * itemsize(kFrom);
    }
    if (count != 0) {  // zeros beside the rest
      std::byte last_src[kStep * itemsize(kFrom)] = {};
      std::memcpy(last_src, src, count * itemsize(kFrom));
      largest_yet = amax_step<kFrom>(last_src, scales, largest_yet);
    }
    std::uint32_t lanes[8], result = 0;
    std::memcpy(lanes, &largest_yet, sizeof lanes);
    for (const std::uint32_t lane : lanes) result = std::max(result, lane);
    return number::float_of(result);
  }
};

constexpr ConvertKernel kAvx2 = make_kernel<Avx2Loops>("avx2");

}  // namespace

const ConvertKernel* avx2_convert_kernel() noexcept {
  __builtin_cpu_init();
  const bool runs =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
  return runs ? &kAvx2 : nullptr;
}

}  // namespace kvxfer

#else

const kvxfer::ConvertKernel* kvxfer::avx2_convert_kernel() noexcept { return nullptr; }

#endif
