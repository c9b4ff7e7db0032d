#include "core/copy/convert_cell.h"

#include <algorithm>
#include <cstring>

#include "core/copy/convert.h"
#include "core/copy/runs_ahead.h"

namespace kvxfer {
namespace {

float load_scale(const std::byte* at) noexcept {
  float scale;
  std::memcpy(&scale, at, sizeof scale);  // a region's scales need not be aligned
  return scale;
}

// Strides are counted in floats in the program's table, in bytes in a region.
std::uint64_t in_bytes(ScalePlace place, std::uint64_t stride) noexcept {
  return place == ScalePlace::kProgram ? stride * sizeof(float) : stride;
}

class CellConverter {
 public:
  CellConverter(const CopyLoop& loop, const Conversion& conversion, const std::byte* src, std::byte* dst,
                const CellScales& scales, const Traffic& traffic) noexcept
      : loop_(loop),
        conversion_(conversion),
        src_(src),
        dst_(dst),
        scales_(scales),
        traffic_(traffic),
        ahead_(loop, src, traffic.next, Traffic::kAheadNbytes),
        count_(loop.nbytes / itemsize(conversion.src_dtype)) {
    scaling_.has_src = conversion.src_scales != ScalePlace::kNone;
    scaling_.has_dst = conversion.dst_scales != ScalePlace::kNone;
    scaling_.saturate = conversion.saturate != 0;
  }

  void run() noexcept {
    if (conversion_.finds_scales()) {
      find_scales();
      return;
    }
    for (std::uint32_t i = 0; i < loop_.counts[0]; ++i)
      for (std::uint32_t j = 0; j < loop_.counts[1]; ++j) {
        if (scaling_.has_dst) scaling_.dst = load_scale(dst_scale(scales_.dst, i, j));
        convert(i, j);
      }
  }

 private:
  template <class Byte>
  Byte* dst_scale(Byte* base, std::uint32_t i, std::uint32_t j) const noexcept {
    return base + i * in_bytes(conversion_.dst_scales, conversion_.dst_strides[0]) +
           j * in_bytes(conversion_.dst_scales, conversion_.dst_strides[1]);
  }

  const std::byte* src_run(std::uint32_t i, std::uint32_t j) noexcept {
    if (scaling_.has_src)
      scaling_.src =
          load_scale(scales_.src + i * in_bytes(conversion_.src_scales, conversion_.src_strides[0]) +
                     j * in_bytes(conversion_.src_scales, conversion_.src_strides[1]));
    return src_ + i * loop_.src_strides[0] + j * loop_.src_strides[1];
  }

  void convert(std::uint32_t i, std::uint32_t j) noexcept {
    const std::byte* from = src_run(i, j);
    traffic_.next = ahead_.pop();
    convert_run(conversion_.src_dtype, from, conversion_.dst_dtype,
                dst_ + i * loop_.dst_strides[0] + j * loop_.dst_strides[1], count_, scaling_, traffic_);
  }

  // Along an axis with a scale stride of 0, runs share a granule; along the others granules follow each
  // other. Each granule is read twice, the second time from the cache.
  void find_scales() noexcept {
    const bool apart[2] = {conversion_.dst_strides[0] != 0, conversion_.dst_strides[1] != 0};
    const std::uint32_t outer[2] = {apart[0] ? loop_.counts[0] : 1, apart[1] ? loop_.counts[1] : 1};
    const std::uint32_t inner[2] = {apart[0] ? 1 : loop_.counts[0], apart[1] ? 1 : loop_.counts[1]};
    for (std::uint32_t a = 0; a < outer[0]; ++a)
      for (std::uint32_t b = 0; b < outer[1]; ++b) {
        float amax = 0;
        for (std::uint32_t i = a; i < a + inner[0]; ++i)
          for (std::uint32_t j = b; j < b + inner[1]; ++j) {
            const std::byte* from = src_run(i, j);
            amax = std::max(amax, amax_run(conversion_.src_dtype, from, count_, scaling_));
          }
        scaling_.dst = scale_for(conversion_.dst_dtype, amax);
        std::memcpy(dst_scale(scales_.found, a, b), &scaling_.dst, sizeof scaling_.dst);
        for (std::uint32_t i = a; i < a + inner[0]; ++i)
          for (std::uint32_t j = b; j < b + inner[1]; ++j) convert(i, j);
      }
  }

  const CopyLoop& loop_;
  const Conversion& conversion_;
  const std::byte* src_;
  std::byte* dst_;
  const CellScales& scales_;
  Traffic traffic_;
  RunsAhead ahead_;
  std::size_t count_;
  Scaling scaling_;
};

}  // namespace

CellScales scales_of(const ProgramView& program, const Conversion& conversion, const Cell& cell,
                     const std::byte* src_base, std::byte* dst_base) noexcept {
  CellScales out;
  const std::uint64_t src = src_scales_at(cell, conversion), dst = dst_scales_at(cell, conversion);
  const auto* table = reinterpret_cast<const std::byte*>(program.scales);
  if (conversion.src_scales == ScalePlace::kProgram) out.src = table + src * sizeof(float);
  if (conversion.src_scales == ScalePlace::kRegion) out.src = src_base + src;
  if (conversion.dst_scales == ScalePlace::kProgram) out.dst = table + dst * sizeof(float);
  if (conversion.dst_scales == ScalePlace::kRegion && dst_base != nullptr) out.found = dst_base + dst;
  return out;
}

CellScales scales_of(const ProgramView& program, const Conversion& conversion, const CellPart& part,
                     const std::byte* src_base, std::byte* dst_base) noexcept {
  CellScales out = scales_of(program, conversion, *part.cell, src_base, dst_base);
  if (part.whole) return out;
  if (out.src != nullptr)
    out.src += part.i * in_bytes(conversion.src_scales, conversion.src_strides[0]) +
               part.j * in_bytes(conversion.src_scales, conversion.src_strides[1]);
  if (out.dst != nullptr)
    out.dst += part.i * in_bytes(conversion.dst_scales, conversion.dst_strides[0]) +
               part.j * in_bytes(conversion.dst_scales, conversion.dst_strides[1]);
  return out;
}

void convert_cell(const CopyLoop& loop, const Conversion& conversion, const std::byte* src, std::byte* dst,
                  const CellScales& scales, const std::byte* next) noexcept {
  CellConverter(loop, conversion, src, dst, scales, {.next = next, .stream = true}).run();
}

void ConvertStream::push(const CopyLoop& loop, const Conversion& conversion, const std::byte* src,
                         std::byte* dst, const CellScales& scales) noexcept {
  convert_pushed(loop_ == &loop ? src : nullptr);
  loop_ = &loop;
  conversion_ = &conversion;
  src_ = src;
  dst_ = dst;
  scales_ = scales;
}

void ConvertStream::drain() noexcept {
  convert_pushed(nullptr);
  loop_ = nullptr;
}

void ConvertStream::convert_pushed(const std::byte* next) noexcept {
  if (loop_ != nullptr) convert_cell(*loop_, *conversion_, src_, dst_, scales_, next);
}

void pack_cell(const CopyLoop& loop, const Conversion& conversion, const std::byte* src,
               const CellScales& scales, std::byte* packed) noexcept {
  CopyLoop dense = loop;
  dense.dst_strides[1] = dst_run_nbytes(loop, &conversion);
  dense.dst_strides[0] = dense.dst_strides[1] * loop.counts[1];
  if (!conversion.finds_scales()) return CellConverter(dense, conversion, src, packed, scales, {}).run();
  Conversion found = conversion;
  if (found.dst_strides[1] != 0) found.dst_strides[1] = sizeof(float);
  if (found.dst_strides[0] != 0)
    found.dst_strides[0] = sizeof(float) * (conversion.dst_strides[1] != 0 ? loop.counts[1] : 1);
  CellScales to = scales;
  to.found = packed + dense.dst_strides[0] * loop.counts[0];
  CellConverter(dense, found, src, packed, to, {}).run();
}

}  // namespace kvxfer
