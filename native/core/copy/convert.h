// Conversion of a run of elements from one dtype to another, vectorised (AVX-512, or AVX2 with F16C and FMA,
// where the machine has them, chosen once at run time). What a number becomes is number.h's to say; every
// kernel gives the same bits.
#pragma once

#include <cstddef>
#include <string_view>

#include "kvxfer/number.h"

namespace kvxfer {

// x = value * src, then x / dst, each rounded to float32, then rounded to the new dtype. A factor
// that is not there is not applied.
struct Scaling {
  float src = 1, dst = 1;
  bool has_src = false, has_dst = false;
  bool saturate = false;  // see from_float()
};

// What the memory around a conversion can be told. Results are the same whatever it says.
struct Traffic {
  // Bytes that a source's elements are asked for before they are converted.
  static constexpr std::size_t kAheadNbytes = 2048;

  const std::byte* next = nullptr;  // as many bytes as the run has will be wanted from there
  bool stream = false;  // nobody reads the destination soon: past the cache, where lines are whole
};

// Converts `count` elements. Neither side need be aligned; the two must not overlap. Nothing
// outside of count * itemsize(from) bytes is read, nothing outside of count * itemsize(to) bytes
// is written. Elements of one dtype, neither scaled nor saturated, keep their bits, and so do
// bytes (Dtype::kBytes on either side: `count` bytes are copied).
void convert_run(Dtype from, const std::byte* src, Dtype to, std::byte* dst, std::size_t count,
                 const Scaling& scaling, const Traffic& traffic = {}) noexcept;

// The largest |x| of those elements that are finite after the source's scale; 0 where there is none.
// Of `scaling` only the source's side is used.
float amax_run(Dtype from, const std::byte* src, std::size_t count, const Scaling& scaling) noexcept;

// The scale of a page whose largest magnitude is `amax`: amax / largest(to), for e4m3, e5m2 and
// int8. 1 where amax is 0, and never below the smallest normal number, 2^-126: a subnormal scale
// has so few bits that amax / scale could lie beyond the largest number. 1 for wider dtypes.
float scale_for(Dtype to, float amax) noexcept;

std::string_view convert_kernel_name() noexcept;  // "avx512", "avx2", "scalar"

// Makes every later call use the kernel of that name: for tests that compare them. False, and
// nothing changes, where there is none or this machine cannot run it. "" is the best one.
bool use_convert_kernel(std::string_view name) noexcept;

}  // namespace kvxfer
