// Conversions with AVX-512. Unlike those with AVX2, they use masks in place of vectors of 0 and -1, and handle
// a run's end by masked loads and stores.
#include "core/copy/convert_kernel.h"

#if defined(__x86_64__)
#include <array>

#include "core/copy/avx512.h"

#define KVXFER_TARGET KVXFER_AVX512_TARGET
#include "core/copy/convert_vectors.h"

namespace kvxfer {
namespace {

// Those elements of a step that lie before a run's end. Loads give zeros beyond it, stores leave alone what is
// there.
struct Part {
  const std::byte *src_end, *dst_end;

  // A vector without any element is not loaded: it may lie in no page, and a processor takes long to find
  // out that its masked fault does not count.
  template <class Vector>
  KVXFER_VECTOR_MEMBER Vector load(const std::byte* at) const {
    __m512i bytes = _mm512_setzero_si512();
    if (at < src_end) bytes = _mm512_maskz_loadu_epi8(mask_to(src_end - at), at);
    Vector first;
    std::memcpy(&first, &bytes, sizeof first);
    return first;
  }
  KVXFER_VECTOR_MEMBER void store(std::byte* at, __m512i bytes, bool) const {
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

struct Avx512 {
  using Floats = __m512;
  using Ints = __m512i;

  KVXFER_VECTOR __m512 floats(float x) { return _mm512_set1_ps(x); }
  KVXFER_VECTOR __m512i splat(std::uint32_t bits) { return _mm512_set1_epi32(static_cast<int>(bits)); }
  KVXFER_VECTOR __m512i splat16(std::uint32_t bits) { return _mm512_set1_epi16(static_cast<short>(bits)); }
  KVXFER_VECTOR __m512i splat8(std::uint32_t bits) { return _mm512_set1_epi8(static_cast<char>(bits)); }
  KVXFER_VECTOR __m512i bits_of(__m512 x) { return _mm512_castps_si512(x); }
  KVXFER_VECTOR __m512 floats_of(__m512i bits) { return _mm512_castsi512_ps(bits); }
  KVXFER_VECTOR __m512i bit_and(__m512i a, __m512i b) { return _mm512_and_si512(a, b); }
  KVXFER_VECTOR __m512i add32(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
  KVXFER_VECTOR __m512i min16(__m512i a, __m512i b) { return _mm512_min_epi16(a, b); }
  KVXFER_VECTOR __m512i min32(__m512i a, __m512i b) { return _mm512_min_epi32(a, b); }
  KVXFER_VECTOR __m512i max32(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
  KVXFER_VECTOR __m512i madd16(__m512i a, __m512i b) { return _mm512_madd_epi16(a, b); }
  KVXFER_VECTOR __m512i packs16(__m512i a, __m512i b) { return _mm512_packs_epi16(a, b); }
  KVXFER_VECTOR __m512i packs32(__m512i a, __m512i b) { return _mm512_packs_epi32(a, b); }
  KVXFER_VECTOR __m512i packus32(__m512i a, __m512i b) { return _mm512_packus_epi32(a, b); }
  template <int kBits>
  KVXFER_VECTOR __m512i sll32(__m512i a) {
    return _mm512_slli_epi32(a, kBits);
  }
  template <int kBits>
  KVXFER_VECTOR __m512i srl32(__m512i a) {
    return _mm512_srli_epi32(a, kBits);
  }
  template <int kBits>
  KVXFER_VECTOR __m512i srl16(__m512i a) {
    return _mm512_srli_epi16(a, kBits);
  }
  KVXFER_VECTOR __m512 mul(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  KVXFER_VECTOR __m512 div(__m512 a, __m512 b) { return _mm512_div_ps(a, b); }
  KVXFER_VECTOR __m512 min(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
  KVXFER_VECTOR __m512 max(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
  KVXFER_VECTOR __m512 fmadd(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  KVXFER_VECTOR __m512i max_finite(__m512i largest, __m512i magnitude) {
    const __mmask16 finite = _mm512_cmpgt_epi32_mask(splat(number::kInfinity), magnitude);
    return _mm512_mask_max_epi32(largest, finite, largest, magnitude);
  }
  KVXFER_VECTOR void stream(std::byte* to, __m512i bytes) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bytes);
  }
  template <class Array>
  KVXFER_VECTOR __m512i vector_of(const Array& array) {
    static_assert(sizeof array == sizeof(__m512i));
    __m512i vector;
    std::memcpy(&vector, array.data(), sizeof vector);
    return vector;
  }

  // Where they are.
  template <std::size_t, std::size_t>
  struct Last {
    Last(const std::byte* its_src, std::size_t src_nbytes, std::byte* its_dst, std::size_t dst_nbytes)
        : src(its_src), dst(its_dst), there{its_src + src_nbytes, its_dst + dst_nbytes} {}
    void end() const {}
    const std::byte* const src;
    std::byte* const dst;
    const Part there;
  };

  // (a & b) | c, and a's bits where c has 0, b's where it has 1: as _mm512_ternarylogic_epi32() wants it.
  static constexpr int kAndOr = 0xea, kSelect = 0xd8;

  // ---- elements to lanes ----

  template <Dtype kFrom, class There>
  KVXFER_VECTOR __m512 widen(const std::byte* at, const There& there) {
    if constexpr (kFrom == Dtype::kF32)
      return floats_of(there.template load<__m512i>(at));
    else if constexpr (kFrom == Dtype::kBf16)
      return floats_of(sll32<16>(_mm512_cvtepu16_epi32(there.template load<__m256i>(at))));
    else if constexpr (kFrom == Dtype::kF16)
      return _mm512_cvtph_ps(there.template load<__m256i>(at));
    else
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(there.template load<__m128i>(at)));
  }

  // 32 8-bit floats to f16; of e4m3 2^8 too small, for the exponent's bias is 7 and not 15. In f16, and not in
  // float32, because its subnormals cost nothing and know no DAZ.
  template <Dtype kFrom, class There>
  KVXFER_VECTOR __m512i f16_of(const std::byte* at, const There& there) {
    const __m512i codes = _mm512_cvtepi8_epi16(there.template load<__m256i>(at));
    if constexpr (kFrom == Dtype::kE5m2) {  // in the high bytes f16 already; a NaN becomes the quiet one
      const __m512i high = _mm512_slli_epi16(codes, 8);
      const __mmask32 nan = _mm512_cmpgt_epi16_mask(_mm512_and_si512(high, splat16(0x7fff)), splat16(0x7c00));
      const __m512i quiet = _mm512_ternarylogic_epi32(high, splat16(0x8000), splat16(0x7e00), kAndOr);
      return _mm512_mask_mov_epi16(high, nan, quiet);
    } else {
      // The shift leaves two signs; the second is cleared to be the exponent's leading bit.
      const __m512i number = _mm512_and_si512(_mm512_slli_epi16(codes, 7), splat16(0xbf80));
      const __m512i all_ones = splat16(0x3f80);  // the code that means NaN
      const __mmask32 nan = _mm512_cmpeq_epi16_mask(_mm512_and_si512(number, all_ones), all_ones);
      return _mm512_mask_add_epi16(number, nan, number, splat16(0x7e00 - 0x3f80));
    }
  }
  KVXFER_VECTOR __m512 low_half(__m512i f16) { return _mm512_cvtph_ps(_mm512_castsi512_si256(f16)); }
  KVXFER_VECTOR __m512 high_half(__m512i f16) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(f16, 1)); }

  // ---- lanes to elements ----

  // Packing works on each quarter of a vector by itself. (vpmovsdb keeps their order, but takes two shuffles a
  // vector, and more to join them.)
  KVXFER_VECTOR __m512i in_order(__m512i bytes) {
    alignas(64) static constexpr auto kFrom =
        indices<std::int32_t, 16>([](std::size_t i) { return i % 4 * 4 + i / 4; });
    return _mm512_permutexvar_epi32(vector_of(kFrom), bytes);
  }
  KVXFER_VECTOR __m512i pair_in_order(__m512i bytes) {  // of what two vectors were packed to
    alignas(64) static constexpr auto kFrom =
        indices<std::int64_t, 8>([](std::size_t i) { return i % 4 * 2 + i / 4; });
    return _mm512_permutexvar_epi64(vector_of(kFrom), bytes);
  }
  // A code with the sign of another byte.
  KVXFER_VECTOR __m512i with_sign(__m512i codes, __m512i signs) {
    return _mm512_ternarylogic_epi32(codes, signs, splat8(0x80), kSelect);
  }
  KVXFER_VECTOR __mmask16 nans_of(__m512 x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }

  // A NaN becomes the quiet one of its sign; there is something to do if it may be another.
  template <bool kHasPayload>
  KVXFER_VECTOR __m512 without_payload(__m512 x) {
    if constexpr (!kHasPayload) return x;
    return floats_of(_mm512_mask_ternarylogic_epi32(bits_of(x), nans_of(x), splat(number::kSign),
                                                    splat(number::kInfinity | number::kQuiet), kAndOr));
  }

  // In the upper halves of lanes. Rounding up could carry a NaN's payload into its sign.
  template <bool kHasPayload>
  KVXFER_VECTOR __m512i bf16_code(__m512 x) {
    const __m512i bits = bits_of(without_payload<kHasPayload>(x));
    const __mmask16 odd = _mm512_test_epi32_mask(bits, splat(0x10000));
    const __m512i below_half = _mm512_add_epi32(bits, splat(0x7fff));
    return _mm512_mask_add_epi32(below_half, odd, bits, splat(0x8000));
  }
  template <bool kHasPayload>
  KVXFER_VECTOR __m512i bf16_codes(__m512 low, __m512 high) {
    alignas(64) static constexpr auto kFrom =
        indices<std::int16_t, 32>([](std::size_t i) { return 2 * i + 1; });
    return _mm512_permutex2var_epi16(bf16_code<kHasPayload>(low), vector_of(kFrom),
                                     bf16_code<kHasPayload>(high));
  }

  template <bool kHasPayload>
  KVXFER_VECTOR __m256i f16_code(__m512 x) {
    return _mm512_cvtps_ph(without_payload<kHasPayload>(x), _MM_FROUND_TO_NEAREST_INT);
  }
  template <bool kHasPayload>
  KVXFER_VECTOR __m512i f16_codes(__m512 low, __m512 high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(f16_code<kHasPayload>(low)), f16_code<kHasPayload>(high),
                              1);
  }

  // Rounded to an integer; NaN is 0. Below -128 packing saturates: what the conversion gives
  // there is negative even where it overflows.
  KVXFER_VECTOR __m512i int8_code(__m512 x) {
    const __mmask16 ordered = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
    return _mm512_cvtps_epi32(_mm512_maskz_min_ps(ordered, x, _mm512_set1_ps(127)));
  }

  // Codes and signs are packed alike.
  template <Dtype kTo>
  KVXFER_VECTOR __m512i fp8_bytes(__m512i codes, __m512i signs, const __m512 (&x)[4]) {
    const __m512i bytes = in_order(with_sign(codes, signs));
    constexpr FloatFormat format = float_format(kTo);
    if constexpr (format.nan == format.overflow) return bytes;
    // A NaN was taken for overflow.
    const __mmask64 nan = _mm512_kunpackd(_mm512_kunpackw(nans_of(x[3]), nans_of(x[2])),
                                          _mm512_kunpackw(nans_of(x[1]), nans_of(x[0])));
    return _mm512_mask_add_epi8(bytes, nan, bytes, splat8(format.nan - format.overflow));
  }

  KVXFER_VECTOR __m512i narrow_bytes(__m512i codes, __m512i signs, const __m512i (&magnitude)[2],
                                     bool keeps_nan, __m512i nan_distance) {
    const __m512i bytes = pair_in_order(with_sign(codes, signs));
    if (!keeps_nan) return bytes;
    const __m512i infinity = splat16(0x7f80);
    const __mmask64 nan = _mm512_kunpackd(_mm512_cmpgt_epi16_mask(magnitude[1], infinity),
                                          _mm512_cmpgt_epi16_mask(magnitude[0], infinity));
    return _mm512_mask_add_epi8(bytes, nan, bytes, nan_distance);
  }
};

constexpr ConvertKernel kAvx512 = make_kernel<VectorLoops<Avx512>>("avx512");

}  // namespace

const ConvertKernel* avx512_convert_kernel() noexcept { return has_avx512() ? &kAvx512 : nullptr; }

}  // namespace kvxfer

#else

const kvxfer::ConvertKernel* kvxfer::avx512_convert_kernel() noexcept { return nullptr; }

#endif
