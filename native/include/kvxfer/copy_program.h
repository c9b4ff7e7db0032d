// The copy program: which bytes of a block pair go where. Index arithmetic only, no I/O.
//
// One header for every executor: copy loops (shm), iovecs (tcp) and GPU kernels compile the same functions,
// so that an offset is computed in one place.
//
// Tables name *units*. Where both ends have pages of equal size a unit is a block; else it is the largest
// number of tokens that divides both (16 and 48: 16), and id = block * units of a block + unit within it.
// Tokens outside whole units, at the ends of a token range, move one by one: their pairs stand at the end of
// the tables, count in tokens, and have loops of their own.
//
// The parts of a copy, from the whole to the smallest:
//
//   program  the loops between two layouts: compiled once, for any blocks
//   move     a program with the addresses and the tables of one transfer
//   layer    what a caller can wait for
//   piece    some pairs of one layer: what a rail carries as one work, and what is counted as arrived
//   slice    as much of a piece as is copied before others have their turn; cells stay whole where they are
//            not too large
//   pair     an id at the source and an id at the destination: units, or at the ends single tokens (the grain)
//   cell     one pair of one loop: at most two strided axes of runs. The unit of conversion and of packing
//   run      bytes that lie together at both ends
#pragma once

#include <cstddef>
#include <cstdint>
#if !defined(__CUDACC_RTC__)
#include <utility>
#include <vector>
#endif

#include "kvxfer/number.h"

namespace kvxfer {

enum Grain : std::uint32_t { kCoarse = 0, kFine = 1 };  // units, single tokens
inline constexpr std::uint32_t kNumGrains = 2;

// A strided loop nest over every layer and every pair of its grain. For layer l in
// [first_layer, first_layer + num_layers), pair (s, d) of ids and i < counts[0], j < counts[1],
// `nbytes` contiguous bytes go
//   from src_offset + (l - first_layer) * src_layer_stride + block(s) * src_block_stride
//        + unit(s) * src_unit_stride + i * src_strides[0] + j * src_strides[1]
//   to   the same expression with dst in the place of src and d of s.
// Offsets are in bytes from the region's base address. The struct is a wire format and a numpy
// record (kvxfer/plan/program.py: LOOP_DTYPE): 128 bytes, little-endian, no padding.
struct CopyLoop {
  std::uint32_t first_layer;
  std::uint32_t num_layers;
  std::uint64_t src_offset;
  std::uint64_t dst_offset;
  std::uint64_t src_layer_stride;
  std::uint64_t dst_layer_stride;
  std::uint64_t src_block_stride;
  std::uint64_t dst_block_stride;
  std::uint64_t src_unit_stride;
  std::uint64_t dst_unit_stride;
  std::uint32_t counts[2];
  std::uint64_t src_strides[2];
  std::uint64_t dst_strides[2];
  std::uint64_t nbytes;  // of a run at the source
  std::uint32_t grain;  // Grain
  std::uint32_t conversion;  // 0: bytes as they are; k: conversions[k - 1]
};
static_assert(sizeof(CopyLoop) == 128);

enum class ScalePlace : std::uint8_t {
  kNone = 0,  // stored values are the values
  kProgram = 1,  // in the program's table; offsets and strides count floats
  kRegion = 2,  // float32 in the region's memory; offsets and strides count bytes
};

// How a loop's elements change on their way. The scale of run (i, j) of a pair is at
//   offset + (l - first_layer) * layer_stride + block * block_stride + i * strides[0] + j * strides[1].
// value = stored * scale; every step in float32, rounded to nearest even. If dst_scales is kRegion, the
// executor finds the scale and stores it in the region. All runs of a pair that share a scale are one
// granule; the scale is the granule's largest magnitude divided by the type's largest number.
struct Conversion {
  Dtype src_dtype, dst_dtype;
  ScalePlace src_scales, dst_scales;
  std::uint8_t saturate;
  std::uint8_t reserved[3];  // 0
  std::uint64_t src_offset, src_layer_stride, src_block_stride, src_strides[2];
  std::uint64_t dst_offset, dst_layer_stride, dst_block_stride, dst_strides[2];

  KVXFER_HD bool finds_scales() const { return dst_scales == ScalePlace::kRegion; }
};
static_assert(sizeof(Conversion) == 88);

// Units of one block at either side. 0, 0 in a grain that a program has no loops of.
struct UnitsPerBlock { std::uint32_t src = 1, dst = 1; };

// Which of the destination rank's heads a program fills.
struct HeadSlice { std::uint32_t first = 0, num = 1, total = 1; };

// What executors read: pointers alone, so that a kernel can have one, too.
struct ProgramView {
  const CopyLoop* loops = nullptr;
  std::size_t num_loops = 0;
  const Conversion* conversions = nullptr;
  const float* scales = nullptr;
  UnitsPerBlock units[kNumGrains];
};

#if !defined(__CUDACC_RTC__)  // kernels get jobs (gpu/copy_job.h)
// What a pair of units, or of tokens, holds in one layer, and what it costs. Both by grain.
struct LayerCount {
  std::size_t first_loop = 0, end_loop = 0;  // all loops of the layer lie between these
  std::uint64_t nbytes[kNumGrains] = {0, 0};  // as they cross a stream
  std::uint64_t work[kNumGrains] = {0, 0};  // core/copy/work.h
};

// Counted once for a program (core/copy/pack.h), since a piece that walked all loops to know its size would
// cost what its program's writer likes.
struct ProgramCounts {
  std::vector<LayerCount> layers;  // one if all layers are alike; empty: not counted
  std::uint64_t work_of_a_byte = 1;
  std::uint64_t least_room = 0;
  bool gathers_src = false, scatters_dst = false;
};

struct CopyProgram {
  std::vector<CopyLoop> loops;
  std::vector<Conversion> conversions;
  std::vector<float> scales;
  UnitsPerBlock units[kNumGrains] = {{1, 1}, {0, 0}};
  HeadSlice dst_heads;
  std::uint32_t num_layers = 0;
  // Bytes of one pair in all layers, as they cross a stream; zero until they are counted
  // (core/copy/pack.h).
  std::uint64_t pair_nbytes[kNumGrains] = {0, 0};
  ProgramCounts counts;

  bool converts() const noexcept { return !conversions.empty(); }
  ProgramView view() const noexcept {
    return {loops.data(), loops.size(), conversions.data(), scales.data(), {units[0], units[1]}};
  }
  bool is_counted() const noexcept { return !counts.layers.empty(); }
  const LayerCount& count_of(std::uint32_t layer) const noexcept {
    return counts.layers[counts.layers.size() == 1 ? 0 : layer];
  }
  // The loops among which all of that layer's are: [first, second).
  std::pair<std::size_t, std::size_t> loops_of(std::uint32_t layer) const noexcept {
    if (!is_counted()) return {0, loops.size()};
    return {count_of(layer).first_loop, count_of(layer).end_loop};
  }
  ProgramView view_of(std::uint32_t layer) const noexcept {
    ProgramView out = view();
    const auto [first, end] = loops_of(layer);
    out.loops += first;
    out.num_loops = end - first;
    return out;
  }
  const Conversion* conversion_of(const CopyLoop& loop) const noexcept {
    return loop.conversion == 0 ? nullptr : &conversions[loop.conversion - 1];
  }
};
#endif

// Bytes of one of the loop's runs at the destination.
KVXFER_HD inline std::uint64_t dst_run_nbytes(const CopyLoop& loop, const Conversion* conversion) {
  if (conversion == nullptr) return loop.nbytes;
  return loop.nbytes / itemsize(conversion->src_dtype) * itemsize(conversion->dst_dtype);
}

// Scales that a pair of the loop leaves at the destination, 4 bytes each.
KVXFER_HD inline std::uint64_t num_found_scales(const CopyLoop& loop, const Conversion* conversion) {
  if (conversion == nullptr || !conversion->finds_scales()) return 0;
  return std::uint64_t{conversion->dst_strides[0] != 0 ? loop.counts[0] : 1} *
         (conversion->dst_strides[1] != 0 ? loop.counts[1] : 1);
}

// The unit of accounting: some pairs of one layer. The last `num_fine` of them count in tokens.
struct Piece {
  std::uint32_t layer = 0;
  std::uint32_t first_pair = 0;
  std::uint32_t num_pairs = 0;
  std::uint32_t num_fine = 0;

  // One past the last pair of a grain, and the first.
  KVXFER_HD std::uint32_t begin(std::uint32_t grain) const {
    return grain == kCoarse ? first_pair : first_pair + num_pairs - num_fine;
  }
  KVXFER_HD std::uint32_t end(std::uint32_t grain) const {
    return first_pair + num_pairs - (grain == kCoarse ? num_fine : 0);
  }
};

// How a transfer falls into pieces: layers in order, and in each layer the pairs in order, so
// that a low piece index is an early layer. Both ends compute the same from the same numbers.
struct PieceGrid {
  std::uint32_t first_layer = 0;
  std::uint32_t num_layers = 0;
  std::uint32_t num_pairs = 0;
  std::uint32_t pairs_per_piece = 1;
  std::uint32_t num_fine = 0;  // of num_pairs, the last ones

  KVXFER_HD std::uint32_t pieces_per_layer() const {
    return (num_pairs + pairs_per_piece - 1) / pairs_per_piece;
  }
  KVXFER_HD std::uint32_t num_pieces() const { return pieces_per_layer() * num_layers; }
  KVXFER_HD std::uint32_t grain_of(std::uint32_t pair) const {
    return pair < num_pairs - num_fine ? kCoarse : kFine;
  }
  KVXFER_HD Piece piece(std::uint32_t index) const {
    const std::uint32_t per_layer = pieces_per_layer();
    const std::uint32_t first = index % per_layer * pairs_per_piece;
    const std::uint32_t left = num_pairs - first;
    const std::uint32_t num = left < pairs_per_piece ? left : pairs_per_piece;
    const std::uint32_t after = left - num;  // pairs of the layer behind this piece
    const std::uint32_t fine = num_fine > after ? num_fine - after : 0;
    return {first_layer + index / per_layer, first, num, fine < num ? fine : num};
  }
};

// All runs of one loop for one pair: where run (0, 0) lies on both sides.
struct Cell {
  const CopyLoop* loop;
  std::uint32_t layer;  // counted from the loop's first
  std::uint32_t src_block, dst_block;
  std::uint64_t src, dst;
};

// The cell of one pair of the loop's grain; `layer` counts from the loop's first.
KVXFER_HD inline Cell cell_of(const CopyLoop& loop, UnitsPerBlock units, std::uint32_t layer,
                              std::uint32_t src_id, std::uint32_t dst_id) {
  std::uint32_t src_unit = 0, dst_unit = 0;
  if (units.src != 1) {  // a division costs more than all the rest
    src_unit = src_id % units.src;
    src_id /= units.src;
  }
  if (units.dst != 1) {
    dst_unit = dst_id % units.dst;
    dst_id /= units.dst;
  }
  return {&loop,
          layer,
          src_id,
          dst_id,
          loop.src_offset + layer * loop.src_layer_stride + src_id * loop.src_block_stride +
              src_unit * loop.src_unit_stride,
          loop.dst_offset + layer * loop.dst_layer_stride + dst_id * loop.dst_block_stride +
              dst_unit * loop.dst_unit_stride};
}

// Where the scale of a cell's run (0, 0) is, in bytes or floats (ScalePlace).
KVXFER_HD inline std::uint64_t src_scales_at(const Cell& cell, const Conversion& conversion) {
  return conversion.src_offset + cell.layer * conversion.src_layer_stride +
         cell.src_block * conversion.src_block_stride;
}
KVXFER_HD inline std::uint64_t dst_scales_at(const Cell& cell, const Conversion& conversion) {
  return conversion.dst_offset + cell.layer * conversion.dst_layer_stride +
         cell.dst_block * conversion.dst_block_stride;
}

// Where the k-th scale that a pair leaves at the destination lies, i outer, j inner.
KVXFER_HD inline std::uint64_t found_scale_offset(const Cell& cell, const Conversion& conversion,
                                                  std::uint64_t k) {
  const std::uint64_t inner = conversion.dst_strides[1] != 0 ? cell.loop->counts[1] : 1;
  return dst_scales_at(cell, conversion) + k / inner * conversion.dst_strides[0] +
         k % inner * conversion.dst_strides[1];
}

// Calls visit(cell) for every loop of the piece's layer and every pair of the loop's grain, in
// program order.
template <class Visit>
KVXFER_HD inline void for_each_cell(const ProgramView& program, Piece piece, const std::uint32_t* src_ids,
                                    const std::uint32_t* dst_ids, Visit&& visit) {
  for (std::size_t k = 0; k < program.num_loops; ++k) {
    const CopyLoop& loop = program.loops[k];
    const std::uint32_t layer = piece.layer - loop.first_layer;  // wraps below first_layer
    if (layer >= loop.num_layers) continue;
    const UnitsPerBlock units = program.units[loop.grain];
    for (std::uint32_t p = piece.begin(loop.grain); p < piece.end(loop.grain); ++p)
      visit(cell_of(loop, units, layer, src_ids[p], dst_ids[p]));
  }
}

// Calls emit(src_offset, dst_offset, nbytes) for every contiguous run of `piece`, in program
// order; runs that touch on both sides are merged into one. Offsets are from the regions' bases.
// For programs without conversions.
template <class Emit>
KVXFER_HD inline void for_each_run(const ProgramView& program, Piece piece, const std::uint32_t* src_ids,
                                   const std::uint32_t* dst_ids, Emit&& emit) {
  std::uint64_t run_src = 0, run_dst = 0, run_nbytes = 0;
  for_each_cell(program, piece, src_ids, dst_ids, [&](const Cell& cell) {
    const CopyLoop& loop = *cell.loop;
    for (std::uint32_t i = 0; i < loop.counts[0]; ++i) {
      for (std::uint32_t j = 0; j < loop.counts[1]; ++j) {
        const std::uint64_t src = cell.src + i * loop.src_strides[0] + j * loop.src_strides[1];
        const std::uint64_t dst = cell.dst + i * loop.dst_strides[0] + j * loop.dst_strides[1];
        if (run_nbytes != 0 && src == run_src + run_nbytes && dst == run_dst + run_nbytes) {
          run_nbytes += loop.nbytes;
          continue;
        }
        if (run_nbytes != 0) emit(run_src, run_dst, run_nbytes);
        run_src = src;
        run_dst = dst;
        run_nbytes = loop.nbytes;
      }
    }
  });
  if (run_nbytes != 0) emit(run_src, run_dst, run_nbytes);
}

}  // namespace kvxfer
