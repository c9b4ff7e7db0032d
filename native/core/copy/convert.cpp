// The portable kernel, and the choice between kernels.
#include "core/copy/convert.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/copy/convert_kernel.h"

namespace kvxfer {
namespace {

// Never inlined: clang turns "multiply if there is a scale" into a multiplication by 1 if there is none,
// which makes signalling NaNs quiet. Elements without a scale keep their bits.
[[gnu::noinline]] float scaled(float x, const Scaling& scaling) noexcept {
  if (scaling.has_src) x *= scaling.src;
  if (scaling.has_dst) x /= scaling.dst;
  return x;
}

struct ScalarLoops {
  template <Dtype kFrom>
  static float load(const std::byte* src) noexcept {
    std::uint32_t bits = 0;
    std::memcpy(&bits, src, itemsize(kFrom));
    return to_float(kFrom, bits);
  }

  template <Dtype kFrom, Dtype kTo>
  static void convert(const std::byte* src, std::byte* dst, std::size_t count, const Scaling& scaling,
                      const Traffic&) noexcept {
    const bool has_scales = scaling.has_src || scaling.has_dst;
    for (std::size_t i = 0; i < count; ++i) {
      const float x = load<kFrom>(src + i * itemsize(kFrom));
      const std::uint32_t bits = from_float(kTo, has_scales ? scaled(x, scaling) : x, scaling.saturate);
      std::memcpy(dst + i * itemsize(kTo), &bits, itemsize(kTo));
    }
  }

  template <Dtype kFrom>
  static float amax(const std::byte* src, std::size_t count, float scale) noexcept {
    float largest_yet = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float x = load<kFrom>(src + i * itemsize(kFrom)) * scale;
      const std::uint32_t magnitude = number::bits_of(x) & ~number::kSign;
      if (magnitude < number::kInfinity && number::float_of(magnitude) > largest_yet)
        largest_yet = number::float_of(magnitude);
    }
    return largest_yet;
  }
};

constexpr ConvertKernel kScalar = make_kernel<ScalarLoops>("scalar");

const ConvertKernel* kernel_named(std::string_view name) noexcept {
  for (const ConvertKernel* kernel : {avx512_convert_kernel(), avx2_convert_kernel(), &kScalar})
    if (kernel != nullptr && (name.empty() || name == kernel->name)) return kernel;
  return nullptr;
}

std::atomic<const ConvertKernel*> the_kernel{kernel_named("")};

}  // namespace

void convert_run(Dtype from, const std::byte* src, Dtype to, std::byte* dst, std::size_t count,
                 const Scaling& scaling, const Traffic& traffic) noexcept {
  if (count == 0) return;
  const bool as_it_is = from == to && !scaling.has_src && !scaling.has_dst && !scaling.saturate;
  if (as_it_is || from == Dtype::kBytes || to == Dtype::kBytes) {
    std::memcpy(dst, src, count * itemsize(as_it_is ? from : Dtype::kBytes));
    return;
  }
  const ConvertKernel& kernel = *the_kernel.load(std::memory_order_relaxed);
  kernel.convert[index_of(from)][index_of(to)](src, dst, count, scaling, traffic);
}

float amax_run(Dtype from, const std::byte* src, std::size_t count, const Scaling& scaling) noexcept {
  if (count == 0 || from == Dtype::kBytes) return 0;
  const ConvertKernel& kernel = *the_kernel.load(std::memory_order_relaxed);
  return kernel.amax[index_of(from)](src, count, scaling.has_src ? scaling.src : 1.0f);
}

float scale_for(Dtype to, float amax) noexcept {
  if (itemsize(to) != 1 || to == Dtype::kBytes || amax == 0) return 1;
  return std::max(amax / largest(to), std::numeric_limits<float>::min());
}

std::string_view convert_kernel_name() noexcept { return the_kernel.load(std::memory_order_relaxed)->name; }

bool use_convert_kernel(std::string_view name) noexcept {
  const ConvertKernel* kernel = kernel_named(name);
  if (kernel != nullptr) the_kernel.store(kernel, std::memory_order_relaxed);
  return kernel != nullptr;
}

}  // namespace kvxfer
