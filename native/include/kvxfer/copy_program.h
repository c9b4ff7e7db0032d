// The copy program: which bytes of a block pair go where. Index arithmetic only, no I/O.
//
// One header for every executor: copy loops (shm), iovecs (tcp), and the GPU kernels to come
// compile the same functions, so an offset is computed in one place.
#pragma once

#include <cstdint>
#include <vector>

#if defined(__CUDACC__)
#define KVXFER_HD __host__ __device__
#else
#define KVXFER_HD
#endif

namespace kvxfer {

// A strided loop nest over every layer and every block pair. For layer l in
// [first_layer, first_layer + num_layers), pair p of blocks (s, d) and i < counts[0],
// j < counts[1], `nbytes` contiguous bytes go
//   from src_offset + (l - first_layer) * src_layer_stride + s * src_block_stride
//        + i * src_strides[0] + j * src_strides[1]
//   to   the same expression with dst in the place of src and d of s.
// Offsets are in bytes from the region's base address. The struct is a wire format and a numpy
// record (kvxfer/plan.py: LOOP_DTYPE): 112 bytes, little-endian, no padding.
struct CopyLoop {
  std::uint32_t first_layer;
  std::uint32_t num_layers;
  std::uint64_t src_offset;
  std::uint64_t dst_offset;
  std::uint64_t src_layer_stride;
  std::uint64_t dst_layer_stride;
  std::uint64_t src_block_stride;
  std::uint64_t dst_block_stride;
  std::uint32_t counts[2];
  std::uint64_t src_strides[2];
  std::uint64_t dst_strides[2];
  std::uint64_t nbytes;
  std::uint32_t op;        // 0: bytes as they are. Conversions get numbers of their own.
  std::uint32_t reserved;  // 0
};
static_assert(sizeof(CopyLoop) == 14 * 8);

struct CopyProgram {
  std::vector<CopyLoop> loops;
  std::uint32_t num_layers = 0;

  // Bytes that one block pair moves in `layer`.
  std::uint64_t pair_nbytes(std::uint32_t layer) const noexcept {
    std::uint64_t total = 0;
    for (const CopyLoop& loop : loops)
      if (layer - loop.first_layer < loop.num_layers) total += loop.nbytes * loop.counts[0] * loop.counts[1];
    return total;
  }
};

// The unit of accounting: some block pairs of one layer.
struct Piece {
  std::uint32_t layer = 0;
  std::uint32_t first_pair = 0;
  std::uint32_t num_pairs = 0;
};

// How a transfer falls into pieces: layers in order, and in each layer the pairs in order, so
// that a low piece index is an early layer. Both ends compute the same from the same numbers.
struct PieceGrid {
  std::uint32_t first_layer = 0;
  std::uint32_t num_layers = 0;
  std::uint32_t num_pairs = 0;
  std::uint32_t pairs_per_piece = 1;

  KVXFER_HD std::uint32_t pieces_per_layer() const {
    return (num_pairs + pairs_per_piece - 1) / pairs_per_piece;
  }
  KVXFER_HD std::uint32_t num_pieces() const { return pieces_per_layer() * num_layers; }
  KVXFER_HD Piece piece(std::uint32_t index) const {
    const std::uint32_t per_layer = pieces_per_layer();
    const std::uint32_t first = index % per_layer * pairs_per_piece;
    const std::uint32_t left = num_pairs - first;
    return {first_layer + index / per_layer, first, left < pairs_per_piece ? left : pairs_per_piece};
  }
};

// Calls emit(src_offset, dst_offset, nbytes) for every contiguous run of `piece`, in program
// order; runs that touch on both sides are merged into one. Offsets are from the regions' bases.
template <class Emit>
KVXFER_HD inline void for_each_run(const CopyLoop* loops, std::size_t num_loops, Piece piece,
                                   const std::uint32_t* src_blocks, const std::uint32_t* dst_blocks,
                                   Emit&& emit) {
  std::uint64_t run_src = 0, run_dst = 0, run_nbytes = 0;
  for (std::size_t k = 0; k < num_loops; ++k) {
    const CopyLoop& loop = loops[k];
    const std::uint32_t layer = piece.layer - loop.first_layer;  // wraps below first_layer
    if (layer >= loop.num_layers) continue;
    const std::uint64_t src_layer = loop.src_offset + layer * loop.src_layer_stride;
    const std::uint64_t dst_layer = loop.dst_offset + layer * loop.dst_layer_stride;
    for (std::uint32_t p = piece.first_pair; p < piece.first_pair + piece.num_pairs; ++p) {
      const std::uint64_t src_pair = src_layer + src_blocks[p] * loop.src_block_stride;
      const std::uint64_t dst_pair = dst_layer + dst_blocks[p] * loop.dst_block_stride;
      for (std::uint32_t i = 0; i < loop.counts[0]; ++i) {
        for (std::uint32_t j = 0; j < loop.counts[1]; ++j) {
          const std::uint64_t src = src_pair + i * loop.src_strides[0] + j * loop.src_strides[1];
          const std::uint64_t dst = dst_pair + i * loop.dst_strides[0] + j * loop.dst_strides[1];
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
    }
  }
  if (run_nbytes != 0) emit(run_src, run_dst, run_nbytes);
}

}  // namespace kvxfer
