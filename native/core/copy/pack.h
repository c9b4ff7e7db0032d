// A piece in the order and form in which it crosses a stream: pair after pair of each loop, run after run,
// converted, without gaps. A gathered piece is sent with few system calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/copy/executor.h"
#include "core/copy/piece_cursor.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// A stretch that lies side by side at one end and is shorter than this costs a stream more as an iovec than
// as another copy (native/DESIGN.md). kvxfer/plan/program.py: GATHER_BELOW_NBYTES.
inline constexpr std::uint64_t kGatherBelowNbytes = 512;

// The bytes of a piece as it crosses a stream; those of one pair of a layer.
std::uint64_t piece_nbytes(const CopyProgram& program, const Piece& piece) noexcept;
std::uint64_t pair_nbytes(const CopyProgram& program, std::uint32_t layer, std::uint32_t grain) noexcept;
// Counts what pieces of a program hold and cost (`pair_nbytes`, `counts`), once for all transfers, in a step
// for each loop and each layer. check_program() must have passed.
void count(CopyProgram& program);
// The memory that the counts take, at most.
inline std::uint64_t nbytes_of_counts(const CopyProgram& program) noexcept {
  return program.num_layers * sizeof(LayerCount);
}
// The bytes of all pieces of a transfer, loop by loop; at once if all layers go and the program's bytes are
// counted.
std::uint64_t nbytes_of_loops(const CopyProgram& program, const PieceGrid& grid) noexcept;
inline std::uint64_t transfer_nbytes(const CopyProgram& program, const PieceGrid& grid) noexcept {
  if (program.pair_nbytes[kCoarse] == 0 || grid.num_layers != program.num_layers)
    return nbytes_of_loops(program, grid);
  return (grid.num_pairs - grid.num_fine) * program.pair_nbytes[kCoarse] +
         grid.num_fine * program.pair_nbytes[kFine];
}

// Are this side's stretches that short on average, or do they need conversion (at the source)?
bool gathers_src(const CopyProgram& program) noexcept;
bool scatters_dst(const CopyProgram& program) noexcept;

// What it costs to gather, scatter or name a byte (core/copy/work.h), at most. The shortest run decides, or a
// layer of many loops and few bytes.
std::uint64_t work_of_a_byte(const CopyProgram& program) noexcept;

// The crc32c of the piece's bytes as they cross a stream, computed slice by slice. It is the same at both
// ends, and equal only if the bytes that landed there are the bytes that were converted here. `base` is that
// of the side's own region. The move must outlive it.
class PieceChecksum {
 public:
  PieceChecksum(const Move& move, std::uint32_t piece, Side side, const std::byte* base) noexcept
      : program_(move.program.get()),
        cursor_(*move.program, move.grid.piece(piece), move.src_ids.data(), move.dst_ids.data()),
        side_(side),
        base_(base) {}

  // Reads about `nbytes` of what is left, counting each run as at least 64 bytes. Returns how much it
  // read. Allocates what a few runs need, or what a cell that finds scales needs (kMostFoundNbytes).
  std::uint64_t advance(std::uint64_t nbytes = kSliceNbytes);
  bool done() const noexcept { return cursor_.done(); }
  std::uint32_t value() const noexcept { return sum_; }  // once done

 private:
  void add(const CellPart& part);

  const CopyProgram* program_;
  PieceCursor cursor_;
  Side side_;
  const std::byte* base_;
  std::uint32_t sum_ = 0;
  std::vector<std::byte> packed_;
};

// The same in one go.
std::uint32_t checksum_piece(const Move& move, std::uint32_t piece, Side side, const std::byte* base);

// Gathers a piece of our memory, as much of it as there is room for. The move must outlive it.
class Packer {
 public:
  Packer() = default;
  Packer(const Move& move, std::uint32_t index) noexcept
      : move_(&move),
        cursor_(*move.program, move.grid.piece(index), move.src_ids.data(), move.dst_ids.data()) {}

  // The least that a buffer must hold: an element, or a cell that finds scales (kMostFoundNbytes).
  static std::uint64_t least_room(const CopyProgram& program) noexcept;

  // Packs what fits into `room` bytes; returns how many. 0: the piece is packed.
  std::size_t pack(std::byte* out, std::size_t room) noexcept;

  // Leaves out the next `nbytes`, which were sent already.
  void skip(std::uint64_t nbytes) noexcept;

 private:
  const Move* move_ = nullptr;
  PieceCursor cursor_;
  // Bytes of what comes next that were sent before; they must not be cut at that point.
  std::uint64_t drop_ = 0;
};

}  // namespace kvxfer
