#include "gpu/placing.h"

#include <iterator>
#include <optional>
#include <string>

namespace kvxfer::gpu {
namespace {

// Returns where block 0 of the first layer would lie if the blocks up to that of `last_id` lay there as they
// do in `layer`. Returns nothing if the blocks of `layer` lie in several pieces.
std::optional<Address> find(const HalfLoop& half, const Placement& placement, std::uint32_t layer,
                            std::uint32_t last_id, const std::uint32_t* counts) noexcept {
  const std::uint64_t end = last_id / half.units * half.block_stride + (half.units - 1) * half.unit_stride +
                            (counts[0] - 1) * half.strides[0] + (counts[1] - 1) * half.strides[1] +
                            half.nbytes;
  const std::uint64_t before = layer * half.layer_stride;
  const auto found = placement.find(half.offset + before, end);
  if (!found) return std::nullopt;
  return *found - before;
}

bool lie_alike(const Layers& a, const Layers& b) noexcept {
  return a.src == b.src && a.dst == b.dst && a.src_scales == b.src_scales && a.dst_scales == b.dst_scales;
}

Result<Layers> place(const Placing& placing, std::uint32_t layer) {
  std::optional<Address> found[4];  // in the order of Layers' fields
  for (const kvxfer::Side side : {kvxfer::Side::kSrc, kvxfer::Side::kDst}) {
    const bool src = side == kvxfer::Side::kSrc;
    const auto place_half = [&](const HalfLoop& half) {
      return find(half, src ? placing.src : placing.dst, layer,
                  src ? placing.last_src_id : placing.last_dst_id, placing.loop.counts);
    };
    const auto scales = region_scales_of(placing.conversion, placing.units, side);
    found[src ? 0 : 1] = place_half(half_of(placing.loop, placing.conversion, placing.units, side));
    found[src ? 2 : 3] = scales ? place_half(*scales) : Address{0};
  }
  for (std::size_t k = 0; k < std::size(found); ++k)
    if (!found[k])
      return Status(Code::kOutOfRange, std::string("blocks of the ") +
                                           (k % 2 == 0 ? "source" : "destination") +
                                           " do not lie in one contiguous piece of its memory");
  return Layers{layer, 1, *found[0], *found[1], *found[2], *found[3]};
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

std::uint64_t bits_of(const HalfLoop& half, Address placed, const CopyLoop& loop,
                      const Layers& layers) noexcept {
  std::uint64_t all = (placed + layers.first * half.layer_stride) | half.block_stride;
  if (layers.num > 1) all |= half.layer_stride;
  if (half.units > 1) all |= half.unit_stride;
  for (int axis = 0; axis < 2; ++axis)
    if (loop.counts[axis] > 1) all |= half.strides[axis];
  return all;
}

}  // namespace kvxfer::gpu
