// Conversion of a run of elements from one dtype to another, vectorised (AVX-512, or AVX2 with F16C and FMA,
// where the machine has them, chosen once at run time). number.h defines what a number becomes; every kernel
// gives the same bits.
#pragma once

#include <cstddef>
#include <string_view>

#include "kvxfer/number.h"

namespace kvxfer {

// x = value * src, then x / dst, each rounded to float32, then rounded to the new dtype. A missing factor is
// not applied.
struct Scaling {
  float src = 1, dst = 1;
  bool has_src = false, has_dst = false;
  bool saturate = false;  // see from_float()
};

// What a conversion may know of the memory around it. It never changes the results.
struct Traffic {
  // How many bytes ahead of its conversion a source is fetched.
  static constexpr std::size_t kAheadNbytes = 2048;

  const std::byte* next = nullptr;  // as many bytes as the run has will be wanted from there next
  bool stream = false;  // the destination is not read soon: whole lines are stored past the cache
};

// Converts `count` elements. Neither side need be aligned; the two must not overlap. Reads only count *
// itemsize(from) bytes, and writes only count * itemsize(to) bytes. Elements of one dtype, neither scaled
// nor saturated, keep their bits, and so do bytes (Dtype::kBytes on either side: `count` bytes are copied).
void convert_run(Dtype from, const std::byte* src, Dtype to, std::byte* dst, std::size_t count,
                 const Scaling& scaling, const Traffic& traffic = {}) noexcept;

// The largest |x| of the elements that are finite after the source's scale; 0 if there are none. Uses only
// the source's side of `scaling`.
float amax_run(Dtype from, const std::byte* src, std::size_t count, const Scaling& scaling) noexcept;

// The scale of a page whose largest magnitude is `amax`: amax / largest(to), for e4m3, e5m2 and int8. 1 if
// amax is 0, and never below the smallest normal number, 2^-126: a subnormal scale has so few bits that amax
// / scale could exceed the largest number. 1 for wider dtypes.
float scale_for(Dtype to, float amax) noexcept;

std::string_view convert_kernel_name() noexcept;  // "avx512", "avx2", "scalar"

// Makes every later call use the kernel of that name: for tests that compare kernels. False, and nothing
// changes, if there is no such kernel or this machine cannot run it. "" is the best one.
bool use_convert_kernel(std::string_view name) noexcept;

}  // namespace kvxfer
