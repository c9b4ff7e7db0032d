// A kernel of conversions: a loop for each pair of dtypes, made from a load for each source dtype
// (elements to float32 lanes) and a store for each destination dtype (lanes to elements, rounded).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "core/copy/convert.h"
#include "kvxfer/number.h"

namespace kvxfer {

inline constexpr std::size_t kNumNumbers = kNumDtypes - 1;  // dtypes that are numbers
static_assert(std::endian::native == std::endian::little, "elements are little-endian, and so are ours");

// Loops of a kernel, by source and by source and destination; kBytes is left out.
using ConvertLoop = void (*)(const std::byte* src, std::byte* dst, std::size_t count, const Scaling& scaling,
                             const Traffic& traffic) noexcept;
using AmaxLoop = float (*)(const std::byte* src, std::size_t count, float scale) noexcept;
struct ConvertKernel {
  std::string_view name;
  std::array<std::array<ConvertLoop, kNumNumbers>, kNumNumbers> convert;
  std::array<AmaxLoop, kNumNumbers> amax;
};

constexpr Dtype number_at(std::size_t index) { return static_cast<Dtype>(index + 1); }
constexpr std::size_t index_of(Dtype dtype) { return static_cast<std::size_t>(dtype) - 1; }

// Fills a kernel's tables: Loops::convert<kFrom, kTo> and Loops::amax<kFrom> of every dtype.
template <class Loops>
constexpr ConvertKernel make_kernel(std::string_view name) {
  ConvertKernel kernel{};
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

// True if a run is stored past the cache. Lines that are stored in part had better be in the cache.
inline bool streams(const Traffic& traffic, const std::byte* dst, std::size_t nbytes) noexcept {
  return traffic.stream && (reinterpret_cast<std::uintptr_t>(dst) | nbytes) % 64 == 0;
}

// Fetches a run's bytes some time before a loop's steps reach them, and near the end those of the next run.
template <std::size_t kStepNbytes>
class LookAhead {
 public:
  LookAhead(const std::byte* src, std::size_t num_steps, const Traffic& traffic)
      : at_(src + Traffic::kAheadNbytes),
        next_(traffic.next),
        num_last_(std::min(num_steps, Traffic::kAheadNbytes / kStepNbytes)) {}

  // Inlined into functions for other instruction sets; only GCC's "always" does that.
  [[gnu::always_inline]] void before_step(const std::byte* src, std::size_t num_left) {
    if (num_left == num_last_) at_ = next_ != nullptr ? next_ : src;
    for (std::size_t line = 0; line < kStepNbytes; line += 64) __builtin_prefetch(at_ + line);
    at_ += kStepNbytes;
  }

 private:
  const std::byte* at_;
  const std::byte* next_;
  std::size_t num_last_;  // steps at the run's end, which fetch the next run
};

// The AVX-512 (F, BW, VL) kernel; null if this machine, or the one that this was compiled for, has none.
const ConvertKernel* avx512_convert_kernel() noexcept;

// The AVX2, F16C and FMA kernel; null likewise.
const ConvertKernel* avx2_convert_kernel() noexcept;

}  // namespace kvxfer
