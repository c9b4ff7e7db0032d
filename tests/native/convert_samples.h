// What the tests of conversions convert: elements and scales for which rounding most easily goes wrong.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <vector>

#include "check.h"
#include "core/copy/convert.h"

namespace convert_samples {

using namespace kvxfer;

inline constexpr std::array kNumbers = {Dtype::kBf16, Dtype::kF16,  Dtype::kF32,
                                        Dtype::kE4m3, Dtype::kE5m2, Dtype::kInt8};
inline constexpr std::array kNarrow = {Dtype::kE4m3, Dtype::kE5m2, Dtype::kInt8};
inline constexpr std::byte kUntouched{0x5a};
inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline const char* name_of(Dtype dtype) {
  constexpr const char* names[] = {"bytes", "bf16", "f16", "f32", "e4m3", "e5m2", "int8"};
  return names[static_cast<std::size_t>(dtype)];
}

// While this object lives, the kernel of that name makes all conversions; afterwards the best one does again.
class WithKernel {
 public:
  explicit WithKernel(std::string_view name) : there_(use_convert_kernel(name)) {}
  ~WithKernel() { use_convert_kernel(""); }
  bool there() const { return there_; }

 private:
  bool there_;
};

inline std::uint32_t element_at(const std::vector<std::byte>& elements, Dtype dtype, std::size_t index) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, elements.data() + index * itemsize(dtype), itemsize(dtype));
  return bits;
}

inline std::vector<std::byte> elements_of(Dtype dtype, const std::vector<std::uint32_t>& bits) {
  std::vector<std::byte> elements(bits.size() * itemsize(dtype));
  for (std::size_t i = 0; i < bits.size(); ++i)
    std::memcpy(elements.data() + i * itemsize(dtype), &bits[i], itemsize(dtype));
  return elements;
}

// Where float32 is the source: every rounding tie of every narrower dtype and its neighbours (all
// values of a dtype with one more bit of mantissa are its values and ties), and random bits.
inline std::vector<std::uint32_t> float_patterns(check::Random& random) {
  std::vector<std::uint32_t> bits = {0,          0x7f800000, 0x7f800001, 0x7fbfffff,
                                     0x7fc00000, 0x7fffffff, 0x7f7fffff};
  const auto with_neighbours = [&bits](std::uint32_t middle) {
    for (std::uint32_t pattern = middle - 1; pattern != middle + 2; ++pattern) bits.push_back(pattern);
  };
  // e4m3 has 3 bits, e5m2 2, down to 2^-17: in steps of the fourth bit, further down than either.
  for (std::uint32_t step = (127 - 20) << 4; step < (127 + 18) << 4; ++step) with_neighbours(step << 19);
  // The subnormals' ties: odd multiples of half their smallest step.
  for (std::uint32_t k = 1; k < 16; ++k)
    for (const float unit : {0x1p-10f, 0x1p-17f})
      with_neighbours(number::bits_of(static_cast<float>(k) * unit));
  for (std::uint32_t k = 0; k < 130; ++k) with_neighbours(number::bits_of(static_cast<float>(k) + 0.5f));
  for (int i = 0; i < 4096; ++i) {  // and some ties of f16 and bf16
    const auto h = static_cast<std::uint32_t>(random.next());
    with_neighbours(number::bits_of(to_float(Dtype::kF16, h & 0x7bff)) | 0x1000);
    with_neighbours((h & 0x7fff) << 16 | 0x8000);
  }
  for (int i = 0; i < 50000; ++i) bits.push_back(static_cast<std::uint32_t>(random.next()));
  const std::size_t num_positive = bits.size();
  for (std::size_t i = 0; i < num_positive; ++i) bits.push_back(bits[i] ^ number::kSign);
  return bits;
}

inline std::vector<std::uint32_t> all_patterns(Dtype dtype, check::Random& random) {
  if (dtype == Dtype::kF32) return float_patterns(random);
  std::vector<std::uint32_t> bits(std::size_t{1} << 8 * itemsize(dtype));
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint32_t>(i);
  return bits;
}

inline std::vector<Scaling> scalings(check::Random& random) {
  std::vector<Scaling> all = {{}};
  for (const float scale : {0.037f, 3.0f, 0.25f, 1.0f, 0x1p-126f, 0x1p127f, 1e-40f, 0.0f, kInf, kNan}) {
    all.push_back({.dst = scale, .has_dst = true});
    all.push_back({.src = scale, .has_src = true});
  }
  all.push_back({.src = 1.7f, .dst = -0.3f, .has_src = true, .has_dst = true});
  for (int i = 0; i < 4; ++i)
    all.push_back({.src = std::ldexp(1.0f + static_cast<float>(random.below(1000)) / 1000, 3 - i),
                   .dst = std::ldexp(1.0f + static_cast<float>(random.below(1000)) / 1000, i - 4),
                   .has_src = true,
                   .has_dst = true});
  all.push_back({.dst = number::float_of(0x7fffffff), .has_dst = true});  // a NaN with a payload
  const std::size_t num_plain = all.size();
  for (std::size_t i = 0; i < num_plain; ++i) {
    all.push_back(all[i]);
    all.back().saturate = true;
  }
  return all;
}

// Scales for which an inverse most easily goes wrong: long and short significands, neighbours of a short one,
// those that follow from a page's largest magnitude, those that put x / scale beside a tie, and the ends of
// the range in which an inverse exists.
inline std::vector<float> hard_scales(check::Random& random, int num_random) {
  std::vector<float> scales = {
      0x1p-60f, 0x1p60f, std::nextafter(0x1p-60f, 0.0f), std::nextafter(0x1p60f, kInf), 1.5f, -1.5f,
      0.1f,     -0.037f};
  for (std::uint32_t top = 0; top < 1u << 6; ++top)  // beside a multiple of 2^17
    for (const int beside : {-34, -33, -32, -9, -1, 0, 1, 2, 31, 32, 33, 34})
      scales.push_back(number::float_of(0x3c800000 + (top << 17) + static_cast<std::uint32_t>(beside)));
  for (int i = 0; i < num_random; ++i) {
    const auto bits = static_cast<std::uint32_t>(random.next());
    const float anything = number::float_of((bits & 0x007fffff) | (120 + bits % 16) << 23);
    const float bf16 = number::float_of(number::bits_of(anything) & 0xffff0000);
    const auto tie = static_cast<float>(16 + bits % 16);
    scales.push_back(anything);
    scales.push_back(scale_for(kNarrow[bits % kNarrow.size()], bf16));
    scales.push_back(number::float_of(number::bits_of(bf16 / tie) + bits % 5 - 2));
  }
  return scales;
}

}  // namespace convert_samples
