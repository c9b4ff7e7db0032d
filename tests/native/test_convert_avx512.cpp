// Compares the AVX-512 kernel with the portable one, bit for bit. Where the processor has no AVX-512, the
// kernel's source is compiled against emulated intrinsics (emulated/core/copy/avx512.h). Where it has, both
// builds are compared.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "check.h"
#include "convert_samples.h"
#include "core/copy/convert_kernel.h"

namespace kvxfer {
// avx512_convert_kernel() of the emulated source; null if this machine lacks what the emulation uses.
const ConvertKernel* emulated_avx512_convert_kernel() noexcept;
}  // namespace kvxfer

namespace {

using namespace convert_samples;

struct Tested {
  const char* name;
  const ConvertKernel* kernel;
};

const std::vector<Tested>& tested() {
  static const std::vector<Tested> all = [] {
    std::vector<Tested> there;
    if (const ConvertKernel* real = avx512_convert_kernel()) there.push_back({"avx512", real});
#if defined(KVXFER_EMULATED_AVX512)
    if (const ConvertKernel* emulated = emulated_avx512_convert_kernel())
      there.push_back({"avx512, emulated", emulated});
#endif
    return there;
  }();
  return all;
}

void convert_by(const ConvertKernel& kernel, Dtype from, const std::byte* src, Dtype to, std::byte* dst,
                std::size_t count, const Scaling& scaling, const Traffic& traffic = {}) {
  kernel.convert[index_of(from)][index_of(to)](src, dst, count, scaling, traffic);
}

void convert_portably(Dtype from, const std::byte* src, Dtype to, std::byte* dst, std::size_t count,
                      const Scaling& scaling) {
  const WithKernel with("scalar");
  convert_run(from, src, to, dst, count, scaling);
}

// Whether convert_run() copies these without a kernel.
bool is_copied(Dtype from, Dtype to, const Scaling& scaling) {
  return from == to && !scaling.has_src && !scaling.has_dst && !scaling.saturate;
}

// If a scale is NaN, the compiler chooses which of two NaNs a multiplication returns.
bool are_same_nan(Dtype to, std::uint32_t a, std::uint32_t b, const Scaling& scaling) {
  if (!std::isnan(scaling.src) && !std::isnan(scaling.dst)) return false;
  return to == Dtype::kInt8 ? a == b : std::isnan(to_float(to, a)) && std::isnan(to_float(to, b));
}

void require_same(Dtype from, const std::vector<std::uint32_t>& patterns, const Scaling& scaling,
                  std::string_view state = "") {
  const std::vector<std::byte> src = elements_of(from, patterns);
  for (const Dtype to : kNumbers) {
    if (is_copied(from, to, scaling)) continue;
    const std::size_t nbytes = patterns.size() * itemsize(to);
    std::vector<std::byte> expected(nbytes + 64, kUntouched), found(expected);
    convert_portably(from, src.data(), to, expected.data(), patterns.size(), scaling);
    for (const Tested& it : tested()) {
      convert_by(*it.kernel, from, src.data(), to, found.data(), patterns.size(), scaling);
      if (found == expected) continue;
      CHECK(std::equal(found.begin() + static_cast<std::ptrdiff_t>(nbytes), found.end(),
                       expected.begin() + static_cast<std::ptrdiff_t>(nbytes)));
      int num_wrong = 0;
      for (std::size_t i = 0; i < patterns.size() && num_wrong < 3; ++i) {
        const std::uint32_t is = element_at(found, to, i), should = element_at(expected, to, i);
        if (is == should || are_same_nan(to, is, should, scaling)) continue;
        ++num_wrong;
        char text[240];
        std::snprintf(text, sizeof text,
                      "%s%s, %s to %s, bits %#x, scales %a (%d) and %a (%d)%s: %#x, not %#x", it.name,
                      std::string(state).c_str(), name_of(from), name_of(to), patterns[i],
                      static_cast<double>(scaling.src), scaling.has_src, static_cast<double>(scaling.dst),
                      scaling.has_dst, scaling.saturate ? ", saturated" : "", is, should);
        FAIL(text);
      }
    }
  }
}

// Every tie between neighbours of every dtype, and the values beside it; also infinities and NaNs.
std::vector<std::uint32_t> rounding_boundaries() {
  std::vector<std::uint32_t> bits = {0,          1,          0x007fffff, 0x00800000, 0x7f7fffff, 0x7f800000,
                                     0x7f800001, 0x7f8fffff, 0x7fbfffff, 0x7fc00000, 0x7fc00001, 0x7fffffff};
  const auto with_neighbours = [&bits](float middle) {
    const std::uint32_t at = number::bits_of(middle);
    for (std::uint32_t pattern = at > 0 ? at - 1 : 0; pattern <= at + 1; ++pattern) bits.push_back(pattern);
  };
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kE4m3, Dtype::kE5m2}) {
    const FloatFormat format = float_format(dtype);
    for (std::uint32_t code = 0; code < format.largest; ++code) {
      const double here = to_float(dtype, code), next = to_float(dtype, code + 1);
      with_neighbours(static_cast<float>(here));
      with_neighbours(static_cast<float>((here + next) / 2));
    }
    const double last = to_float(dtype, format.largest), before = to_float(dtype, format.largest - 1);
    with_neighbours(static_cast<float>(last));
    with_neighbours(static_cast<float>(last + (last - before) / 2));  // where overflow begins
    with_neighbours(static_cast<float>(std::min(last + (last - before), 0x1.fffffep127)));
  }
  for (int half = 0; half < 260; ++half) with_neighbours(static_cast<float>(half) + 0.5f);
  for (const float beyond : {0x1p31f, 0x1p32f, 0x1p63f}) with_neighbours(beyond);
  const std::size_t num_positive = bits.size();
  for (std::size_t i = 0; i < num_positive; ++i) bits.push_back(bits[i] ^ number::kSign);
  return bits;
}

std::vector<std::uint32_t> every_pattern(Dtype dtype, check::Random& random) {
  return dtype == Dtype::kF32 ? rounding_boundaries() : all_patterns(dtype, random);
}

// A power of two, an ordinary scale, or any bits, a third each.
float any_scale(check::Random& random) {
  const auto bits = static_cast<std::uint32_t>(random.next());
  if (bits % 3 == 0) return std::ldexp(1.0f, static_cast<int>(random.below(276)) - 149);
  if (bits % 3 == 1)
    return std::ldexp(1.0f + static_cast<float>(bits >> 9) * 0x1p-23f,
                      5 - static_cast<int>(random.below(12)));
  return number::float_of(static_cast<std::uint32_t>(random.next()));
}

Scaling any_scaling(check::Random& random) {
  return {.src = any_scale(random),
          .dst = any_scale(random),
          .has_src = random.chance(40),
          .has_dst = random.chance(60),
          .saturate = random.chance(50)};
}

TEST(every_number_becomes_what_the_portable_kernel_makes_of_it) {
  check::Random random(check::seed());
  std::vector<Scaling> all = scalings(random);
  for (const float scale : {0x1p-149f, 1e-38f, 0x1p-60f, 0x1p60f, 3e38f, -0.0f, -2.0f, -kInf, -kNan})
    for (const bool saturate : {false, true}) {
      all.push_back({.dst = scale, .has_dst = true, .saturate = saturate});
      all.push_back({.src = scale, .has_src = true, .saturate = saturate});
      all.push_back({.src = 0.7f, .dst = scale, .has_src = true, .has_dst = true, .saturate = saturate});
    }
  for (const Dtype from : kNumbers) {
    const std::vector<std::uint32_t> patterns = every_pattern(from, random);
    for (const Scaling& scaling : all) require_same(from, patterns, scaling);
  }
}

TEST(random_float32_under_random_scales_become_the_same_bits) {
  check::Random random(check::seed());
  std::vector<std::uint32_t> patterns(1 << 14);
  for (int round = 0; round < 256; ++round) {  // 4 M
    for (std::uint32_t& bits : patterns) {
      bits = static_cast<std::uint32_t>(random.next());
      // Half of them in the range of 8-bit numbers, or next to a tie of one.
      if (bits % 2 != 0)
        bits = (bits & 0x807fffff) | static_cast<std::uint32_t>(random.between(105, 147)) << 23;
      if (bits % 8 == 1) bits = (bits & 0xfff80000) + static_cast<std::uint32_t>(random.below(5)) - 2;
    }
    require_same(Dtype::kF32, patterns,
                 round % 8 == 0 ? Scaling{.saturate = round % 16 == 0} : any_scaling(random));
  }
}

TEST(sixteen_bit_elements_under_random_scales_become_the_same_bits) {
  check::Random random(check::seed());
  for (const Dtype from : {Dtype::kBf16, Dtype::kF16}) {
    const std::vector<std::uint32_t> patterns = all_patterns(from, random);
    for (int round = 0; round < 60; ++round) require_same(from, patterns, any_scaling(random));
    for (const float scale : hard_scales(random, 20))
      if (random.chance(10))
        require_same(from, patterns, {.dst = scale, .has_dst = true, .saturate = random.chance(50)});
  }
}

#if defined(__x86_64__)
// A program may have told the processor to take subnormal numbers for zero (an engine does, for speed).
// Conversions without scales do not change by that.
TEST(a_processor_that_takes_subnormals_for_zero_converts_alike) {
  check::Random random(check::seed());
  constexpr unsigned kFlushAndDaz = 0x8040;
  for (const Dtype from : kNumbers) {
    const std::vector<std::uint32_t> patterns = every_pattern(from, random);
    const std::vector<std::byte> src = elements_of(from, patterns);
    for (const Dtype to : kNumbers) {
      if (from == to) continue;
      std::vector<std::byte> expected(patterns.size() * itemsize(to)), found(expected.size());
      convert_portably(from, src.data(), to, expected.data(), patterns.size(), {});
      for (const Tested& it : tested()) {
        const unsigned before = _mm_getcsr();
        _mm_setcsr(before | kFlushAndDaz);
        convert_by(*it.kernel, from, src.data(), to, found.data(), patterns.size(), {});
        _mm_setcsr(before);
        for (std::size_t i = 0, num = 0; found != expected && i < patterns.size() && num < 3; ++i)
          if (element_at(found, to, i) != element_at(expected, to, i)) {
            ++num;
            FAIL(std::string(it.name) + ", " + name_of(from) + " to " + name_of(to) + ", bits " +
                 std::to_string(patterns[i]) + ": " + std::to_string(element_at(found, to, i)) + ", not " +
                 std::to_string(element_at(expected, to, i)));
          }
      }
    }
  }
}
#endif

// Memory between two pages that may not be accessed.
class Fenced {
 public:
  explicit Fenced(std::size_t nbytes) : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
    nbytes_ = (nbytes + page_ - 1) / page_ * page_;
    void* at = mmap(nullptr, nbytes_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(at != MAP_FAILED);
    begin_ = static_cast<std::byte*>(at) + page_;
    REQUIRE_EQ(mprotect(begin_, nbytes_, PROT_READ | PROT_WRITE), 0);
  }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;
  ~Fenced() { munmap(begin_ - page_, nbytes_ + 2 * page_); }
  std::byte* begin() const { return begin_; }
  std::byte* end() const { return begin_ + nbytes_; }

 private:
  std::size_t page_, nbytes_;
  std::byte* begin_;
};

TEST(a_run_of_any_length_touches_its_own_bytes_alone) {
  check::Random random(check::seed());
  const Fenced src(4096), dst(4096);
  std::vector<std::byte> expected(4 * 200);
  for (const Tested& it : tested())
    for (const Dtype from : kNumbers)
      for (const Dtype to : kNumbers)
        for (std::size_t count = 0; count <= 130; ++count)
          for (const bool at_end : {false, true}) {
            const std::size_t from_nbytes = count * itemsize(from), to_nbytes = count * itemsize(to);
            // At the edge of the memory; or anywhere, every other time aligned to a cache line, where stores
            // may bypass the cache.
            const std::size_t shift = random.chance(50) ? 64 : random.below(130);
            std::byte* in = at_end ? src.end() - from_nbytes : src.begin() + random.below(130);
            std::byte* out = at_end && random.chance(50) ? dst.end() - to_nbytes : dst.begin() + shift;
            random.fill(in, from_nbytes);
            const Scaling scaling{.src = 0.7f,
                                  .dst = 1.3f,
                                  .has_src = random.chance(50),
                                  .has_dst = random.chance(50),
                                  .saturate = true};
            convert_portably(from, in, to, expected.data(), count, scaling);
            std::fill(dst.begin(), dst.end(), kUntouched);
            convert_by(*it.kernel, from, in, to, out, count, scaling,
                       {.next = in, .stream = random.chance(50)});
            CHECK(std::equal(out, out + to_nbytes, expected.begin()));
            const auto untouched = [](std::byte byte) { return byte == kUntouched; };
            CHECK(std::all_of(dst.begin(), out, untouched));
            CHECK(std::all_of(out + to_nbytes, dst.end(), untouched));
          }
}

TEST(long_runs_are_the_same_whatever_memory_is_told) {
  check::Random random(check::seed());
  constexpr std::size_t kCount = 3 * Traffic::kAheadNbytes;
  std::vector<std::byte> src(kCount * 4), expected(kCount * 4);
  const Fenced dst(kCount * 4 + 128);
  random.fill(src.data(), src.size());
  const Scaling scaling{.dst = 0.7f, .has_dst = true, .saturate = true};
  for (const Tested& it : tested())
    for (const Dtype from : kNumbers)
      for (const Dtype to : kNumbers)
        for (const std::size_t count :
             {std::size_t{64}, std::size_t{192}, std::size_t{200}, kCount - 32, kCount})
          for (const std::size_t at : {std::size_t{0}, std::size_t{4}, std::size_t{32}, std::size_t{64}})
            for (const std::byte* next : std::initializer_list<const std::byte*>{nullptr, src.data() + 64}) {
              convert_portably(from, src.data(), to, expected.data(), count, scaling);
              std::fill(dst.begin(), dst.end(), kUntouched);
              convert_by(*it.kernel, from, src.data(), to, dst.begin() + at, count, scaling,
                         {.next = next, .stream = true});
              CHECK(std::memcmp(dst.begin() + at, expected.data(), count * itemsize(to)) == 0);
              CHECK_EQ(dst.begin()[at + count * itemsize(to)], kUntouched);
            }
}

TEST(amax_is_the_portable_kernels) {
  check::Random random(check::seed());
  const Fenced src(8192);
  for (const Tested& it : tested())
    for (const Dtype dtype : kNumbers)
      for (const float scale : {1.0f, 0.37f, -3.0f, 1e30f, 1e-40f, 0.0f, kInf, kNan})
        for (std::size_t count = 0; count <= 260; ++count) {
          std::byte* in =
              random.chance(50) ? src.end() - count * itemsize(dtype) : src.begin() + random.below(64);
          random.fill(in, count * itemsize(dtype));
          const WithKernel with("scalar");
          const float expected = amax_run(dtype, in, count, {.src = scale, .has_src = true});
          CHECK_EQ(number::bits_of(it.kernel->amax[index_of(dtype)](in, count, scale)),
                   number::bits_of(expected));
        }
}

TEST(amax_finds_the_largest_wherever_it_lies) {
  for (const Tested& it : tested())
    for (std::size_t count = 1; count <= 130; ++count)
      for (std::size_t at = 0; at < count; ++at) {
        std::vector<std::uint32_t> patterns(count, number::bits_of(1.0f));
        patterns[at] = number::bits_of(-2.0f);
        patterns[(at + 1) % count] |= at % 2 != 0 && count > 1 ? number::kInfinity : 0;
        const std::vector<std::byte> elements = elements_of(Dtype::kF32, patterns);
        CHECK_EQ(it.kernel->amax[index_of(Dtype::kF32)](elements.data(), count, 1), 2.0f);
      }
}

TEST(the_real_kernel_is_taken_where_the_processor_runs_it_and_refused_elsewhere) {
  const bool there = avx512_convert_kernel() != nullptr;
  const WithKernel with("avx512");
  CHECK_EQ(with.there(), there);
  CHECK_EQ(convert_kernel_name() == "avx512", there);
}

}  // namespace

SKIP_FILE_FOR([] {
  for (const Tested& it : tested()) std::printf("tested: %s\n", it.name);
  return std::string(
      tested().empty()
          ? "this processor has no AVX-512, and nothing emulates it (Debian's libsimde-dev, AVX2)"
          : "");
});
