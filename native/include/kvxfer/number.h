// The numbers of a cache: how an element's bits are read as a float32 and rounded back. Integer
// arithmetic only, so every executor, GPU kernels included, gives the same bits.
//
// Rounding is to nearest, ties to even. A NaN keeps its sign and becomes the quiet NaN of its new
// dtype (0x7f, 0x7e, 0x7e00, 0x7fc0 for e4m3, e5m2, f16, bf16: what ml_dtypes gives); read as
// float32 the NaN of a bf16 or an f16 keeps its payload. Overflow is infinite where the dtype has
// an infinity, NaN in e4m3. int8 clamps, and its NaN is 0.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define KVXFER_HD __host__ __device__
#else
#define KVXFER_HD
#endif

namespace kvxfer {

// Of an element. The values are a wire format (CONVERSION_DTYPE of kvxfer/plan/program.py).
enum class Dtype : std::uint8_t {
  kBytes = 0,  // not a number: copied as it is
  kBf16 = 1,
  kF16 = 2,
  kF32 = 3,
  kE4m3 = 4,  // float8_e4m3fn: no infinity, one NaN of each sign
  kE5m2 = 5,
  kInt8 = 6,
};
inline constexpr std::size_t kNumDtypes = 7;

constexpr KVXFER_HD std::size_t itemsize(Dtype dtype) {
  return dtype == Dtype::kF32 ? 4 : dtype == Dtype::kBf16 || dtype == Dtype::kF16 ? 2 : 1;
}

// A binary floating-point format below float32, by its fields. Codes are without the sign.
struct FloatFormat {
  int nbits;
  int mantissa;  // bits
  int bias;
  std::uint32_t largest;   // code of the largest finite number
  std::uint32_t overflow;  // the code beyond it: infinity, or NaN if the format has no infinity
  std::uint32_t nan;       // the quiet NaN
};

constexpr KVXFER_HD FloatFormat float_format(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16: return {16, 7, 127, 0x7f7f, 0x7f80, 0x7fc0};
    case Dtype::kF16: return {16, 10, 15, 0x7bff, 0x7c00, 0x7e00};
    case Dtype::kE4m3: return {8, 3, 7, 0x7e, 0x7f, 0x7f};
    case Dtype::kE5m2: return {8, 2, 15, 0x7b, 0x7c, 0x7e};
    default: return {32, 23, 127, 0x7f7fffff, 0x7f800000, 0x7fc00000};
  }
}

namespace number {

inline constexpr std::uint32_t kSign = 0x80000000;
inline constexpr std::uint32_t kInfinity = 0x7f800000;
inline constexpr std::uint32_t kQuiet = 0x00400000;

constexpr KVXFER_HD std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }
constexpr KVXFER_HD float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

// value / 2^shift, rounded to nearest, ties to even; 0 < shift < 32.
constexpr KVXFER_HD std::uint32_t shift_rounded(std::uint32_t value, int shift) {
  return (value + ((1u << (shift - 1)) - 1) + (value >> shift & 1)) >> shift;
}

// The code of a magnitude (float32 bits without sign, no NaN), rounded. A code beyond format.largest means
// overflow, and nothing else.
constexpr KVXFER_HD std::uint32_t rounded_code(FloatFormat format, std::uint32_t magnitude) {
  const int drop = 23 - format.mantissa;
  const int smallest = 128 - format.bias;  // float32's exponent field of the smallest normal number
  const int exponent = static_cast<int>(magnitude >> 23);
  if (exponent >= smallest)
    return shift_rounded(magnitude - (static_cast<std::uint32_t>(smallest - 1) << 23), drop);
  // Subnormal there: a multiple of the smallest step. Carrying into the exponent is right.
  const std::uint32_t significand = (magnitude & 0x7fffff) | (exponent > 0 ? 0x800000 : 0);
  const int shift = drop + smallest - (exponent > 0 ? exponent : 1);
  return shift > 25 ? 0 : shift_rounded(significand, shift);  // the significand has 24 bits
}

constexpr KVXFER_HD std::uint32_t round_to_int8(float x) {
  if (x != x) return 0;
  const float clamped = x < -128.0f ? -128.0f : x > 127.0f ? 127.0f : x;
  // 1.5 * 2^23: the sum's last bit is worth 1, so the addition rounds, and its low byte is the number.
  return bits_of(clamped + 12582912.0f) & 0xff;
}

}  // namespace number

// The value of an element whose bits are the low ones of `bits`. Exact for every dtype.
constexpr KVXFER_HD float to_float(Dtype dtype, std::uint32_t bits) {
  if (dtype == Dtype::kF32) return number::float_of(bits);
  if (dtype == Dtype::kBf16) return number::float_of(bits << 16);
  if (dtype == Dtype::kInt8) return static_cast<float>(static_cast<std::int8_t>(bits & 0xff));
  const FloatFormat format = float_format(dtype);
  const std::uint32_t sign = (bits >> (format.nbits - 1) & 1) << 31;
  const std::uint32_t code = bits & ((1u << (format.nbits - 1)) - 1);
  const int drop = 23 - format.mantissa;
  if (code > format.largest) {
    if (code == format.overflow && code != format.nan) return number::float_of(sign | number::kInfinity);
    const std::uint32_t payload = dtype == Dtype::kF16 ? code << drop & 0x7fffff : 0;
    return number::float_of(sign | number::kInfinity | number::kQuiet | payload);
  }
  if (code >> format.mantissa == 0) {  // subnormal: code * 2^(1 - bias - mantissa)
    const auto exponent = static_cast<std::uint32_t>(128 - format.bias - format.mantissa);
    const float magnitude = static_cast<float>(code) * number::float_of(exponent << 23);
    return number::float_of(sign | number::bits_of(magnitude));
  }
  return number::float_of(sign | ((code << drop) + (static_cast<std::uint32_t>(127 - format.bias) << 23)));
}

// The bits of x, rounded to `dtype`. With `saturate`, overflow and infinity become the largest finite
// number; a NaN stays one.
constexpr KVXFER_HD std::uint32_t from_float(Dtype dtype, float x, bool saturate) {
  if (dtype == Dtype::kInt8) return number::round_to_int8(x);
  const FloatFormat format = float_format(dtype);
  const std::uint32_t bits = number::bits_of(x);
  const std::uint32_t magnitude = bits & ~number::kSign;
  const std::uint32_t sign = bits >> 31 << (format.nbits - 1);
  if (dtype == Dtype::kF32) return saturate && magnitude == number::kInfinity ? sign | format.largest : bits;
  if (magnitude > number::kInfinity) return sign | format.nan;
  const std::uint32_t code = number::rounded_code(format, magnitude);
  if (code <= format.largest) return sign | code;
  return sign | (saturate ? format.largest : format.overflow);
}

// The largest finite number: 448 for e4m3, 57344 for e5m2, 127 for int8; 0 for bytes.
constexpr KVXFER_HD float largest(Dtype dtype) {
  if (dtype == Dtype::kBytes) return 0;
  return dtype == Dtype::kInt8 ? 127.0f : to_float(dtype, float_format(dtype).largest);
}

}  // namespace kvxfer
