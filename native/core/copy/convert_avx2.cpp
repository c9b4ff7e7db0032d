// Conversions with AVX2, F16C and FMA.
#include "core/copy/convert_kernel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define KVXFER_TARGET target("avx2,f16c,fma")
#include "core/copy/convert_vectors.h"

namespace kvxfer {
namespace {

struct Avx2 {
  using Floats = __m256;
  using Ints = __m256i;

  KVXFER_VECTOR __m256 floats(float x) { return _mm256_set1_ps(x); }
  KVXFER_VECTOR __m256i splat(std::uint32_t bits) { return _mm256_set1_epi32(static_cast<int>(bits)); }
  KVXFER_VECTOR __m256i splat16(std::uint32_t bits) { return _mm256_set1_epi16(static_cast<short>(bits)); }
  KVXFER_VECTOR __m256i splat8(std::uint32_t bits) { return _mm256_set1_epi8(static_cast<char>(bits)); }
  KVXFER_VECTOR __m256i bits_of(__m256 x) { return _mm256_castps_si256(x); }
  KVXFER_VECTOR __m256 floats_of(__m256i bits) { return _mm256_castsi256_ps(bits); }
  KVXFER_VECTOR __m256i bit_and(__m256i a, __m256i b) { return _mm256_and_si256(a, b); }
  KVXFER_VECTOR __m256i add32(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
  KVXFER_VECTOR __m256i min16(__m256i a, __m256i b) { return _mm256_min_epi16(a, b); }
  KVXFER_VECTOR __m256i min32(__m256i a, __m256i b) { return _mm256_min_epi32(a, b); }
  KVXFER_VECTOR __m256i max32(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
  KVXFER_VECTOR __m256i madd16(__m256i a, __m256i b) { return _mm256_madd_epi16(a, b); }
  KVXFER_VECTOR __m256i packs16(__m256i a, __m256i b) { return _mm256_packs_epi16(a, b); }
  KVXFER_VECTOR __m256i packs32(__m256i a, __m256i b) { return _mm256_packs_epi32(a, b); }
  KVXFER_VECTOR __m256i packus32(__m256i a, __m256i b) { return _mm256_packus_epi32(a, b); }
  template <int kBits>
  KVXFER_VECTOR __m256i sll32(__m256i a) {
    return _mm256_slli_epi32(a, kBits);
  }
  template <int kBits>
  KVXFER_VECTOR __m256i srl32(__m256i a) {
    return _mm256_srli_epi32(a, kBits);
  }
  template <int kBits>
  KVXFER_VECTOR __m256i srl16(__m256i a) {
    return _mm256_srli_epi16(a, kBits);
  }
  KVXFER_VECTOR __m256 mul(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  KVXFER_VECTOR __m256 div(__m256 a, __m256 b) { return _mm256_div_ps(a, b); }
  KVXFER_VECTOR __m256 min(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
  KVXFER_VECTOR __m256 max(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
  KVXFER_VECTOR __m256 fmadd(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
  KVXFER_VECTOR __m256i max_finite(__m256i largest, __m256i magnitude) {
    const __m256i finite = _mm256_cmpgt_epi32(splat(number::kInfinity), magnitude);
    return _mm256_max_epi32(largest, _mm256_and_si256(magnitude, finite));
  }
  KVXFER_VECTOR void stream(std::byte* to, __m256i bytes) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bytes);
  }

  // In memory of a whole step, with zeros beside them.
  template <std::size_t kFromNbytes, std::size_t kToNbytes>
  struct Last {
    Last(const std::byte* its_src, std::size_t src_nbytes, std::byte* its_dst, std::size_t its_nbytes)
        : dst_of_run(its_dst), nbytes(its_nbytes) {
      std::memcpy(src, its_src, src_nbytes);
    }
    void end() const { std::memcpy(dst_of_run, dst, nbytes); }
    std::byte src[kFromNbytes] = {}, dst[kToNbytes];
    std::byte* const dst_of_run;
    const std::size_t nbytes;
    const Whole<Avx2> there{};
  };

  // ---- elements to lanes ----

  KVXFER_VECTOR __m128i half_at(const std::byte* at) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  }
  // 16 bytes, the same in both halves of a vector: a load alone, where widening costs a shuffle
  // across the halves.
  KVXFER_VECTOR __m256i twice_at(const std::byte* at) { return _mm256_broadcastsi128_si256(half_at(at)); }

  template <Dtype kFrom, class There>
  KVXFER_VECTOR __m256 widen(const std::byte* at, const There& there) {
    if constexpr (kFrom == Dtype::kF32)
      return floats_of(there.template load<__m256i>(at));
    else if constexpr (kFrom == Dtype::kBf16)  // in the upper halves of lanes; -1: a zero byte
      return floats_of(_mm256_shuffle_epi8(
          twice_at(at), _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                         -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15)));
    else if constexpr (kFrom == Dtype::kF16)
      return _mm256_cvtph_ps(half_at(at));
    else
      return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
  }

  // 16 8-bit floats to f16; of e4m3 2^8 too small, for the exponent's bias is 7 and not 15. In f16, and not in
  // float32, because its subnormals cost nothing and know no DAZ.
  template <Dtype kFrom, class There>
  KVXFER_VECTOR __m256i f16_of(const std::byte* at, const There&) {
    const __m256i high = _mm256_shuffle_epi8(
        twice_at(at), _mm256_setr_epi8(-1, 0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7,  //
                                       -1, 8, -1, 9, -1, 10, -1, 11, -1, 12, -1, 13, -1, 14, -1, 15));
    if constexpr (kFrom == Dtype::kE5m2) {  // f16 already; a NaN becomes the quiet one
      const __m256i nan = _mm256_cmpgt_epi16(_mm256_and_si256(high, splat16(0x7fff)), splat16(0x7c00));
      const __m256i quiet = _mm256_or_si256(high, _mm256_and_si256(nan, splat16(0x0200)));
      return _mm256_andnot_si256(_mm256_and_si256(nan, splat16(0x0100)), quiet);
    } else {
      // The shift doubles the sign; its copy is cleared to be the exponent's leading bit.
      const __m256i number = _mm256_and_si256(_mm256_srai_epi16(high, 1), splat16(0xbf80));
      const __m256i all_ones = splat16(0x7f00);
      const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(high, all_ones), all_ones);
      // 0x3f80, the code that means NaN, to the NaN of f16.
      return _mm256_xor_si256(number, _mm256_and_si256(nan, splat16(0x3f80 ^ 0x7e00)));
    }
  }
  KVXFER_VECTOR __m256 low_half(__m256i f16) { return _mm256_cvtph_ps(_mm256_castsi256_si128(f16)); }
  KVXFER_VECTOR __m256 high_half(__m256i f16) { return _mm256_cvtph_ps(_mm256_extracti128_si256(f16, 1)); }

  // ---- lanes to elements ----

  // Packing works on each half of a vector by itself.
  KVXFER_VECTOR __m256i in_order(__m256i bytes) {
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  KVXFER_VECTOR __m256i pair_in_order(__m256i pair) {  // of what two vectors were packed to
    return _mm256_permute4x64_epi64(pair, 0b11'01'10'00);
  }
  KVXFER_VECTOR __m256i with_sign(__m256i codes, __m256i signs) {
    return _mm256_or_si256(codes, _mm256_and_si256(signs, splat8(0x80)));
  }

  template <bool kHasPayload>
  KVXFER_VECTOR __m256i bf16_code(__m256 x) {
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
  template <bool kHasPayload>
  KVXFER_VECTOR __m256i bf16_codes(__m256 low, __m256 high) {
    return pair_in_order(_mm256_packus_epi32(bf16_code<kHasPayload>(low), bf16_code<kHasPayload>(high)));
  }

  template <bool kHasPayload>
  KVXFER_VECTOR __m256i f16_codes(__m256 low, __m256 high) {
    const __m256i codes = _mm256_set_m128i(_mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT),
                                           _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
    if constexpr (!kHasPayload) return codes;
    // NaNs are the hardware's, quiet and with payload: takes the payload away.
    const __m256i nan = _mm256_cmpgt_epi16(_mm256_and_si256(codes, splat16(0x7fff)), splat16(0x7c00));
    return _mm256_andnot_si256(_mm256_and_si256(nan, splat16(0x01ff)), codes);
  }

  // Rounded to an integer; NaN is 0. Below -128 packing saturates: what the conversion gives
  // there is negative even where it overflows.
  KVXFER_VECTOR __m256i int8_code(__m256 x) {
    const __m256 ordered = _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q));
    return _mm256_cvtps_epi32(_mm256_min_ps(ordered, _mm256_set1_ps(127)));
  }

  // Codes and signs are packed alike.
  template <Dtype kTo>
  KVXFER_VECTOR __m256i fp8_bytes(__m256i codes, __m256i signs, const __m256 (&x)[4]) {
    if constexpr (float_format(kTo).nan != float_format(kTo).overflow) {  // a NaN was taken for overflow
      const auto nan = _mm256_packs_epi16(_mm256_packs_epi32(is_nan(x[0]), is_nan(x[1])),
                                          _mm256_packs_epi32(is_nan(x[2]), is_nan(x[3])));
      // The NaN's code is the largest of all.
      codes = _mm256_max_epu8(codes, _mm256_and_si256(nan, splat8(float_format(kTo).nan)));
    }
    return in_order(with_sign(codes, signs));
  }
  KVXFER_VECTOR __m256i is_nan(__m256 x) {
    return _mm256_cmpgt_epi32(_mm256_and_si256(bits_of(x), splat(~number::kSign)), splat(number::kInfinity));
  }

  KVXFER_VECTOR __m256i narrow_bytes(__m256i codes, __m256i signs, const __m256i (&magnitude)[2],
                                     bool keeps_nan, __m256i nan_distance) {
    if (keeps_nan) {
      const __m256i infinity = splat16(0x7f80);
      const __m256i nan = _mm256_packs_epi16(_mm256_cmpgt_epi16(magnitude[0], infinity),
                                             _mm256_cmpgt_epi16(magnitude[1], infinity));
      codes = _mm256_add_epi8(codes, _mm256_and_si256(nan, nan_distance));
    }
    return pair_in_order(with_sign(codes, signs));
  }
};

constexpr ConvertKernel kAvx2 = make_kernel<VectorLoops<Avx2>>("avx2");

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
