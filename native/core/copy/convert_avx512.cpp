// Conversions with AVX-512. Unlike those with AVX2, they take twice as many elements a step, use masks in
// place of vectors of 0 and -1, and handle a run's end by masked loads and stores.
#include "core/copy/convert_kernel.h"

#if defined(__x86_64__)
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "core/copy/avx512.h"
#include "core/copy/factors.h"
#include "core/copy/fp8_code.h"

namespace kvxfer {
namespace {

#define KVXFER_AVX512_MEMBER __attribute__((KVXFER_AVX512_TARGET, always_inline)) inline
#define KVXFER_AVX512 KVXFER_AVX512_MEMBER static

// Stands before a loop over Lanes: they stay in registers if it is unrolled, and GCC would unroll it too
// late.
#if defined(__clang__)
#define KVXFER_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KVXFER_UNROLL _Pragma("GCC unroll 4")
#endif

// 64 elements, in order: one vector of 8-bit elements, two of 16-bit ones.
struct Lanes { __m512 at[4]; };
constexpr std::size_t kStep = 64, kVectorNbytes = 64;

// Which elements of a step exist. All of them:
struct Whole {
  template <class Vector>
  KVXFER_AVX512_MEMBER Vector load(const std::byte* at) const {
    Vector bytes;
    std::memcpy(&bytes, at, sizeof bytes);
    return bytes;
  }
  KVXFER_AVX512_MEMBER void store(std::byte* at, __m512i bytes, bool stream) const {
    if (stream)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(at), bytes);
    else
      std::memcpy(at, &bytes, sizeof bytes);
  }
};

// Or those up to a run's end. Loads give zeros beyond it, stores leave alone what is there.
struct Part {
  const std::byte *src_end, *dst_end;

  // A vector without any element is not loaded: it may lie in no page, and a processor takes long to find
  // out that its masked fault does not count.
  template <class Vector>
  KVXFER_AVX512_MEMBER Vector load(const std::byte* at) const {
    __m512i bytes = _mm512_setzero_si512();
    if (at < src_end) bytes = _mm512_maskz_loadu_epi8(mask_to(src_end - at), at);
    Vector first;
    std::memcpy(&first, &bytes, sizeof first);
    return first;
  }
  KVXFER_AVX512_MEMBER void store(std::byte* at, __m512i bytes, bool) const {
    if (at < dst_end) _mm512_mask_storeu_epi8(at, mask_to(dst_end - at), bytes);
  }

 private:
  static __mmask64 mask_to(std::ptrdiff_t nbytes) {
    return ~std::uint64_t{0} >> (64 - std::min<std::ptrdiff_t>(nbytes, 64));
  }
};

// Where each element of a permuted vector comes from.
template <class Index, std::size_t kCount, class From>
constexpr std::array<Index, kCount> indices(From from) {
  std::array<Index, kCount> all{};
  for (std::size_t i = 0; i < kCount; ++i) all[i] = static_cast<Index>(from(i));
  return all;
}

struct Avx512Loops {
  KVXFER_AVX512 __m512i bits_of(__m512 x) { return _mm512_castps_si512(x); }
  KVXFER_AVX512 __m512 floats_of(__m512i bits) { return _mm512_castsi512_ps(bits); }
  KVXFER_AVX512 __m512i splat(std::uint32_t bits) { return _mm512_set1_epi32(static_cast<int>(bits)); }
  KVXFER_AVX512 __m512i splat16(std::uint32_t bits) { return _mm512_set1_epi16(static_cast<short>(bits)); }
  KVXFER_AVX512 __m512i splat8(std::uint32_t bits) { return _mm512_set1_epi8(static_cast<char>(bits)); }
  KVXFER_AVX512 __m512i magnitude_of(__m512 x) { return _mm512_and_si512(bits_of(x), splat(~number::kSign)); }
  template <class Array>
  KVXFER_AVX512 __m512i vector_of(const Array& array) {
    static_assert(sizeof array == kVectorNbytes);
    __m512i vector;
    std::memcpy(&vector, array.data(), sizeof vector);
    return vector;
  }

  // (a & b) | c, and a's bits where c has 0, b's where it has 1: as _mm512_ternarylogic_epi32() wants it.
  static constexpr int kAndOr = 0xea, kSelect = 0xd8;

  // ---- elements to lanes ----

  // 32 e5m2 in the high bytes are f16 already; a NaN becomes the quiet one.
  KVXFER_AVX512 __m512i e5m2_to_f16(__m512i high) {
    const __m512i magnitude = _mm512_and_si512(high, splat16(0x7fff));
    const __mmask32 nan = _mm512_cmpgt_epi16_mask(magnitude, splat16(0x7c00));
    const __m512i quiet = _mm512_ternarylogic_epi32(high, splat16(0x8000), splat16(0x7e00), kAndOr);
    return _mm512_mask_mov_epi16(high, nan, quiet);
  }

  // 32 e4m3, as 16-bit integers, to f16 that are 2^8 too small, for the exponent's bias is 7 and not
  // 15. In f16, and not in float32, because its subnormals cost nothing and know no DAZ.
  KVXFER_AVX512 __m512i e4m3_to_small_f16(__m512i codes) {
    // The shift leaves two signs; the second is cleared to be the exponent's leading bit.
    const __m512i number = _mm512_and_si512(_mm512_slli_epi16(codes, 7), splat16(0xbf80));
    const __m512i all_ones = splat16(0x3f80);  // the code that means NaN
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(_mm512_and_si512(number, all_ones), all_ones);
    return _mm512_mask_add_epi16(number, nan, number, splat16(0x7e00 - 0x3f80));
  }

  template <Dtype kFrom, class There>
  KVXFER_AVX512 Lanes load(const std::byte* src, const There& there) {
    Lanes x;
    if constexpr (kFrom == Dtype::kF32) {
      KVXFER_UNROLL
      for (std::size_t k = 0; k < 4; ++k) x.at[k] = floats_of(there.template load<__m512i>(src + 64 * k));
    } else if constexpr (kFrom == Dtype::kBf16) {
      KVXFER_UNROLL
      for (std::size_t k = 0; k < 4; ++k)
        x.at[k] = floats_of(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(there.template load<__m256i>(src + 32 * k)), 16));
    } else if constexpr (kFrom == Dtype::kF16) {
      KVXFER_UNROLL
      for (std::size_t k = 0; k < 4; ++k)
        x.at[k] = _mm512_cvtph_ps(there.template load<__m256i>(src + 32 * k));
    } else if constexpr (kFrom == Dtype::kInt8) {
      KVXFER_UNROLL
      for (std::size_t k = 0; k < 4; ++k)
        x.at[k] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(there.template load<__m128i>(src + 16 * k)));
    } else {
      KVXFER_UNROLL
      for (std::size_t k = 0; k < 2; ++k) {
        const __m512i codes = _mm512_cvtepi8_epi16(there.template load<__m256i>(src + 32 * k));
        const __m512i f16 =
            kFrom == Dtype::kE5m2 ? e5m2_to_f16(_mm512_slli_epi16(codes, 8)) : e4m3_to_small_f16(codes);
        x.at[2 * k] = _mm512_cvtph_ps(_mm512_castsi512_si256(f16));
        x.at[2 * k + 1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(f16, 1));
      }
      if constexpr (kFrom == Dtype::kE4m3) {
        KVXFER_UNROLL
        for (__m512& lanes : x.at) lanes = _mm512_mul_ps(lanes, _mm512_set1_ps(256));
      }
    }
    return x;
  }

  // ---- lanes to elements ----

  // Four vectors of 32-bit integers to one of bytes, with signed saturation. Packing works on each
  // quarter of a vector by itself: in_order() puts the bytes right. (vpmovsdb keeps their order, but
  // takes two shuffles a vector, and more to join them.)
  KVXFER_AVX512 __m512i pack_bytes(__m512i a, __m512i b, __m512i c, __m512i d) {
    return _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
  }
  KVXFER_AVX512 __m512i in_order(__m512i bytes) {
    alignas(64) static constexpr auto kFrom =
        indices<std::int32_t, 16>([](std::size_t i) { return i % 4 * 4 + i / 4; });
    return _mm512_permutexvar_epi32(vector_of(kFrom), bytes);
  }
  // The same of what two vectors were packed to.
  KVXFER_AVX512 __m512i pair_in_order(__m512i bytes) {
    alignas(64) static constexpr auto kFrom =
        indices<std::int64_t, 8>([](std::size_t i) { return i % 4 * 2 + i / 4; });
    return _mm512_permutexvar_epi64(vector_of(kFrom), bytes);
  }
  // The upper halves of 32 lanes.
  KVXFER_AVX512 __m512i upper_halves(__m512i a, __m512i b) {
    alignas(64) static constexpr auto kFrom =
        indices<std::int16_t, 32>([](std::size_t i) { return 2 * i + 1; });
    return _mm512_permutex2var_epi16(a, vector_of(kFrom), b);
  }

  // A NaN becomes the quiet one of its sign; there is something to do if it may be another.
  template <bool kHasPayload>
  KVXFER_AVX512 __m512 without_payload(__m512 x) {
    if constexpr (!kHasPayload) return x;
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return floats_of(_mm512_mask_ternarylogic_epi32(bits_of(x), nan, splat(number::kSign),
                                                    splat(number::kInfinity | number::kQuiet), kAndOr));
  }

  // In the upper halves of lanes. Rounding up could carry a NaN's payload into its sign.
  template <bool kHasPayload>
  KVXFER_AVX512 __m512i bf16_code(__m512 x) {
    const __m512i bits = bits_of(without_payload<kHasPayload>(x));
    const __mmask16 odd = _mm512_test_epi32_mask(bits, splat(0x10000));
    const __m512i below_half = _mm512_add_epi32(bits, splat(0x7fff));
    return _mm512_mask_add_epi32(below_half, odd, bits, splat(0x8000));
  }

  template <bool kHasPayload>
  KVXFER_AVX512 __m256i f16_code(__m512 x) {
    return _mm512_cvtps_ph(without_payload<kHasPayload>(x), _MM_FROUND_TO_NEAREST_INT);
  }

  // The codes, shifted, of magnitudes up to kBeyond. See fp8_code.h.
  template <Dtype kTo, int kFurther = 0>
  KVXFER_AVX512 __m512i fp8_codes(__m512 magnitude) {
    using Code = Fp8Code<kTo>;
    const __m512i power = _mm512_max_epi32(_mm512_and_si512(bits_of(magnitude), splat(number::kInfinity)),
                                           splat(Code::kLeastPower));
    const __m512 sum = _mm512_fmadd_ps(floats_of(power), floats_of(splat(Code::kRounder)), magnitude);
    return _mm512_madd_epi16(bits_of(sum), splat(Code::template kPlaces<kFurther>));
  }

  // A code with the sign of another byte. Saturation keeps the sign, and the top bit of a code is free.
  KVXFER_AVX512 __m512i with_sign(__m512i codes, __m512i signs) {
    return _mm512_ternarylogic_epi32(codes, signs, splat8(0x80), kSelect);
  }

  // Rounded to an integer; NaN is 0. Below -128 packing saturates: what the conversion gives
  // there is negative even where it overflows.
  KVXFER_AVX512 __m512i int8_code(__m512 x) {
    const __mmask16 ordered = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
    return _mm512_cvtps_epi32(_mm512_maskz_min_ps(ordered, x, _mm512_set1_ps(127)));
  }

  // kHasPayload: a NaN among them may be any NaN, not only the quiet one of its sign.
  template <Dtype kTo, bool kHasPayload, class There>
  KVXFER_AVX512 void store(std::byte* dst, const Lanes& x, const There& there, bool stream) {
    if constexpr (kTo == Dtype::kF32) {
      KVXFER_UNROLL
      for (std::size_t k = 0; k < 4; ++k) there.store(dst + 64 * k, bits_of(x.at[k]), stream);
    } else if constexpr (kTo == Dtype::kBf16) {
      KVXFER_UNROLL
      for (std::size_t k = 0; k < 2; ++k)
        there.store(
            dst + 64 * k,
            upper_halves(bf16_code<kHasPayload>(x.at[2 * k]), bf16_code<kHasPayload>(x.at[2 * k + 1])),
            stream);
    } else if constexpr (kTo == Dtype::kF16) {
      KVXFER_UNROLL
      for (std::size_t k = 0; k < 2; ++k) {
        const __m256i low = f16_code<kHasPayload>(x.at[2 * k]), high = f16_code<kHasPayload>(x.at[2 * k + 1]);
        there.store(dst + 64 * k, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), stream);
      }
    } else if constexpr (kTo == Dtype::kInt8) {
      const __m512i codes =
          pack_bytes(int8_code(x.at[0]), int8_code(x.at[1]), int8_code(x.at[2]), int8_code(x.at[3]));
      there.store(dst, in_order(codes), stream);
    } else {
      using Code = Fp8Code<kTo>;
      __m512i codes[4];
      KVXFER_UNROLL
      for (std::size_t k = 0; k < 4; ++k)
        codes[k] = fp8_codes<kTo>(floats_of(_mm512_min_epi32(magnitude_of(x.at[k]), splat(Code::kBeyond))));
      const __m512i low = _mm512_srli_epi16(_mm512_packs_epi32(codes[0], codes[1]), Code::kShift);
      const __m512i high = _mm512_srli_epi16(_mm512_packs_epi32(codes[2], codes[3]), Code::kShift);
      const __m512i signs =
          pack_bytes(bits_of(x.at[0]), bits_of(x.at[1]), bits_of(x.at[2]), bits_of(x.at[3]));
      __m512i bytes = in_order(with_sign(_mm512_packs_epi16(low, high), signs));
      if constexpr (constexpr FloatFormat format = float_format(kTo); format.nan != format.overflow) {
        // A NaN was taken for overflow.
        const __mmask64 nan = _mm512_kunpackd(_mm512_kunpackw(nans_of(x.at[3]), nans_of(x.at[2])),
                                              _mm512_kunpackw(nans_of(x.at[1]), nans_of(x.at[0])));
        bytes = _mm512_mask_add_epi8(bytes, nan, bytes, splat8(format.nan - format.overflow));
      }
      there.store(dst, bytes, stream);
    }
  }

  KVXFER_AVX512 __mmask16 nans_of(__m512 x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }

  // ---- loops ----

  // A step converts kStep elements. Between any two dtypes, the branches always taken alike:
  template <Dtype kFrom, Dtype kTo>
  struct AnyStep {
    Factors factors;
    bool saturate;

    template <class There>
    KVXFER_AVX512_MEMBER void operator()(const std::byte* src, std::byte* dst, const There& there,
                                         bool stream) const {
      Lanes x = load<kFrom>(src, there);
      const __m512 high = _mm512_set1_ps(factors.high);
      if (factors.has_times) {
        KVXFER_UNROLL
        for (__m512& lanes : x.at) lanes = _mm512_mul_ps(lanes, _mm512_set1_ps(factors.times));
      }
      if (factors.has_over) {
        KVXFER_UNROLL
        for (__m512& lanes : x.at) lanes = _mm512_div_ps(lanes, _mm512_set1_ps(factors.over));
      }
      if (factors.has_high) {
        KVXFER_UNROLL
        for (__m512& lanes : x.at) lanes = _mm512_mul_ps(lanes, high);
      }
      if (factors.has_high_low && itemsize(kTo) == 1) {
        KVXFER_UNROLL
        for (__m512& lanes : x.at)
          lanes = _mm512_fmadd_ps(lanes, high, _mm512_mul_ps(lanes, _mm512_set1_ps(factors.low)));
      }
      if (saturate && kTo != Dtype::kInt8) {  // int8 clamps anyway; the operands' order keeps a NaN
        KVXFER_UNROLL
        for (__m512& lanes : x.at)
          lanes = _mm512_max_ps(_mm512_set1_ps(-largest(kTo)),
                                _mm512_min_ps(_mm512_set1_ps(largest(kTo)), lanes));
      }
      store<kTo, itemsize(kFrom) != 1>(dst, x, there, stream);  // no room for a payload in 8 bits
    }
  };

  // From bf16 to 8-bit floats, times a positive factor: what most caches need. Two elements share a 32-bit
  // lane as long as possible. One of them is a float32 once the other is masked off, the other after a
  // shift; a multiplication puts the codes side by side again.
  template <Dtype kTo>
  struct NarrowStep {
    __m512 factor;
    __m512i limit;         // a bf16 that becomes the largest wanted code, in 32 lanes
    __m512i nan_distance;  // of the NaN's code from that one, in 64 bytes
    bool keeps_nan;        // it is not 0

    template <class There>
    KVXFER_AVX512_MEMBER void operator()(const std::byte* src, std::byte* dst, const There& there,
                                         bool stream) const {
      const auto low = there.template load<__m512i>(src), high = there.template load<__m512i>(src + 64);
      const __m512i without_sign = splat16(0x7fff);
      const __m512i low_magnitude = _mm512_and_si512(low, without_sign);
      const __m512i high_magnitude = _mm512_and_si512(high, without_sign);
      const __m512i codes = _mm512_packus_epi32(pairs_of(low_magnitude), pairs_of(high_magnitude));
      __m512i bytes = pair_in_order(with_sign(codes, _mm512_packs_epi16(low, high)));
      if (keeps_nan) {
        const __m512i infinity = splat16(0x7f80);
        const __mmask64 nan = _mm512_kunpackd(_mm512_cmpgt_epi16_mask(high_magnitude, infinity),
                                              _mm512_cmpgt_epi16_mask(low_magnitude, infinity));
        bytes = _mm512_mask_add_epi8(bytes, nan, bytes, nan_distance);
      }
      there.store(dst, bytes, stream);
    }

   private:
    // The codes of 32 elements, two bytes in each lane.
    KVXFER_AVX512_MEMBER __m512i pairs_of(__m512i magnitude) const {
      const __m512i clamped = _mm512_min_epi16(magnitude, limit);
      const __m512 even = floats_of(_mm512_slli_epi32(clamped, 16));
      const __m512 odd = floats_of(_mm512_and_si512(clamped, splat(0xffff0000)));
      const __m512i even_codes = fp8_codes<kTo>(_mm512_mul_ps(even, factor));
      const __m512i odd_codes = fp8_codes<kTo, 8>(_mm512_mul_ps(odd, factor));
      return _mm512_srli_epi32(_mm512_add_epi32(even_codes, odd_codes), Fp8Code<kTo>::kShift);
    }
  };

  template <Dtype kTo>
  KVXFER_AVX512 NarrowStep<kTo> narrow_step(const NarrowFactor& by) {
    const std::uint32_t nan_distance = float_format(kTo).nan - by.largest_code;
    return {_mm512_set1_ps(by.factor), splat16(number::bits_of(by.limit) >> 16), splat8(nan_distance),
            nan_distance != 0};
  }

  template <Dtype kFrom, Dtype kTo, class Step>
  KVXFER_AVX512 void convert_steps(const std::byte* src, std::byte* dst, std::size_t count,
                                   const Traffic& traffic, const Step& step) {
    constexpr std::size_t from_nbytes = kStep * itemsize(kFrom), to_nbytes = kStep * itemsize(kTo);
    const bool stream = streams(traffic, dst, count * itemsize(kTo));
    const Part last{src + count * itemsize(kFrom), dst + count * itemsize(kTo)};
    LookAhead<from_nbytes> look_ahead(src, count / kStep, traffic);
    for (std::size_t left = count / kStep; left != 0; --left) {
      look_ahead.before_step(src, left);
      step(src, dst, Whole{}, stream);
      src += from_nbytes;
      dst += to_nbytes;
    }
    if (count % kStep != 0) step(src, dst, last, false);
  }

  template <Dtype kFrom, Dtype kTo>
  __attribute__((KVXFER_AVX512_TARGET)) static void convert(const std::byte* src, std::byte* dst,
                                                            std::size_t count, const Scaling& scaling,
                                                            const Traffic& traffic) noexcept {
    if constexpr (kFrom == Dtype::kBf16 && (kTo == Dtype::kE4m3 || kTo == Dtype::kE5m2)) {
      if (const NarrowFactor by = narrow_factor(scaling, kTo); by.factor != 0)
        return convert_steps<kFrom, kTo>(src, dst, count, traffic, narrow_step<kTo>(by));
    }
    convert_steps<kFrom, kTo>(src, dst, count, traffic,
                              AnyStep<kFrom, kTo>{factors_of(scaling, kTo), scaling.saturate});
  }

  template <Dtype kFrom, class There>
  KVXFER_AVX512 __m512i amax_step(const std::byte* src, const There& there, __m512 scale,
                                  __m512i largest_yet) {
    const Lanes x = load<kFrom>(src, there);
    KVXFER_UNROLL
    for (const __m512& lanes : x.at) {
      const __m512i magnitude = magnitude_of(_mm512_mul_ps(lanes, scale));
      const __mmask16 finite = _mm512_cmpgt_epi32_mask(splat(number::kInfinity), magnitude);
      // Magnitudes order as integers do.
      largest_yet = _mm512_mask_max_epi32(largest_yet, finite, largest_yet, magnitude);
    }
    return largest_yet;
  }

  template <Dtype kFrom>
  __attribute__((KVXFER_AVX512_TARGET)) static float amax(const std::byte* src, std::size_t count,
                                                          float scale) noexcept {
    const __m512 scales = _mm512_set1_ps(scale);
    const Part last{src + count * itemsize(kFrom), nullptr};
    __m512i largest_yet = _mm512_setzero_si512();
    for (; count >= kStep; count -= kStep) {
      largest_yet = amax_step<kFrom>(src, Whole{}, scales, largest_yet);
      src += kStep * itemsize(kFrom);
    }
    if (count != 0) largest_yet = amax_step<kFrom>(src, last, scales, largest_yet);  // zeros beside the rest
    std::uint32_t lanes[16];
    std::memcpy(lanes, &largest_yet, sizeof lanes);
    return number::float_of(*std::max_element(std::begin(lanes), std::end(lanes)));
  }
};

constexpr ConvertKernel kAvx512 = make_kernel<Avx512Loops>("avx512");

}  // namespace

const ConvertKernel* avx512_convert_kernel() noexcept { return has_avx512() ? &kAvx512 : nullptr; }

}  // namespace kvxfer

#else

const kvxfer::ConvertKernel* kvxfer::avx512_convert_kernel() noexcept { return nullptr; }

#endif
