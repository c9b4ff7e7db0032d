#include "transports/stream/packed.h"

#include <numeric>

#include "core/copy/convert_cell.h"

namespace kvxfer {
namespace {

// The program without its loops, and the numbers of the piece's pairs.
PackedProgram begin(const CopyProgram& program, const Piece& piece) {
  PackedProgram out;
  out.program.num_layers = program.num_layers;
  out.program.dst_heads = program.dst_heads;
  for (std::uint32_t grain = 0; grain < kNumGrains; ++grain) out.program.units[grain] = program.units[grain];
  out.part = {piece.layer, 1, piece.num_pairs, piece.num_fine};
  out.pairs.resize(piece.num_pairs);
  const auto first_fine = out.pairs.end() - piece.num_fine;
  std::iota(out.pairs.begin(), first_fine, 0u);
  std::iota(first_fine, out.pairs.end(), 0u);
  return out;
}

// Calls visit(loop, conversion, offset of the loop's first pair in the packed piece) in program order.
template <class Visit>
void for_each_packed_loop(const CopyProgram& program, const Piece& piece, Visit&& visit) {
  std::uint64_t at = 0;
  const auto [first, end] = program.loops_of(piece.layer);
  for (std::size_t k = first; k < end; ++k) {
    const CopyLoop& loop = program.loops[k];
    if (piece.layer - loop.first_layer >= loop.num_layers) continue;  // wraps below first_layer
    const Conversion* conversion = program.conversion_of(loop);
    visit(loop, conversion, at);
    at += (piece.end(loop.grain) - piece.begin(loop.grain)) * packed_nbytes(loop, conversion);
  }
}

// How many scales of a pair lie along each axis, and how far apart. Runs that share a scale count it once.
struct FoundScales {
  std::uint32_t counts[2];
  std::uint64_t strides[2];
};

FoundScales found_scales(const CopyLoop& loop, const Conversion& conversion) noexcept {
  FoundScales out{};
  for (int axis = 0; axis < 2; ++axis)
    out.counts[axis] = conversion.dst_strides[axis] != 0 ? loop.counts[axis] : 1;
  out.strides[1] = conversion.dst_strides[1] != 0 ? sizeof(float) : 0;
  out.strides[0] = conversion.dst_strides[0] != 0 ? out.counts[1] * sizeof(float) : 0;
  return out;
}

}  // namespace

PackedProgram gathered(const CopyProgram& program, const Piece& piece) {
  PackedProgram out = begin(program, piece);
  for (UnitsPerBlock& units : out.program.units) units.dst = 1;
  out.program.scales = program.scales;
  for_each_packed_loop(program, piece, [&](CopyLoop loop, const Conversion* conversion, std::uint64_t first) {
    const std::uint64_t run = dst_run_nbytes(loop, conversion);
    const std::uint64_t runs = run * loop.counts[0] * loop.counts[1];
    if (conversion != nullptr) {
      Conversion packed = *conversion;
      if (packed.finds_scales()) {
        const FoundScales scales = found_scales(loop, packed);
        packed.dst_offset = first + runs;
        packed.dst_layer_stride = 0;
        packed.dst_block_stride = packed_nbytes(loop, conversion);
        packed.dst_strides[0] = scales.strides[0];
        packed.dst_strides[1] = scales.strides[1];
      }
      out.program.conversions.push_back(packed);
      loop.conversion = static_cast<std::uint32_t>(out.program.conversions.size());
    }
    loop.dst_offset = first;
    loop.dst_layer_stride = 0;
    loop.dst_block_stride = packed_nbytes(loop, conversion);
    loop.dst_unit_stride = 0;
    loop.dst_strides[0] = run * loop.counts[1];
    loop.dst_strides[1] = run;
    out.program.loops.push_back(loop);
  });
  return out;
}

PackedProgram scattered(const CopyProgram& program, const Piece& piece) {
  PackedProgram out = begin(program, piece);
  for (UnitsPerBlock& units : out.program.units) units.src = 1;
  for_each_packed_loop(program, piece, [&](CopyLoop loop, const Conversion* conversion, std::uint64_t first) {
    const std::uint64_t run = dst_run_nbytes(loop, conversion);
    const std::uint64_t runs = run * loop.counts[0] * loop.counts[1];
    loop.src_offset = first;
    loop.src_layer_stride = 0;
    loop.src_block_stride = packed_nbytes(loop, conversion);
    loop.src_unit_stride = 0;
    loop.src_strides[0] = run * loop.counts[1];
    loop.src_strides[1] = run;
    loop.nbytes = run;
    loop.conversion = 0;
    out.program.loops.push_back(loop);
    if (conversion == nullptr || !conversion->finds_scales()) return;
    const FoundScales scales = found_scales(loop, *conversion);
    loop.src_offset = first + runs;
    loop.dst_offset = conversion->dst_offset;
    loop.dst_layer_stride = conversion->dst_layer_stride;
    loop.dst_block_stride = conversion->dst_block_stride;
    loop.dst_unit_stride = 0;
    for (int axis = 0; axis < 2; ++axis) {
      loop.counts[axis] = scales.counts[axis];
      loop.src_strides[axis] = scales.strides[axis];
      loop.dst_strides[axis] = conversion->dst_strides[axis];
    }
    loop.nbytes = sizeof(float);
    out.program.loops.push_back(loop);
  });
  return out;
}

}  // namespace kvxfer
