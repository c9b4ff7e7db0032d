// A kernel is a load for each source dtype (elements to float32 lanes), a store for each
// destination dtype (lanes to elements, rounded), and one loop that combines any two of them.
#include "core/convert.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvxfer {
namespace {

constexpr std::size_t kNumNumbers = kNumDtypes - 1;  // dtypes that are numbers
static_assert(std::endian::native == std::endian::little, "elements are little-endian, and so are ours");

// Loops of a kernel, by source and by source and destination; kBytes is left out.
using ConvertLoop = void (*)(const std::byte* src, std::byte* dst, std::size_t count,
                             const Scaling& scaling) noexcept;
using AmaxLoop = float (*)(const std::byte* src, std::size_t count, float scale) noexcept;
struct Kernel {
  std::string_view name;
  std::array<std::array<ConvertLoop, kNumNumbers>, kNumNumbers> convert;
  std::array<AmaxLoop, kNumNumbers> amax;
};

constexpr Dtype number_at(std::size_t index) { return static_cast<Dtype>(index + 1); }
constexpr std::size_t index_of(Dtype dtype) { return static_cast<std::size_t>(dtype) - 1; }

// Fills a kernel's tables: Loops::convert<kFrom, kTo> and Loops::amax<kFrom> of every dtype.
template <class Loops>
constexpr Kernel make_kernel(std::string_view name) {
  Kernel kernel{};
  kernel.name = name;
  [&]<std::size_t... kPair>(std::index_sequence<kPair...>) {
    ((kernel.convert[kPair / kNumNumbers][kPair % kNumNumbers] =
          Loops::template convert<number_at(kPair / kNumNumbers), number_at(kPair % kNumNumbers)>),
     ...);
  }(std::make_index_sequence<kNumNumbers * kNumNumbers>{});
  [&]<std::size_t... kFrom>(std::index_sequence<kFrom...>) {
    ((kernel.amax[kFrom] = Loops::template amax<number_at(kFrom)>), ...);
  }(std::make_index_sequence<kNumNumbers>{});
  return kernel;
}

// ---- portable ----

struct ScalarLoops {
  template <Dtype kFrom>
  static float load(const std::byte* src) noexcept {
    std::uint32_t bits = 0;
    std::memcpy(&bits, src, itemsize(kFrom));
    return to_float(kFrom, bits);
  }

  template <Dtype kFrom, Dtype kTo>
  static void convert(const std::byte* src, std::byte* dst, std::size_t count,
                      const Scaling& scaling) noexcept {
    for (std::size_t i = 0; i < count; ++i) {
      float x = load<kFrom>(src + i * itemsize(kFrom));
      if (scaling.has_src) x *= scaling.src;
      if (scaling.has_dst) x /= scaling.dst;
      const std::uint32_t bits = from_float(kTo, x, scaling.saturate);
      std::memcpy(dst + i * itemsize(kTo), &bits, itemsize(kTo));
    }
  }

  template <Dtype kFrom>
  static float amax(const std::byte* src, std::size_t count, float scale) noexcept {
    float largest_yet = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float x = load<kFrom>(src + i * itemsize(kFrom)) * scale;
      const std::uint32_t magnitude = number::bits_of(x) & ~number::kSign;
      if (magnitude < number::kInfinity && number::float_of(magnitude) > largest_yet)
        largest_yet = number::float_of(magnitude);
    }
    return largest_yet;
  }
};

constexpr Kernel kScalar = make_kernel<ScalarLoops>("scalar");

// ---- AVX2 and F16C ----

#if defined(__x86_64__)
#define KVXFER_AVX2 __attribute__((target("avx2,f16c"), always_inline)) static inline

// 1 / scale where scale is a power of two, so that x * inverse is x / scale to the bit and as fast
// as no scale at all; 0 elsewhere, and where scale or inverse would be subnormal.
float exact_inverse(float scale) noexcept {
  const std::uint32_t bits = number::bits_of(scale);
  const std::uint32_t exponent = bits >> 23 & 0xff;
  if ((bits & 0x7fffff) != 0 || exponent == 0 || exponent > 253) return 0;
  return 1 / scale;
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

  // The codes of x, without sign.
  //
  // Let 2^e be the magnitude's power of two, or the smallest normal number's. Adding 2^(e + drop)
  // puts the code's last bit in place of the sum's last bit: the addition rounds, ties to even,
  // and leaves 2^mantissa + (the code's mantissa), or just the mantissa of a subnormal, in the
  // sum's low bits. The exponent's share is e - e_min, for the leading bit counts for one more.
  template <Dtype kTo>
  KVXFER_AVX2 __m256i fp8_code(__m256 x) {
    constexpr FloatFormat format = float_format(kTo);
    constexpr std::uint32_t drop = 23 - format.mantissa;
    constexpr std::uint32_t smallest = 128 - format.bias;
    // From here on everything is overflow (e4m3: the NaN's place, 480; e5m2: the infinity's).
    constexpr std::uint32_t beyond =
        (format.overflow << drop) + (static_cast<std::uint32_t>(smallest - 1) << 23);
    // Added beforehand to the sum's low bits: even, so that ties are not touched, less than 2^8.
    constexpr std::uint32_t exponent_offset = -(smallest << format.mantissa) & 0xff;
    static_assert(exponent_offset % 2 == 0);
    const __m256i magnitude = magnitude_of(x);
    const __m256i clamped = _mm256_min_epi32(magnitude, splat(beyond));
    const __m256i power =
        _mm256_max_epi32(_mm256_and_si256(clamped, splat(number::kInfinity)), splat(smallest << 23));
    const __m256i adder = _mm256_add_epi32(power, splat((drop << 23) + exponent_offset));
    const __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(clamped), _mm256_castsi256_ps(adder));
    const __m256i code = _mm256_add_epi32(bits_of(sum), _mm256_srli_epi32(power, drop));
    const __m256i low = _mm256_and_si256(code, splat(0xff));
    if constexpr (format.nan == format.overflow) return low;
    const __m256i nan = _mm256_cmpgt_epi32(magnitude, splat(number::kInfinity));
    return _mm256_blendv_epi8(low, splat(format.nan), nan);
  }

  // Rounded to an integer; NaN is 0. Below -128 packing saturates: what the conversion gives
  // there is negative even where it overflows.
  KVXFER_AVX2 __m256i int8_code(__m256 x) {
    const __m256 ordered = _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q));
    return _mm256_cvtps_epi32(_mm256_min_ps(ordered, _mm256_set1_ps(127)));
  }

  // kHasPayload: a NaN among them may be any, and not just the quiet one of either sign.
  template <Dtype kTo, bool kHasPayload>
  KVXFER_AVX2 void store(std::byte* dst, const Lanes& x) {
    auto* to = reinterpret_cast<__m256i*>(dst);
    if constexpr (kTo == Dtype::kF32) {
      for (std::size_t k = 0; k < 4; ++k) _mm256_storeu_si256(to + k, bits_of(x.at[k]));
    } else if constexpr (kTo == Dtype::kBf16) {
      for (std::size_t k = 0; k < 2; ++k) {
        const __m256i codes =
            _mm256_packus_epi32(bf16_code<kHasPayload>(x.at[2 * k]), bf16_code<kHasPayload>(x.at[2 * k + 1]));
        _mm256_storeu_si256(to + k, _mm256_permute4x64_epi64(codes, 0b11'01'10'00));
      }
    } else if constexpr (kTo == Dtype::kF16) {
      for (std::size_t k = 0; k < 2; ++k) {
        const __m128i low = _mm256_cvtps_ph(x.at[2 * k], _MM_FROUND_TO_NEAREST_INT);
        const __m128i high = _mm256_cvtps_ph(x.at[2 * k + 1], _MM_FROUND_TO_NEAREST_INT);
        const __m256i codes = _mm256_set_m128i(high, low);
        _mm256_storeu_si256(to + k, kHasPayload ? without_payload(codes) : codes);
      }
    } else if constexpr (kTo == Dtype::kInt8) {
      const __m256i codes =
          pack_bytes(int8_code(x.at[0]), int8_code(x.at[1]), int8_code(x.at[2]), int8_code(x.at[3]));
      _mm256_storeu_si256(to, in_order(codes));
    } else {
      const __m256i codes = pack_bytes(fp8_code<kTo>(x.at[0]), fp8_code<kTo>(x.at[1]), fp8_code<kTo>(x.at[2]),
                                       fp8_code<kTo>(x.at[3]));
      // Saturation keeps a sign, and a code's top bit is free.
      const __m256i signs =
          _mm256_and_si256(pack_bytes(bits_of(x.at[0]), bits_of(x.at[1]), bits_of(x.at[2]), bits_of(x.at[3])),
                           _mm256_set1_epi8(static_cast<char>(0x80)));
      _mm256_storeu_si256(to, in_order(_mm256_or_si256(codes, signs)));
    }
  }

  // ---- loops ----

  // How the source's and the destination's scale are applied. A branch of the loop's own, always
  // taken alike, in place of four loops a pair.
  struct Factors {
    __m256 times, over, times_inverse;
    bool has_times, has_over, has_inverse;
  };

  KVXFER_AVX2 Factors factors_of(const Scaling& scaling) {
    const float src = without_nan_payload(scaling.src), dst = without_nan_payload(scaling.dst);
    const float inverse = exact_inverse(dst);
    return {_mm256_set1_ps(src),
            _mm256_set1_ps(dst),
            _mm256_set1_ps(inverse),
            scaling.has_src,
            scaling.has_dst && inverse == 0,
            scaling.has_dst && inverse != 0};
  }

  template <Dtype kFrom, Dtype kTo>
  KVXFER_AVX2 void convert_step(const std::byte* src, std::byte* dst, const Factors& factors, bool saturate) {
    Lanes x = load<kFrom>(src);
    if (factors.has_times)
      for (__m256& lanes : x.at) lanes = _mm256_mul_ps(lanes, factors.times);
    if (factors.has_over)
      for (__m256& lanes : x.at) lanes = _mm256_div_ps(lanes, factors.over);
    if (factors.has_inverse)
      for (__m256& lanes : x.at) lanes = _mm256_mul_ps(lanes, factors.times_inverse);
    if (saturate && kTo != Dtype::kInt8)  // int8 clamps anyway; the operands' order keeps a NaN
      for (__m256& lanes : x.at)
        lanes =
            _mm256_max_ps(_mm256_set1_ps(-largest(kTo)), _mm256_min_ps(_mm256_set1_ps(largest(kTo)), lanes));
    store<kTo, itemsize(kFrom) != 1>(dst, x);  // no room for a payload in 8 bits
  }

  template <Dtype kFrom, Dtype kTo>
  __attribute__((target("avx2,f16c"))) static void convert(const std::byte* src, std::byte* dst,
                                                           std::size_t count,
                                                           const Scaling& scaling) noexcept {
    const Factors factors = factors_of(scaling);
    const bool saturate = scaling.saturate;
    for (; count >= kStep; count -= kStep) {
      convert_step<kFrom, kTo>(src, dst, factors, saturate);
      src += kStep * itemsize(kFrom);
      dst += kStep * itemsize(kTo);
    }
    if (count == 0) return;
    std::byte last_src[kStep * itemsize(kFrom)] = {}, last_dst[kStep * itemsize(kTo)];
    std::memcpy(last_src, src, count * itemsize(kFrom));
    convert_step<kFrom, kTo>(last_src, last_dst, factors, saturate);
    std::memcpy(dst, last_dst, count * itemsize(kTo));
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
  __attribute__((target("avx2,f16c"))) static float amax(const std::byte* src, std::size_t count,
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

constexpr Kernel kAvx2 = make_kernel<Avx2Loops>("avx2");

#endif

const Kernel* kernel_named(std::string_view name) noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool runs_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (runs_avx2 && (name.empty() || name == kAvx2.name)) return &kAvx2;
#endif
  return name.empty() || name == kScalar.name ? &kScalar : nullptr;
}

std::atomic<const Kernel*> the_kernel{kernel_named("")};

}  // namespace

void convert_run(Dtype from, const std::byte* src, Dtype to, std::byte* dst, std::size_t count,
                 const Scaling& scaling) noexcept {
  if (count == 0) return;
  const bool as_it_is = from == to && !scaling.has_src && !scaling.has_dst && !scaling.saturate;
  if (as_it_is || from == Dtype::kBytes || to == Dtype::kBytes) {
    std::memcpy(dst, src, count * itemsize(as_it_is ? from : Dtype::kBytes));
    return;
  }
  const Kernel& kernel = *the_kernel.load(std::memory_order_relaxed);
  kernel.convert[index_of(from)][index_of(to)](src, dst, count, scaling);
}

float amax_run(Dtype from, const std::byte* src, std::size_t count, const Scaling& scaling) noexcept {
  if (count == 0 || from == Dtype::kBytes) return 0;
  const Kernel& kernel = *the_kernel.load(std::memory_order_relaxed);
  return kernel.amax[index_of(from)](src, count, scaling.has_src ? scaling.src : 1.0f);
}

float scale_for(Dtype to, float amax) noexcept {
  if (itemsize(to) != 1 || to == Dtype::kBytes || amax == 0) return 1;
  return std::max(amax / largest(to), std::numeric_limits<float>::min());
}

std::string_view convert_kernel_name() noexcept { return the_kernel.load(std::memory_order_relaxed)->name; }

bool use_convert_kernel(std::string_view name) noexcept {
  const Kernel* kernel = kernel_named(name);
  if (kernel != nullptr) the_kernel.store(kernel, std::memory_order_relaxed);
  return kernel != nullptr;
}

}  // namespace kvxfer
