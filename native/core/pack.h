// A piece in the order and form in which it crosses a stream: pair after pair of each loop, run
// after run, converted, without gaps. What is gathered so is sent with few system calls.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/executor.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// What lies side by side at one end and is shorter than this costs a stream more as an iovec than it
// costs to be copied once more (native/DESIGN.md). kvxfer/copy_program.py: GATHER_BELOW_NBYTES.
inline constexpr std::uint64_t kGatherBelowNbytes = 512;

// Bytes of a piece as it crosses a stream; of one pair of a layer.
std::uint64_t piece_nbytes(const CopyProgram& program, const Piece& piece) noexcept;
std::uint64_t pair_nbytes(const CopyProgram& program, std::uint32_t layer, std::uint32_t grain) noexcept;

// Are the stretches of this side so short on average, or in need of conversion (at the source)?
bool gathers_src(const CopyProgram& program) noexcept;
bool scatters_dst(const CopyProgram& program) noexcept;

// crc32c over the piece's bytes as they cross a stream: the same at both ends, and equal only
// where what was converted here is what landed there. `base` is the side's own region's.
std::uint32_t checksum_piece(const Move& move, std::uint32_t piece, Side side, const std::byte* base);

// Gathers a piece of our memory, whole pairs of a loop at a time. The move must outlive it.
class Packer {
 public:
  Packer() = default;
  Packer(const Move& move, std::uint32_t index) noexcept
      : move_(&move), piece_(move.grid.piece(index)), pair_(0) {}

  // What a buffer must hold at least: the longest pair of a loop.
  static std::uint64_t longest_cell(const CopyProgram& program) noexcept;

  // Packs what fits into `room` bytes; returns how many. 0: the piece is packed.
  std::size_t pack(std::byte* out, std::size_t room) noexcept;

  // Leaves out the next `nbytes`, which went out already.
  void skip(std::uint64_t nbytes) noexcept;

 private:
  const Move* move_ = nullptr;
  Piece piece_;
  std::size_t loop_ = 0;
  std::uint32_t pair_ = 0;  // of the piece's pairs of the loop's grain
  std::uint64_t drop_ = 0;  // of the next cell: gone out before
};

}  // namespace kvxfer
