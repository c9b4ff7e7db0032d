#include "gpu/placing.h"

#include <iterator>
#include <optional>
#include <string>

namespace kvxfer::gpu {
namespace {

// What lies at one side of a loop: its runs, or their scales.
struct Places {
  std::uint64_t offset, layer_stride, block_stride, unit_stride;
  const std::uint64_t* strides;
  std::uint32_t units;  // of a block
  std::uint64_t nbytes;  // at each

  static Places src(const CopyLoop& loop, UnitsPerBlock units) noexcept {
    return {loop.src_offset,      loop.src_layer_stride, loop.src_block_stride,
            loop.src_unit_stride, loop.src_strides,      units.src,
            loop.nbytes};
  }
  static Places dst(const CopyLoop& loop, UnitsPerBlock units, const Conversion* conversion) noexcept {
    return {loop.dst_offset,
            loop.dst_layer_stride,
            loop.dst_block_stride,
            loop.dst_unit_stride,
            loop.dst_strides,
            units.dst,
            dst_run_nbytes(loop, conversion)};
  }
  static Places src_scales(const Conversion& conversion, UnitsPerBlock units) noexcept {
    return {conversion.src_offset,
            conversion.src_layer_stride,
            conversion.src_block_stride,
            0,
            conversion.src_strides,
            units.src,
            sizeof(float)};
  }
  static Places dst_scales(const Conversion& conversion, UnitsPerBlock units) noexcept {
    return {conversion.dst_offset,
            conversion.dst_layer_stride,
            conversion.dst_block_stride,
            0,
            conversion.dst_strides,
            units.dst,
            sizeof(float)};
  }

  // Where block 0 of the first layer would lie, if it and all blocks up to that of `last_id` lay together
  // as they do in `layer`; nothing where those lie in several pieces.
  std::optional<Address> find(const Placement& placement, std::uint32_t layer, std::uint32_t last_id,
                              const std::uint32_t* counts) const noexcept {
    const std::uint64_t end = last_id / units * block_stride + (units - 1) * unit_stride +
                              (counts[0] - 1) * strides[0] + (counts[1] - 1) * strides[1] + nbytes;
    const std::uint64_t before = layer * layer_stride;
    const auto found = placement.find(offset + before, end);
    if (!found) return std::nullopt;
    return *found - before;
  }
};

bool lie_alike(const Layers& a, const Layers& b) noexcept {
  return a.src == b.src && a.dst == b.dst && a.src_scales == b.src_scales && a.dst_scales == b.dst_scales;
}

Result<Layers> place(const Placing& placing, std::uint32_t layer) {
  const CopyLoop& loop = placing.loop;
  const Conversion* const conversion = placing.conversion;
  const auto at_src = [&](const Places& places) {
    return places.find(placing.src, layer, placing.last_src_id, loop.counts);
  };
  const auto at_dst = [&](const Places& places) {
    return places.find(placing.dst, layer, placing.last_dst_id, loop.counts);
  };
  const bool scaled_src = conversion != nullptr && conversion->src_scales == ScalePlace::kRegion;
  const bool scaled_dst = conversion != nullptr && conversion->dst_scales == ScalePlace::kRegion;
  const std::optional<Address> found[] = {
      at_src(Places::src(loop, placing.units)), at_dst(Places::dst(loop, placing.units, conversion)),
      scaled_src ? at_src(Places::src_scales(*conversion, placing.units)) : Address{0},
      scaled_dst ? at_dst(Places::dst_scales(*conversion, placing.units)) : Address{0}};
  for (std::size_t k = 0; k < std::size(found); ++k)
    if (!found[k])
      return Status(Code::kOutOfRange, std::string("blocks of the ") +
                                           (k % 2 == 0 ? "source" : "destination") +
                                           " do not lie in one piece of its memory");
  return Layers{layer, 1, *found[0], *found[1], *found[2], *found[3]};
}

std::uint64_t bits_of(const Places& places, Address first, const CopyLoop& loop, bool one_layer) noexcept {
  std::uint64_t all = first | places.block_stride;
  if (!one_layer) all |= places.layer_stride;
  if (places.units > 1) all |= places.unit_stride;
  for (int axis = 0; axis < 2; ++axis)
    if (loop.counts[axis] > 1) all |= places.strides[axis];
  return all;
}

}  // namespace

Result<std::vector<Layers>> Placing::find(std::uint32_t first, std::uint32_t last) const {
  std::vector<Layers> out;
  for (std::uint32_t layer = first; layer < last; ++layer) {
    Result<Layers> placed = place(*this, layer);
    if (!placed.ok()) return placed.status();
    if (!out.empty() && lie_alike(out.back(), placed.value()))
      ++out.back().num;
    else
      out.push_back(placed.value());
  }
  return out;
}

std::uint64_t src_bits(const CopyLoop& loop, UnitsPerBlock units, const Layers& layers) noexcept {
  return bits_of(Places::src(loop, units), layers.src + layers.first * loop.src_layer_stride, loop,
                 layers.num == 1);
}

std::uint64_t dst_bits(const CopyLoop& loop, UnitsPerBlock units, const Layers& layers) noexcept {
  return bits_of(Places::dst(loop, units, nullptr), layers.dst + layers.first * loop.dst_layer_stride, loop,
                 layers.num == 1);
}

}  // namespace kvxfer::gpu
