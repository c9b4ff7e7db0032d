// One side of a loop of a copy program: what holds for the source holds for the destination.
#pragma once

#include <cstdint>
#include <optional>

#include "kvxfer/copy_program.h"

namespace kvxfer {

enum class Side : std::uint8_t { kSrc, kDst };

// Where a loop has its runs at one side, or where the scales of those runs lie: the place of run (0, 0) of
// unit 0 of block 0 in the loop's first layer, and the distances from there to the others.
struct HalfLoop {
  std::uint64_t offset, layer_stride, block_stride, unit_stride;
  const std::uint64_t* strides;  // the loop's or the conversion's, which outlives this
  std::uint32_t units;           // of a block
  std::uint64_t nbytes;          // of each
};

inline HalfLoop half_of(const CopyLoop& loop, const Conversion* conversion, UnitsPerBlock units,
                        Side side) noexcept {
  if (side == Side::kSrc)
    return {loop.src_offset,      loop.src_layer_stride, loop.src_block_stride,
            loop.src_unit_stride, loop.src_strides,      units.src,
            loop.nbytes};
  return {loop.dst_offset,
          loop.dst_layer_stride,
          loop.dst_block_stride,
          loop.dst_unit_stride,
          loop.dst_strides,
          units.dst,
          dst_run_nbytes(loop, conversion)};
}

// The loop's scales that lie in that side's region; nothing if they do not lie there. Units of a block share
// them.
inline std::optional<HalfLoop> region_scales_of(const Conversion* conversion, UnitsPerBlock units,
                                                Side side) noexcept {
  if (conversion == nullptr) return std::nullopt;
  if ((side == Side::kSrc ? conversion->src_scales : conversion->dst_scales) != ScalePlace::kRegion)
    return std::nullopt;
  if (side == Side::kSrc)
    return HalfLoop{conversion->src_offset,
                    conversion->src_layer_stride,
                    conversion->src_block_stride,
                    0,
                    conversion->src_strides,
                    units.src,
                    sizeof(float)};
  return HalfLoop{conversion->dst_offset,
                  conversion->dst_layer_stride,
                  conversion->dst_block_stride,
                  0,
                  conversion->dst_strides,
                  units.dst,
                  sizeof(float)};
}

}  // namespace kvxfer
