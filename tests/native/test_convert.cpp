#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "convert_samples.h"
#include "core/copy/convert.h"

namespace {

using namespace convert_samples;

TEST(every_element_that_is_a_number_keeps_its_bits_through_float32) {
  for (const Dtype dtype : kNumbers) {
    if (dtype == Dtype::kF32) continue;
    for (std::uint32_t bits = 0; bits < 1u << 8 * itemsize(dtype); ++bits) {
      const float x = to_float(dtype, bits);
      if (std::isnan(x)) {
        CHECK(std::isnan(to_float(dtype, from_float(dtype, x, true))));
        CHECK_EQ(std::signbit(x), bits >> (8 * itemsize(dtype) - 1));
      } else {
        CHECK_EQ(from_float(dtype, x, false), bits);
        if (!std::isinf(x)) CHECK_EQ(from_float(dtype, x, true), bits);
      }
    }
  }
}

// No value of the dtype is nearer; of two that are equally near, the result is the even one.
TEST(from_float_gives_the_nearest_number) {
  check::Random random(check::seed());
  const std::vector<std::uint32_t> patterns = float_patterns(random);
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kE4m3, Dtype::kE5m2}) {
    const FloatFormat format = float_format(dtype);
    for (const std::uint32_t pattern : patterns) {
      const double x = std::abs(static_cast<double>(number::float_of(pattern)));
      if (std::isnan(x) || x > largest(dtype)) continue;
      const std::uint32_t sign_bit = 1u << (format.nbits - 1);
      const std::uint32_t result = from_float(dtype, number::float_of(pattern), false);
      CHECK_EQ((result & sign_bit) != 0, pattern >> 31 != 0);
      const std::uint32_t code = result & (sign_bit - 1);
      const double distance = std::abs(x - to_float(dtype, code));
      for (const std::uint32_t other : {code - 1, code + 1}) {
        if (other > format.largest) continue;  // also for negative values
        const double other_distance = std::abs(x - to_float(dtype, other));
        CHECK(distance < other_distance || (distance == other_distance && code % 2 == 0));
      }
    }
  }
}

TEST(overflow_infinities_and_nans_become_what_the_header_says) {
  struct Expected {
    Dtype dtype;
    float last;  // the last that is rounded down to the largest number
    std::uint32_t largest, overflow, nan;
  };
  for (const Expected& e : {Expected{Dtype::kE4m3, 464, 0x7e, 0x7f, 0x7f},
                            Expected{Dtype::kE5m2, std::nextafter(61440.0f, 0.0f), 0x7b, 0x7c, 0x7e},
                            Expected{Dtype::kF16, std::nextafter(65520.0f, 0.0f), 0x7bff, 0x7c00, 0x7e00},
                            Expected{Dtype::kBf16, number::float_of(0x7f7f7fff), 0x7f7f, 0x7f80, 0x7fc0}}) {
    const std::uint32_t sign = 1u << (8 * itemsize(e.dtype) - 1);
    const float beyond = std::nextafter(e.last, kInf);
    CHECK_EQ(from_float(e.dtype, e.last, false), e.largest);
    for (const float x : {beyond, std::numeric_limits<float>::max(), kInf}) {
      CHECK_EQ(from_float(e.dtype, x, false), e.overflow);
      CHECK_EQ(from_float(e.dtype, -x, false), sign | e.overflow);
      CHECK_EQ(from_float(e.dtype, x, true), e.largest);
      CHECK_EQ(from_float(e.dtype, -x, true), sign | e.largest);
    }
    for (const std::uint32_t nan : {0x7fc00000u, 0x7f800001u, 0x7fffffffu}) {
      for (const bool saturate : {false, true}) {
        CHECK_EQ(from_float(e.dtype, number::float_of(nan), saturate), e.nan);
        CHECK_EQ(from_float(e.dtype, number::float_of(nan | number::kSign), saturate), sign | e.nan);
      }
    }
  }
  CHECK_EQ(from_float(Dtype::kInt8, kNan, false), 0u);
  CHECK_EQ(from_float(Dtype::kInt8, 0.5f, false), 0u);
  CHECK_EQ(from_float(Dtype::kInt8, 1.5f, false), 2u);
  CHECK_EQ(from_float(Dtype::kInt8, -2.5f, false), 0xfeu);
  CHECK_EQ(from_float(Dtype::kInt8, kInf, false), 0x7fu);
  CHECK_EQ(from_float(Dtype::kInt8, -kInf, true), 0x80u);
  CHECK_EQ(from_float(Dtype::kF32, kInf, false), 0x7f800000u);
  CHECK_EQ(from_float(Dtype::kF32, -kInf, true), 0xff7fffffu);
}

// A function that is not inlined: clang would turn a missing scale into a multiplication by 1, which changes
// a NaN's bits.
[[gnu::noinline]] float scaled(float x, const Scaling& scaling) {
  if (!scaling.has_src && !scaling.has_dst) return x;
  return (scaling.has_src ? x * scaling.src : x) / (scaling.has_dst ? scaling.dst : 1);
}

TEST(convert_run_is_the_definition_for_every_element_and_kernel) {
  check::Random random(check::seed());
  const std::vector<Scaling> all_scalings = scalings(random);
  for (const std::string_view kernel : {"scalar", "avx2", "avx512"}) {
    const WithKernel with(kernel);
    if (!with.there()) continue;
    CHECK_EQ(convert_kernel_name(), kernel);
    for (const Dtype from : kNumbers) {
      const std::vector<std::uint32_t> patterns = all_patterns(from, random);
      const std::vector<std::byte> src = elements_of(from, patterns);
      for (const Dtype to : kNumbers) {
        std::vector<std::byte> dst(patterns.size() * itemsize(to));
        for (const Scaling& scaling : all_scalings) {
          convert_run(from, src.data(), to, dst.data(), patterns.size(), scaling);
          std::size_t num_wrong = 0;
          for (std::size_t i = 0; i < patterns.size(); ++i) {
            const float x = scaled(to_float(from, patterns[i]), scaling);
            std::uint32_t expected = from_float(to, x, scaling.saturate);
            std::uint32_t found = element_at(dst, to, i);
            if (from == to && !scaling.has_src && !scaling.has_dst && !scaling.saturate)
              expected = patterns[i];
            // If a scale is NaN, the compiler chooses which of two NaNs a multiplication returns.
            if (std::isnan(scaling.src) || std::isnan(scaling.dst)) {
              CHECK_EQ(std::isnan(to_float(to, found)), to != Dtype::kInt8);
              if (std::isnan(to_float(from, patterns[i])) || to == Dtype::kF32) continue;
              expected &= ~(1u << (8 * itemsize(to) - 1));
              found &= ~(1u << (8 * itemsize(to) - 1));
            }
            if (found == expected) continue;
            if (++num_wrong > 3) break;
            FAIL(std::string(kernel) + ", " + name_of(from) + " to " + name_of(to) + ", bits " +
                 std::to_string(patterns[i]) + ", scales " + std::to_string(scaling.src) + " and " +
                 std::to_string(scaling.dst) + ": " + std::to_string(found) + " in place of " +
                 std::to_string(expected));
          }
        }
      }
    }
  }
}

// Counts the differences between the kernels, with a message for the first.
std::size_t num_differences(Dtype from, Dtype to, const std::vector<std::uint32_t>& patterns,
                            const Scaling& scaling) {
  const std::vector<std::byte> src = elements_of(from, patterns);
  std::vector<std::byte> best(patterns.size() * itemsize(to)), scalar(best.size());
  convert_run(from, src.data(), to, best.data(), patterns.size(), scaling);
  {
    const WithKernel with("scalar");
    convert_run(from, src.data(), to, scalar.data(), patterns.size(), scaling);
  }
  std::size_t num = 0;
  for (std::size_t i = 0; best != scalar && i < patterns.size(); ++i) {
    if (element_at(best, to, i) == element_at(scalar, to, i) || ++num > 1) continue;
    FAIL(std::string(name_of(from)) + " to " + name_of(to) + ", bits " + std::to_string(patterns[i]) +
         " over bits " + std::to_string(number::bits_of(scaling.dst)) + ": " +
         std::to_string(element_at(best, to, i)) + " in place of " +
         std::to_string(element_at(scalar, to, i)));
  }
  return num;
}

TEST(no_inverse_of_a_scale_is_told_from_a_division) {
  check::Random random(check::seed());
  const std::vector<float> scales = hard_scales(random, 60);
  for (const Dtype from : {Dtype::kBf16, Dtype::kF16}) {
    const std::vector<std::uint32_t> patterns = all_patterns(from, random);
    for (std::size_t i = 0; i < scales.size(); ++i)
      for (const Dtype to : kNarrow) {
        const Scaling scaling{.dst = scales[i], .has_dst = true, .saturate = i % 2 == 0};
        CHECK_EQ(num_differences(from, to, patterns, scaling), 0u);
      }
  }
}

TEST(a_float32_beside_a_tie_falls_on_the_side_that_division_gives) {
  check::Random random(check::seed());
  for (const float scale : hard_scales(random, 300)) {
    std::vector<std::uint32_t> patterns = {0, number::kInfinity, 0x7fc00001, 0x7f7fffff, 0x00800000,
                                           1, 0x33333333};
    for (std::uint32_t tie = 1; tie < 512; ++tie)
      for (const float unit : {0x1p-10f, 0x1p-17f, 0.5f, 1.0f, 64.0f}) {
        const std::uint32_t near = number::bits_of(std::abs(scale) * (static_cast<float>(tie) * unit));
        for (std::uint32_t pattern = near - 3; pattern != near + 4; ++pattern) patterns.push_back(pattern);
      }
    const std::size_t num_positive = patterns.size();
    for (std::size_t i = 0; i < num_positive; ++i) patterns.push_back(patterns[i] ^ number::kSign);
    for (const Dtype to : kNarrow)
      CHECK_EQ(num_differences(Dtype::kF32, to, patterns, {.dst = scale, .has_dst = true}), 0u);
  }
}

TEST(what_memory_is_told_changes_no_result) {
  check::Random random(check::seed());
  constexpr std::size_t kCount = 3 * Traffic::kAheadNbytes;
  std::vector<std::byte> src(kCount * 4 + 64), plain(kCount * 4), memory(kCount * 4 + 128);
  random.fill(src.data(), src.size());
  auto* dst = memory.data() + -reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
  const Scaling scaling{.dst = 0.7f, .has_dst = true};
  for (const Dtype from : kNumbers)
    for (const Dtype to : kNumbers)
      for (const std::size_t count :
           {std::size_t{1}, std::size_t{64}, std::size_t{128}, std::size_t{200}, kCount})
        for (const std::size_t at : {std::size_t{0}, std::size_t{4}, std::size_t{32}}) {
          convert_run(from, src.data(), to, plain.data(), count, scaling);
          std::fill(memory.begin(), memory.end(), kUntouched);
          convert_run(from, src.data(), to, dst + at, count, scaling,
                      {.next = src.data() + 64, .stream = true});
          CHECK(std::memcmp(dst + at, plain.data(), count * itemsize(to)) == 0);
          CHECK_EQ(dst[at + count * itemsize(to)], kUntouched);
        }
}

TEST(convert_run_touches_exactly_its_elements_at_any_alignment) {
  check::Random random(check::seed());
  std::vector<std::byte> src(2048), dst(2048), whole(2048);
  for (const std::string_view kernel : {"scalar", "avx2", "avx512"}) {
    const WithKernel with(kernel);
    if (!with.there()) continue;
    for (const Dtype from : kNumbers) {
      for (const Dtype to : kNumbers) {
        for (int round = 0; round < 120; ++round) {
          const std::size_t count = static_cast<std::size_t>(round);
          const std::size_t at_src = random.below(40), at_dst = random.below(40);
          random.fill(src.data(), src.size());
          Scaling scaling{
              .src = 0.7f, .dst = 1.3f, .has_src = random.chance(50), .has_dst = random.chance(50)};
          // Allocated exactly, so that a sanitizer sees a read beyond the end.
          const std::vector<std::byte> exact(
              src.begin() + static_cast<std::ptrdiff_t>(at_src),
              src.begin() + static_cast<std::ptrdiff_t>(at_src + count * itemsize(from)));
          std::fill(dst.begin(), dst.end(), kUntouched);
          convert_run(from, exact.data(), to, dst.data() + at_dst, count, scaling);
          convert_run(from, src.data() + at_src, to, whole.data(), 128, scaling);
          const std::size_t nbytes = count * itemsize(to);
          CHECK(std::memcmp(dst.data() + at_dst, whole.data(), nbytes) == 0);
          const auto untouched = [](std::byte byte) { return byte == kUntouched; };
          const auto end = dst.begin() + static_cast<std::ptrdiff_t>(at_dst + nbytes);
          CHECK(std::all_of(dst.begin(), dst.begin() + static_cast<std::ptrdiff_t>(at_dst), untouched));
          CHECK(std::all_of(end, dst.end(), untouched));
        }
      }
    }
  }
}

TEST(bytes_and_unscaled_elements_of_one_dtype_are_copied) {
  check::Random random(check::seed());
  std::vector<std::byte> src(400), dst(400);
  random.fill(src.data(), src.size());
  for (const Dtype dtype : kNumbers) {
    std::fill(dst.begin(), dst.end(), kUntouched);
    convert_run(dtype, src.data(), dtype, dst.data(), 99, {});
    CHECK(std::memcmp(dst.data(), src.data(), 99 * itemsize(dtype)) == 0);
    CHECK_EQ(dst[99 * itemsize(dtype)], kUntouched);
  }
  std::fill(dst.begin(), dst.end(), kUntouched);
  convert_run(Dtype::kBytes, src.data(), Dtype::kBytes, dst.data(), 99, {});
  CHECK(std::memcmp(dst.data(), src.data(), 99) == 0);
  CHECK_EQ(dst[99], kUntouched);
}

TEST(amax_is_the_largest_finite_magnitude) {
  check::Random random(check::seed());
  for (const std::string_view kernel : {"scalar", "avx2", "avx512"}) {
    const WithKernel with(kernel);
    if (!with.there()) continue;
    for (const Dtype dtype : kNumbers) {
      for (const Scaling& scaling : {Scaling{}, Scaling{.src = 0.37f, .has_src = true},
                                     Scaling{.src = 1e30f, .dst = 7, .has_src = true}}) {
        for (int round = 0; round < 300; ++round) {
          std::vector<std::uint32_t> patterns(static_cast<std::size_t>(round));
          for (std::uint32_t& bits : patterns) bits = static_cast<std::uint32_t>(random.next());
          const std::vector<std::byte> elements = elements_of(dtype, patterns);
          float expected = 0;
          for (const std::uint32_t bits : patterns) {
            const float x = std::abs(to_float(dtype, bits) * scaling.src);
            if (std::isfinite(x)) expected = std::max(expected, x);
          }
          CHECK_EQ(number::bits_of(amax_run(dtype, elements.data(), patterns.size(), scaling)),
                   number::bits_of(expected));
        }
      }
    }
  }
  CHECK_EQ(amax_run(Dtype::kBf16, nullptr, 0, {}), 0.0f);
}

TEST(a_page_scale_puts_the_largest_magnitude_on_the_largest_number) {
  check::Random random(check::seed());
  for (const Dtype to : kNarrow) {
    CHECK_EQ(scale_for(to, 0), 1.0f);
    CHECK_EQ(scale_for(to, largest(to)), 1.0f);
    CHECK_EQ(scale_for(to, 2 * largest(to)), 2.0f);
    for (int i = 0; i < 20000; ++i) {
      const float amax = number::float_of(static_cast<std::uint32_t>(random.below(0x7f800000)));
      const std::uint32_t code = from_float(to, amax / scale_for(to, amax), false);
      CHECK(to_float(to, code) <= largest(to));  // no overflow: NaN and infinity are not
      if (amax > 1e-30f) CHECK_EQ(to_float(to, code), largest(to));
    }
  }
  CHECK_EQ(scale_for(Dtype::kBf16, 3), 1.0f);
}

TEST(only_a_kernel_that_is_there_is_taken) {
  const std::string best(convert_kernel_name());
  CHECK(!best.empty());
  CHECK(!use_convert_kernel("abacus"));
  CHECK_EQ(convert_kernel_name(), best);
  CHECK(use_convert_kernel("scalar"));
  CHECK_EQ(convert_kernel_name(), "scalar");
  CHECK(use_convert_kernel(""));
  CHECK_EQ(convert_kernel_name(), best);
}

}  // namespace
