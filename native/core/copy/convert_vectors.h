// Conversions by vectors: what the kernels of AVX2 and of AVX-512 have in common. A kernel's file defines
// KVXFER_TARGET, the attribute of functions that use its instructions, and includes this file. VectorLoops gets
// its instructions from V, whose vectors hold a quarter of a step's elements as float32:
//
//   Floats, Ints    a vector as float32, as bits
//   floats, splat, splat16, splat8    the same number in all elements of a size
//   and the arithmetic of both, by name; packing puts the parts of a vector in an order that in_order() ends
//   widen, f16_of, low_half, high_half    elements to lanes
//   bf16_codes, f16_codes, int8_code, fp8_bytes, narrow_bytes    lanes to elements, rounded
//   max_finite      the larger magnitudes, without infinities and NaNs
//   stream          stores past the cache
//   Last            the elements behind the last whole step, as operands of one more
//
// All of it is in an unnamed namespace, because each kernel compiles it for other instructions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/copy/convert_kernel.h"
#include "core/copy/factors.h"
#include "core/copy/fp8_code.h"

#define KVXFER_VECTOR_MEMBER __attribute__((KVXFER_TARGET, always_inline)) inline
#define KVXFER_VECTOR KVXFER_VECTOR_MEMBER static

// Stands before a loop over Lanes: they stay in registers if it is unrolled, and GCC would unroll it too
// late.
#if defined(__clang__)
#define KVXFER_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KVXFER_UNROLL _Pragma("GCC unroll 4")
#endif

namespace kvxfer {
namespace {

// Which elements of a step exist: all of them.
template <class V>
struct Whole {
  template <class Vector>
  KVXFER_VECTOR_MEMBER Vector load(const std::byte* at) const {
    Vector bytes;
    std::memcpy(&bytes, at, sizeof bytes);
    return bytes;
  }
  KVXFER_VECTOR_MEMBER void store(std::byte* at, typename V::Ints bytes, bool stream) const {
    if (stream)
      V::stream(at, bytes);
    else
      std::memcpy(at, &bytes, sizeof bytes);
  }
};

template <class V>
struct VectorLoops {
  using Floats = typename V::Floats;
  using Ints = typename V::Ints;

  // A step's elements, in order: one vector of 8-bit elements, two of 16-bit ones.
  struct Lanes { Floats at[4]; };
  static constexpr std::size_t kVectorNbytes = sizeof(Ints), kStep = kVectorNbytes;

  KVXFER_VECTOR Ints magnitude_of(Floats x) { return V::bit_and(V::bits_of(x), V::splat(~number::kSign)); }

  // ---- elements to lanes ----

  template <Dtype kFrom, class There>
  KVXFER_VECTOR Lanes load(const std::byte* src, const There& there) {
    constexpr std::size_t kQuarter = kStep / 4 * itemsize(kFrom);
    Lanes x;
    if constexpr (kFrom == Dtype::kE4m3 || kFrom == Dtype::kE5m2) {
      KVXFER_UNROLL
      for (std::size_t k = 0; k < 2; ++k) {
        const Ints f16 = V::template f16_of<kFrom>(src + 2 * kQuarter * k, there);
        x.at[2 * k] = V::low_half(f16);
        x.at[2 * k + 1] = V::high_half(f16);
      }
      if constexpr (kFrom == Dtype::kE4m3) {  // f16_of() gives them 2^8 too small
        KVXFER_UNROLL
        for (Floats& lanes : x.at) lanes = V::mul(lanes, V::floats(256));
      }
    } else {
      KVXFER_UNROLL
      for (std::size_t k = 0; k < 4; ++k) x.at[k] = V::template widen<kFrom>(src + kQuarter * k, there);
    }
    return x;
  }

  // ---- lanes to elements ----

  // The codes, shifted, of magnitudes up to kBeyond. See fp8_code.h.
  template <Dtype kTo, int kFurther = 0>
  KVXFER_VECTOR Ints fp8_codes(Floats magnitude) {
    using Code = Fp8Code<kTo>;
    const Ints power =
        V::max32(V::bit_and(V::bits_of(magnitude), V::splat(number::kInfinity)), V::splat(Code::kLeastPower));
    const Floats sum = V::fmadd(V::floats_of(power), V::floats_of(V::splat(Code::kRounder)), magnitude);
    return V::madd16(V::bits_of(sum), V::splat(Code::template kPlaces<kFurther>));
  }
  // Four vectors of 32-bit integers to one of bytes, with signed saturation.
  KVXFER_VECTOR Ints pack_bytes(Ints a, Ints b, Ints c, Ints d) {
    return V::packs16(V::packs32(a, b), V::packs32(c, d));
  }

  // kHasPayload: a NaN among them may be any NaN, not only the quiet one of its sign.
  template <Dtype kTo, bool kHasPayload, class There>
  KVXFER_VECTOR void store(std::byte* dst, const Lanes& x, const There& there, bool stream) {
    if constexpr (kTo == Dtype::kF32) {
      KVXFER_UNROLL
      for (std::size_t k = 0; k < 4; ++k) there.store(dst + kVectorNbytes * k, V::bits_of(x.at[k]), stream);
    } else if constexpr (kTo == Dtype::kBf16 || kTo == Dtype::kF16) {
      KVXFER_UNROLL
      for (std::size_t k = 0; k < 2; ++k) {
        const Floats low = x.at[2 * k], high = x.at[2 * k + 1];
        there.store(dst + kVectorNbytes * k,
                    kTo == Dtype::kBf16 ? V::template bf16_codes<kHasPayload>(low, high)
                                        : V::template f16_codes<kHasPayload>(low, high),
                    stream);
      }
    } else if constexpr (kTo == Dtype::kInt8) {
      const Ints codes = pack_bytes(V::int8_code(x.at[0]), V::int8_code(x.at[1]), V::int8_code(x.at[2]),
                                    V::int8_code(x.at[3]));
      there.store(dst, V::in_order(codes), stream);
    } else {
      using Code = Fp8Code<kTo>;
      Ints codes[4];
      KVXFER_UNROLL
      for (std::size_t k = 0; k < 4; ++k)
        codes[k] = fp8_codes<kTo>(V::floats_of(V::min32(magnitude_of(x.at[k]), V::splat(Code::kBeyond))));
      const Ints low = V::template srl16<Code::kShift>(V::packs32(codes[0], codes[1]));
      const Ints high = V::template srl16<Code::kShift>(V::packs32(codes[2], codes[3]));
      // Saturation keeps the sign, and the top bit of a code is free.
      const Ints signs =
          pack_bytes(V::bits_of(x.at[0]), V::bits_of(x.at[1]), V::bits_of(x.at[2]), V::bits_of(x.at[3]));
      there.store(dst, V::template fp8_bytes<kTo>(V::packs16(low, high), signs, x.at), stream);
    }
  }

  // ---- loops ----

  // A step converts kStep elements. Between any two dtypes, the branches always taken alike; they replace four
  // loops for each pair of dtypes.
  template <Dtype kFrom, Dtype kTo>
  struct AnyStep {
    Factors factors;
    bool saturate;

    template <class There>
    KVXFER_VECTOR_MEMBER void operator()(const std::byte* src, std::byte* dst, const There& there,
                                         bool stream) const {
      Lanes x = load<kFrom>(src, there);
      const Floats high = V::floats(factors.high);
      if (factors.has_times) {
        KVXFER_UNROLL
        for (Floats& lanes : x.at) lanes = V::mul(lanes, V::floats(factors.times));
      }
      if (factors.has_over) {
        KVXFER_UNROLL
        for (Floats& lanes : x.at) lanes = V::div(lanes, V::floats(factors.over));
      }
      if (factors.has_high) {
        KVXFER_UNROLL
        for (Floats& lanes : x.at) lanes = V::mul(lanes, high);
      }
      if (factors.has_high_low && itemsize(kTo) == 1) {
        KVXFER_UNROLL
        for (Floats& lanes : x.at) lanes = V::fmadd(lanes, high, V::mul(lanes, V::floats(factors.low)));
      }
      if (saturate && kTo != Dtype::kInt8) {  // int8 clamps anyway; the operands' order keeps a NaN
        KVXFER_UNROLL
        for (Floats& lanes : x.at)
          lanes = V::max(V::floats(-largest(kTo)), V::min(V::floats(largest(kTo)), lanes));
      }
      store<kTo, itemsize(kFrom) != 1>(dst, x, there, stream);  // no room for a payload in 8 bits
    }
  };

  // From bf16 to 8-bit floats, times a positive factor: what most caches need. Two elements share a 32-bit
  // lane as long as possible. One of them is a float32 once the other is masked off, the other after a
  // shift; a multiplication puts the codes side by side again.
  template <Dtype kTo>
  struct NarrowStep {
    Floats factor;
    Ints limit;  // a bf16 that becomes the largest wanted code, in 16-bit lanes
    Ints nan_distance;  // of the NaN's code from that one, in bytes
    bool keeps_nan;  // it is not 0

    template <class There>
    KVXFER_VECTOR_MEMBER void operator()(const std::byte* src, std::byte* dst, const There& there,
                                         bool stream) const {
      const Ints number[2] = {there.template load<Ints>(src), there.template load<Ints>(src + kVectorNbytes)};
      const Ints without_sign = V::splat16(0x7fff);
      const Ints magnitude[2] = {V::bit_and(number[0], without_sign), V::bit_and(number[1], without_sign)};
      const Ints codes = V::packus32(pairs_of(magnitude[0]), pairs_of(magnitude[1]));
      const Ints signs = V::packs16(number[0], number[1]);  // saturation keeps a sign
      there.store(dst, V::narrow_bytes(codes, signs, magnitude, keeps_nan, nan_distance), stream);
    }

   private:
    // The codes of the elements, two bytes in each lane.
    KVXFER_VECTOR_MEMBER Ints pairs_of(Ints magnitude) const {
      const Ints clamped = V::min16(magnitude, limit);
      const Floats even = V::floats_of(V::template sll32<16>(clamped));
      const Floats odd = V::floats_of(V::bit_and(clamped, V::splat(0xffff0000)));
      const Ints even_codes = fp8_codes<kTo>(V::mul(even, factor));
      const Ints odd_codes = fp8_codes<kTo, 8>(V::mul(odd, factor));
      return V::template srl32<Fp8Code<kTo>::kShift>(V::add32(even_codes, odd_codes));
    }
  };

  template <Dtype kTo>
  KVXFER_VECTOR NarrowStep<kTo> narrow_step(const NarrowFactor& by) {
    const std::uint32_t nan_distance = float_format(kTo).nan - by.largest_code;
    return {V::floats(by.factor), V::splat16(number::bits_of(by.limit) >> 16), V::splat8(nan_distance),
            nan_distance != 0};
  }

  template <Dtype kFrom, Dtype kTo, class Step>
  KVXFER_VECTOR void convert_steps(const std::byte* src, std::byte* dst, std::size_t count,
                                   const Traffic& traffic, const Step& step) {
    constexpr std::size_t from_nbytes = kStep * itemsize(kFrom), to_nbytes = kStep * itemsize(kTo);
    const bool stream = streams(traffic, dst, count * itemsize(kTo));
    LookAhead<from_nbytes> look_ahead(src, count / kStep, traffic);
    for (std::size_t left = count / kStep; left != 0; --left) {
      look_ahead.before_step(src, left);
      step(src, dst, Whole<V>{}, stream);
      src += from_nbytes;
      dst += to_nbytes;
    }
    count %= kStep;
    if (count == 0) return;
    typename V::template Last<from_nbytes, to_nbytes> last(src, count * itemsize(kFrom), dst,
                                                           count * itemsize(kTo));
    step(last.src, last.dst, last.there, false);
    last.end();
  }

  template <Dtype kFrom, Dtype kTo>
  __attribute__((KVXFER_TARGET)) static void convert(const std::byte* src, std::byte* dst, std::size_t count,
                                                     const Scaling& scaling,
                                                     const Traffic& traffic) noexcept {
    if constexpr (kFrom == Dtype::kBf16 && (kTo == Dtype::kE4m3 || kTo == Dtype::kE5m2)) {
      if (const NarrowFactor by = narrow_factor(scaling, kTo); by.factor != 0)
        return convert_steps<kFrom, kTo>(src, dst, count, traffic, narrow_step<kTo>(by));
    }
    convert_steps<kFrom, kTo>(src, dst, count, traffic,
                              AnyStep<kFrom, kTo>{factors_of(scaling, kTo), scaling.saturate});
  }

  template <Dtype kFrom, class There>
  KVXFER_VECTOR Ints amax_step(const std::byte* src, const There& there, Floats scale, Ints largest_yet) {
    const Lanes x = load<kFrom>(src, there);
    KVXFER_UNROLL
    for (const Floats& lanes : x.at)  // magnitudes order as integers do
      largest_yet = V::max_finite(largest_yet, magnitude_of(V::mul(lanes, scale)));
    return largest_yet;
  }

  template <Dtype kFrom>
  __attribute__((KVXFER_TARGET)) static float amax(const std::byte* src, std::size_t count,
                                                   float scale) noexcept {
    constexpr std::size_t from_nbytes = kStep * itemsize(kFrom);
    const Floats scales = V::floats(scale);
    Ints largest_yet = V::splat(0);
    for (; count >= kStep; count -= kStep) {
      largest_yet = amax_step<kFrom>(src, Whole<V>{}, scales, largest_yet);
      src += from_nbytes;
    }
    if (count != 0) {  // zeros beside the rest
      const typename V::template Last<from_nbytes, 1> last(src, count * itemsize(kFrom), nullptr, 0);
      largest_yet = amax_step<kFrom>(last.src, last.there, scales, largest_yet);
    }
    std::uint32_t lanes[sizeof(Ints) / sizeof(std::uint32_t)];
    std::memcpy(lanes, &largest_yet, sizeof lanes);
    return number::float_of(*std::max_element(std::begin(lanes), std::end(lanes)));
  }
};

}  // namespace
}  // namespace kvxfer
