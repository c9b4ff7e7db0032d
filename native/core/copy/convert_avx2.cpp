// Conversions with AVX2, F16C and FMA.
#include "core/copy/convert_kernel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/copy/factors.h"
#include "core/copy/fp8_code.h"

namespace kvxfer {
namespace {

#define KVXFER_AVX2_MEMBER __attribute__((target("avx2,f16c,fma"), always_inline)) inline
#define KVXFER_AVX2 KVXFER_AVX2_MEMBER static

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

  // The codes, shifted, of magnitudes up to kBeyond. See fp8_code.h.
  template <Dtype kTo, int kFurther = 0>
  KVXFER_AVX2 __m256i fp8_codes(__m256 magnitude) {
    using Code = Fp8Code<kTo>;
    const __m256i power = _mm256_max_epi32(_mm256_and_si256(bits_of(magnitude), splat(number::kInfinity)),
                                           splat(Code::kLeastPower));
    const __m256 sum =
        _mm256_fmadd_ps(_mm256_castsi256_ps(power), _mm256_castsi256_ps(splat(Code::kRounder)), magnitude);
    return _mm256_madd_epi16(bits_of(sum), splat(Code::template kPlaces<kFurther>));
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

  // kHasPayload: a NaN among them may be any NaN, not only the quiet one of its sign.
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
        codes[k] =
            fp8_codes<kTo>(_mm256_castsi256_ps(_mm256_min_epi32(magnitude[k], splat(Fp8Code<kTo>::kBeyond))));
      }
      const __m256i low = _mm256_srli_epi16(_mm256_packs_epi32(codes[0], codes[1]), Fp8Code<kTo>::kShift);
      const __m256i high = _mm256_srli_epi16(_mm256_packs_epi32(codes[2], codes[3]), Fp8Code<kTo>::kShift);
      // Saturation keeps the sign, and the top bit of a code is free.
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

  // -1 in `nan` selects the NaN's code, the largest of all.
  template <Dtype kTo>
  KVXFER_AVX2 __m256i with_nan(__m256i codes, __m256i nan) {
    return _mm256_max_epu8(codes, _mm256_and_si256(nan, _mm256_set1_epi8(float_format(kTo).nan)));
  }

  // ---- loops ----

  // A step converts kStep elements. Between any two dtypes:
  // The branches always go the same way; they replace four loops for each pair of dtypes.
  template <Dtype kFrom, Dtype kTo>
  struct AnyStep {
    Factors factors;
    bool saturate;

    KVXFER_AVX2_MEMBER void operator()(const std::byte* src, std::byte* dst, bool stream) const {
      Lanes x = load<kFrom>(src);
      const __m256 high = _mm256_set1_ps(factors.high);
      if (factors.has_times)
        for (__m256& lanes : x.at) lanes = _mm256_mul_ps(lanes, _mm256_set1_ps(factors.times));
      if (factors.has_over)
        for (__m256& lanes : x.at) lanes = _mm256_div_ps(lanes, _mm256_set1_ps(factors.over));
      if (factors.has_high)
        for (__m256& lanes : x.at) lanes = _mm256_mul_ps(lanes, high);
      if (factors.has_high_low && itemsize(kTo) == 1)
        for (__m256& lanes : x.at)
          lanes = _mm256_fmadd_ps(lanes, high, _mm256_mul_ps(lanes, _mm256_set1_ps(factors.low)));
      if (saturate && kTo != Dtype::kInt8)  // int8 clamps anyway; the operands' order keeps a NaN
        for (__m256& lanes : x.at)
          lanes = _mm256_max_ps(_mm256_set1_ps(-largest(kTo)),
                                _mm256_min_ps(_mm256_set1_ps(largest(kTo)), lanes));
      store<kTo, itemsize(kFrom) != 1>(dst, x, stream);  // no room for a payload in 8 bits
    }
  };

  // From bf16 to 8-bit floats, times a positive factor: what most caches need. Two elements share a 32-bit
  // lane as long as possible. One of them is a float32 once the other is masked off, the other after a
  // shift; a multiplication puts the codes side by side again.
  template <Dtype kTo>
  struct NarrowStep {
    __m256 factor;
    __m256i limit;  // a bf16 that becomes the largest wanted code, in 16 lanes
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
      return _mm256_srli_epi32(pairs, Fp8Code<kTo>::kShift);
    }
  };

  template <Dtype kTo>
  KVXFER_AVX2 NarrowStep<kTo> narrow_step(const NarrowFactor& by) {
    return {_mm256_set1_ps(by.factor), _mm256_set1_epi16(static_cast<short>(number::bits_of(by.limit) >> 16)),
            by.largest_code != float_format(kTo).nan};
  }

  template <Dtype kFrom, Dtype kTo, class Step>
  KVXFER_AVX2 void convert_steps(const std::byte* src, std::byte* dst, std::size_t count,
                                 const Traffic& traffic, const Step& step) {
    constexpr std::size_t from_nbytes = kStep * itemsize(kFrom), to_nbytes = kStep * itemsize(kTo);
    const bool stream = streams(traffic, dst, count * itemsize(kTo));
    LookAhead<from_nbytes> look_ahead(src, count / kStep, traffic);
    for (std::size_t left = count / kStep; left != 0; --left) {
      look_ahead.before_step(src, left);
      step(src, dst, stream);
      src += from_nbytes;
      dst += to_nbytes;
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
      if (const NarrowFactor by = narrow_factor(scaling, kTo); by.factor != 0)
        return convert_steps<kFrom, kTo>(src, dst, count, traffic, narrow_step<kTo>(by));
    }
    convert_steps<kFrom, kTo>(src, dst, count, traffic,
                              AnyStep<kFrom, kTo>{factors_of(scaling, kTo), scaling.saturate});
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
  // Asks the processor for F16C: clang 14's __builtin_cpu_supports does not know that name.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
  const bool runs = has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return runs ? &kAvx2 : nullptr;
}

}  // namespace kvxfer

#else

const kvxfer::ConvertKernel* kvxfer::avx2_convert_kernel() noexcept { return nullptr; }

#endif
