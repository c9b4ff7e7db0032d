// A kernel of conversions: a loop for each pair of dtypes, made from a load for each source dtype
// (elements to float32 lanes) and a store for each destination dtype (lanes to elements, rounded).
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <string_view>
#include <utility>

#include "core/convert.h"
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

// With AVX2, F16C and FMA; null where this machine, or the one that this was compiled for, has none.
const ConvertKernel* avx2_convert_kernel() noexcept;

}  // namespace kvxfer
