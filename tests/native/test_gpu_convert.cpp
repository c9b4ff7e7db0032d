// The GPU's conversions, run by threads (emulated/cuda_threads.h), with instructions that behave as the PTX
// ISA says (emulated/gpu/rounding.cuh): their results equal the processor's bit for bit.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "check.h"
#include "convert_samples.h"
#include "core/copy/executor.h"
#include "cuda_threads.h"
#include "gpu/convert.cuh"
#include "gpu/make_job.h"
#include "gpu_memory.h"
#include "program_samples.h"

extern "C" void kvxfer_convert(kvxfer::gpu::CopyJob job, kvxfer::gpu::ConvertJob conversions);

namespace {

using namespace convert_samples;
using namespace gpu_memory;
using namespace program_samples;
using gpu::ConvertJob;
using gpu::CopyJob;
using gpu::Factors;
using gpu::kAtomElements;
using gpu::Launch;
using gpu::Team;

// ---- elements ----

Conversion conversion_of(Dtype from, Dtype to, const Scaling& scaling) {
  Conversion out{};
  out.src_dtype = from;
  out.dst_dtype = to;
  out.src_scales = scaling.has_src ? ScalePlace::kProgram : ScalePlace::kNone;
  out.dst_scales = scaling.has_dst ? ScalePlace::kProgram : ScalePlace::kNone;
  out.saturate = scaling.saturate ? 1 : 0;
  return out;
}

gpu::Run run_of(const Scaling& scaling) {
  gpu::Run run{};
  run.src_scale = scaling.has_src ? scaling.src : 1;
  run.dst_scale = scaling.has_dst ? scaling.dst : 1;
  return run;
}

// The processor's conversion of elements, for comparison with another.
class Expected {
 public:
  Expected(Dtype from, Dtype to, const Scaling& scaling, std::vector<std::uint32_t> patterns)
      : from_(from), to_(to), scaling_(scaling), patterns_(std::move(patterns)) {
    const std::vector<std::byte> src = elements_of(from, patterns_);
    expected_.resize(patterns_.size() * itemsize(to));
    convert_run(from, src.data(), to, expected_.data(), patterns_.size(), scaling);
  }

  const std::vector<std::uint32_t>& patterns() const { return patterns_; }

  // Prints the first few that differ.
  void check(std::size_t index, std::uint32_t found) {
    std::uint32_t expected = element_at(expected_, to_, index);
    // If a scale is NaN, the processor chooses which of two NaNs a multiplication returns.
    if (std::isnan(scaling_.src) || std::isnan(scaling_.dst)) {
      CHECK_EQ(std::isnan(to_float(to_, found)), to_ != Dtype::kInt8);
      if (std::isnan(to_float(from_, patterns_[index])) || to_ == Dtype::kF32) return;
      expected &= ~(1u << (8 * itemsize(to_) - 1));
      found &= ~(1u << (8 * itemsize(to_) - 1));
    }
    if (found == expected || ++num_wrong_ > 3) return;
    FAIL(std::string(name_of(from_)) + " to " + name_of(to_) + ", bits " + std::to_string(patterns_[index]) +
         ", scales " + std::to_string(scaling_.src) + " and " + std::to_string(scaling_.dst) +
         (scaling_.saturate ? ", saturated: " : ": ") + std::to_string(found) + " in place of " +
         std::to_string(expected));
  }

 private:
  const Dtype from_, to_;
  const Scaling scaling_;
  const std::vector<std::uint32_t> patterns_;
  std::vector<std::byte> expected_;
  std::size_t num_wrong_ = 0;
};

std::vector<std::uint32_t> some_patterns(Dtype dtype, check::Random& random, std::size_t most) {
  std::vector<std::uint32_t> patterns = all_patterns(dtype, random);
  random.shuffle(patterns);
  patterns.resize(std::min(patterns.size(), most));
  return patterns;
}

TEST(an_element_by_itself_becomes_what_the_processor_makes_of_it) {
  check::Random random(check::seed());
  const std::vector<Scaling> all_scalings = scalings(random);
  for (const Dtype from : kNumbers) {
    const std::vector<std::uint32_t> patterns = some_patterns(from, random, 5000);
    for (const Dtype to : kNumbers)
      for (const Scaling& scaling : all_scalings) {
        Expected expected(from, to, scaling, patterns);
        const Conversion conversion = conversion_of(from, to, scaling);
        const gpu::Run run = run_of(scaling);
        for (std::size_t i = 0; i < patterns.size(); ++i)
          expected.check(i, gpu::converted(patterns[i], conversion, run));
      }
  }
}

template <class Vector>
Vector vector_at(const std::vector<std::byte>& elements, std::size_t index) {
  Vector vector;
  std::memcpy(&vector, elements.data() + index * sizeof vector, sizeof vector);
  return vector;
}

// Every vector that reports a valid result has to be right. Returns how many do.
template <Dtype kFrom, Dtype kTo>
std::size_t check_vectors(const Scaling& scaling, const std::vector<std::uint32_t>& patterns) {
  Expected expected(kFrom, kTo, scaling, patterns);
  const std::vector<std::byte> src = elements_of(kFrom, patterns);
  const gpu::Run run = run_of(scaling);
  const Factors factors = gpu::factors_of(conversion_of(kFrom, kTo, scaling), run.src_scale, run.dst_scale);
  std::size_t num_right = 0;
  for (std::size_t k = 0; k < patterns.size() / kAtomElements; ++k) {
    gpu::Vector<kTo> to;
    if (!gpu::convert_vector<kFrom, kTo>(vector_at<gpu::Vector<kFrom>>(src, k), factors, scaling.saturate,
                                         to))
      continue;
    ++num_right;
    std::vector<std::byte> dst(sizeof to);
    std::memcpy(dst.data(), &to, sizeof to);
    for (std::size_t e = 0; e < kAtomElements; ++e)
      expected.check(k * kAtomElements + e, element_at(dst, kTo, e));
  }
  return num_right;
}

// Calls visit for the pairs of dtypes that the kernel has vectors for.
template <class Visit>
void for_each_vector_pair(Visit&& visit) {
  const auto both = [&]<Dtype kWide, Dtype kNarrow>() {
    visit.template operator()<kWide, kNarrow>();
    visit.template operator()<kNarrow, kWide>();
  };
  const auto all = [&]<Dtype kWide>() {
    both.template operator()<kWide, Dtype::kE4m3>();
    both.template operator()<kWide, Dtype::kE5m2>();
    both.template operator()<kWide, Dtype::kInt8>();
  };
  all.template operator()<Dtype::kBf16>();
  all.template operator()<Dtype::kF16>();
}

TEST(every_vector_that_is_right_is_what_the_processor_makes_of_it) {
  check::Random random(check::seed());
  std::vector<Scaling> all_scalings = scalings(random);
  std::vector<float> hard = hard_scales(random, 30);
  random.shuffle(hard);
  hard.resize(100);
  for (const float scale : hard)
    all_scalings.push_back({.dst = scale, .has_dst = true, .saturate = random.chance(50)});
  for_each_vector_pair([&]<Dtype kFrom, Dtype kTo>() {
    std::vector<std::uint32_t> patterns = all_patterns(kFrom, random);  // neighbours, which are alike
    for (const Scaling& scaling : all_scalings) {
      // From one byte to two, vectors handle only the source's scale.
      if (itemsize(kFrom) == 1 && scaling.has_dst && !scaling.has_src && !scaling.saturate) {
        check_vectors<kFrom, kTo>({.src = scaling.dst, .has_src = true}, patterns);
        continue;
      }
      check_vectors<kFrom, kTo>(scaling, patterns);
    }
    random.shuffle(patterns);  // different values side by side
    for (int i = 0; i < 8; ++i)
      check_vectors<kFrom, kTo>(all_scalings[random.below(all_scalings.size())], patterns);
  });
}

TEST(numbers_that_caches_have_are_converted_in_vectors) {
  check::Random random(check::seed());
  for_each_vector_pair([&]<Dtype kFrom, Dtype kTo>() {
    for (int round = 0; round < 200; ++round) {
      const float scale = std::ldexp(1 + static_cast<float>(random.below(1024)) / 1024, -3);
      const bool saturate = random.chance(50) && kTo != Dtype::kF16;
      std::vector<std::uint32_t> patterns(512);
      for (std::uint32_t& bits : patterns)
        bits = from_float(kFrom, (static_cast<float>(random.below(2001)) - 1000) / 1000 * 440 * scale, true);
      const Scaling scaling = itemsize(kFrom) == 2
                                  ? Scaling{.dst = scale, .has_dst = true, .saturate = saturate}
                                  : Scaling{.src = scale, .has_src = true, .saturate = saturate};
      const std::size_t num_right = check_vectors<kFrom, kTo>(scaling, patterns);
      const std::uint32_t distance = number::bits_of(scale) & 0x1ffff;
      const bool is_hard = distance != 0 && (distance <= 64 || distance >= 0x20000 - 64);
      if (itemsize(kFrom) == 1 || !is_hard) CHECK_EQ(num_right, patterns.size() / kAtomElements);
    }
  });
}

TEST(amax_of_a_vector_is_that_of_its_elements) {
  check::Random random(check::seed());
  const auto check_amax = [&]<Dtype kFrom>() {
    for (int round = 0; round < 20000; ++round) {
      const std::uint32_t mask = random.chance(70) ? 0xbfffbfff : 0xffffffff;  // without large exponents
      uint4 vector{};
      for (unsigned* word : {&vector.x, &vector.y, &vector.z, &vector.w})
        if (random.chance(90)) *word = static_cast<std::uint32_t>(random.next()) & mask;
      const float scale = random.chance(10) ? 0x1p120f : random.chance(50) ? -0.37f : 1.0f;
      std::byte bytes[sizeof vector];
      std::memcpy(bytes, &vector, sizeof vector);
      const float expected = amax_run(kFrom, bytes, kAtomElements, {.src = scale, .has_src = true});
      std::uint32_t found = 0;
      if (gpu::amax_of_vector<kFrom>(vector, scale, found))
        CHECK_EQ(found, number::bits_of(expected));
      else
        CHECK(mask == 0xffffffff || scale == 0x1p120f);
    }
  };
  check_amax.operator()<Dtype::kBf16>();
  check_amax.operator()<Dtype::kF16>();
  for (const Dtype to : kNumbers)
    for (int i = 0; i < 20000; ++i) {
      const auto bits = static_cast<std::uint32_t>(random.below(number::kInfinity));
      const float amax = i == 0 ? 0 : number::float_of(bits);
      CHECK_EQ(number::bits_of(gpu::scale_for(to, number::bits_of(amax))),
               number::bits_of(scale_for(to, amax)));
    }
}

// ---- programs ----

struct Grid { unsigned num_ctas = 1, num_warps = 1; };

// The kinds of launches that a program led to.
struct Seen { bool by_cta = false, in_vectors = false, by_elements = false; };

// Runs the whole move by the kernel, and compares the destination with the executor's.
Seen check_conversion(check::Random& random, const Move& move, Memory& src, Memory& dst, Grid grid) {
  random.fill(dst.data(), dst.size());
  std::vector<std::byte> expected(dst.data(), dst.data() + dst.size());
  for (std::uint32_t piece = 0; piece < move.grid.num_pieces(); ++piece)
    copy_piece(move, piece, src.data(), expected.data());

  Seen seen;
  auto launches = gpu::make_launches(
      *move.program, {move.grid.first_layer, move.grid.num_layers, move.grid.num_pairs, move.grid.num_fine},
      move.src_ids, move.dst_ids, placement_of(src), placement_of(dst), false);
  REQUIRE_OK(launches);
  for (Launch& launch : launches.value()) {
    REQUIRE(launch.kernel == gpu::Kernel::kConvert);
    launch.job.src_ids = move.src_ids.data();
    launch.job.dst_ids = move.dst_ids.data();
    launch.conversions.scales = move.program->scales.data();
    seen.by_cta |= launch.conversions.team == Team::kWholeCta;
    for (std::uint32_t k = 0; k < launch.job.num_loops; ++k)
      (launch.conversions.loops[k].in_vectors ? seen.in_vectors : seen.by_elements) = true;
    cuda_threads::launch(grid.num_ctas, grid.num_warps * gpu::kWarp, sizeof(gpu::ConvertMemory),
                         kvxfer_convert, launch.job, launch.conversions);
  }
  const auto [found, wanted] = std::mismatch(dst.data(), dst.data() + dst.size(), expected.data());
  REQUIRE(found == dst.data() + dst.size());
  static_cast<void>(wanted);
  return seen;
}

Wish any_conversion(check::Random& random) {
  Wish wish = any_wish(random);
  while (!wish.conversions) wish = any_wish(random);
  if (random.chance(50)) {
    wish.alignment = 16;
    wish.run_elements = (wish.run_elements + 15) / 16 * 16;
  }
  if (random.chance(60)) {  // the dtypes of caches
    constexpr Dtype kWide[] = {Dtype::kBf16, Dtype::kF16};
    wish.conversions->src = kWide[random.below(2)];
    wish.conversions->dst = kNarrow[random.below(3)];
    if (random.chance(30) && wish.conversions->dst_scales != ScalePlace::kRegion)
      std::swap(wish.conversions->src, wish.conversions->dst);
    if (random.chance(70) && itemsize(wish.conversions->src) == 2)
      wish.conversions->src_scales = ScalePlace::kNone;
    if (random.chance(70) && itemsize(wish.conversions->src) == 1)
      wish.conversions->dst_scales = ScalePlace::kNone;
  }
  return wish;
}

TEST(programs_convert_as_the_executor_does) {
  check::Random random(check::seed());
  Seen all;
  for (int round = 0; round < 60; ++round) {
    const Wish wish = any_conversion(random);
    const bool odd = wish.alignment == 1 && random.chance(50);
    Sample sample(random, wish);
    Memory src(sample.src.end, odd ? random.below(16) : 0), dst(sample.dst.end, odd ? random.below(16) : 0);
    sample.fill_source(src.data());
    const Seen seen = check_conversion(random, sample.move, src, dst, {any(random, 1, 3), any(random, 1, 3)});
    all.by_cta |= seen.by_cta;
    all.in_vectors |= seen.in_vectors;
    all.by_elements |= seen.by_elements;
  }
  CHECK(all.in_vectors);
  CHECK(all.by_elements);
}

struct Granule { std::uint32_t tokens, heads, elements; };

// From less than a run to several parts for each warp of a CTA, with runs of a few elements and of thousands.
TEST(scales_of_granules_of_any_size_are_found) {
  check::Random random(check::seed());
  Seen all;
  for (const Granule& granule : {Granule{4, 2, 16},
                                 {4, 3, 128},
                                 {16, 2, 128},
                                 {16, 4, 144},
                                 {5, 3, 24},
                                 {2, 2, 3000},
                                 {64, 3, 16},
                                 {40, 2, 4},
                                 {36, 1, 16},
                                 {300, 2, 8},
                                 {1, 1, 9000},
                                 {100, 1, 200}}) {
    for (int round = 0; round < 3; ++round) {
      Wish wish;
      wish.num_layers = 1;
      wish.unit_tokens = granule.tokens;
      wish.num_heads = granule.heads;
      wish.run_elements = granule.elements;
      wish.num_coarse = any(random, 1, 3);
      wish.alignment = granule.elements % 16 == 0 ? 16 : 8;
      wish.conversions =
          Conversions{random.chance(80) ? Dtype::kBf16 : Dtype::kF16, kNarrow[random.below(kNarrow.size())],
                      random.chance(80) ? ScalePlace::kNone : ScalePlace::kProgram, ScalePlace::kRegion,
                      random.chance(50)};
      Sample sample(random, wish);
      Memory src(sample.src.end), dst(sample.dst.end);
      sample.fill_source(src.data());
      if (random.chance(50))  // without infinities and NaNs, so that vectors do it all
        for (std::uint64_t at = 1; at < sample.src.end; at += 2) src.data()[at] &= std::byte{0xbf};
      const Seen seen =
          check_conversion(random, sample.move, src, dst, {any(random, 1, 2), any(random, 1, 4)});
      all.by_cta |= seen.by_cta;
      all.in_vectors |= seen.in_vectors;
    }
  }
  CHECK(all.by_cta);
  CHECK(all.in_vectors);
}

// Runs that begin on whole atoms and do not end on one: bytes behind their ends must not change.
TEST(the_ends_of_runs_are_converted_by_elements) {
  check::Random random(check::seed());
  for (const std::uint32_t elements : {1u, 7u, 9u, 20u, 133u, 4999u})
    for (const ScalePlace scales : {ScalePlace::kNone, ScalePlace::kRegion}) {
      CopyLoop loop{};
      loop.num_layers = 1;
      loop.counts[0] = 2;
      loop.counts[1] = 3;
      loop.nbytes = elements * 2;
      loop.conversion = 1;
      const std::uint64_t atoms = (elements + kAtomElements - 1) / kAtomElements + random.below(2);
      loop.src_strides[1] = atoms * 16;
      loop.src_strides[0] = loop.src_strides[1] * 3;
      loop.src_block_stride = loop.src_strides[0] * 2;
      loop.dst_strides[1] = atoms * 8;
      loop.dst_strides[0] = loop.dst_strides[1] * 3;
      loop.dst_block_stride = loop.dst_strides[0] * 2;
      Conversion conversion{};
      conversion.src_dtype = Dtype::kBf16;
      conversion.dst_dtype = Dtype::kE4m3;
      conversion.dst_scales = scales;
      constexpr std::uint32_t kNumPairs = 4;
      conversion.dst_offset = kNumPairs * loop.dst_block_stride;
      conversion.dst_block_stride = sizeof(float);
      auto program = std::make_shared<CopyProgram>();
      program->loops = {loop};
      program->conversions = {conversion};
      program->num_layers = 1;
      Move move;
      move.program = program;
      move.grid = {0, 1, kNumPairs, kNumPairs};
      move.src_ids = {3, 1, 0, 2};
      move.dst_ids = {0, 2, 3, 1};
      Memory src(kNumPairs * loop.src_block_stride), dst(conversion.dst_offset + kNumPairs * sizeof(float));
      random.fill(src.data(), src.size());
      const Seen seen = check_conversion(random, move, src, dst, {2, 2});
      CHECK(seen.in_vectors);
      CHECK(!seen.by_elements);
    }
}

}  // namespace
