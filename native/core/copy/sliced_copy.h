// A piece that is copied a slice at a time. We decide how much of it one call moves, not the peer that chose
// the program, its blocks and how many of them make a piece.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/copy/convert.h"
#include "core/copy/executor.h"
#include "core/copy/piece_cursor.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Where a piece's bytes come from: offsets are from the source region's base.
class CopySource {
 public:
  virtual ~CopySource() = default;
  // Copies some pairs whole, into move.local->base.
  virtual Status copy(const Move& move, const Piece& pairs) = 0;
  // Bytes of the source, valid until the next call: at most SlicedCopy::kChunkNbytes.
  virtual Result<const std::byte*> read(std::uint64_t offset, std::size_t nbytes) = 0;
};

// A source that is mapped in this process.
class MappedSource final : public CopySource {
 public:
  explicit MappedSource(const std::byte* base) noexcept : base_(base) {}
  Status copy(const Move& move, const Piece& pairs) override {
    execute(*move.program, pairs, move.src_ids.data(), move.dst_ids.data(), base_, move.local->base);
    return {};
  }
  Result<const std::byte*> read(std::uint64_t offset, std::size_t) override { return base_ + offset; }

 private:
  const std::byte* base_;
};

class SlicedCopy {
 public:
  // Work is counted as in core/copy/work.h. 2 MiB take about a third of a millisecond. A piece that the engine makes costs less: it is one slice.
  static constexpr std::uint64_t kSliceCost = 2 * 1024 * 1024;
  static constexpr std::size_t kChunkNbytes = 128 * 1024;

  // The move must outlive it.
  SlicedCopy(const Move& move, std::uint32_t piece, std::uint64_t slice_cost = kSliceCost) noexcept
      : SlicedCopy(move, move.grid.piece(piece), slice_cost) {}

  bool done() const noexcept { return left_.num_pairs == 0 || parts_.done(); }
  // The cost of the whole piece, at most; UINT64_MAX if it is larger than that.
  std::uint64_t cost() const noexcept;
  // Removes the next pairs, of at most that cost but at least one pair, and returns them as a copy of
  // their own that another thread may run. Call it while pairs are left, and before advance().
  SlicedCopy take(std::uint64_t cost) noexcept;
  // Copies one more slice, fenced (copy_fence) at its end; returns its cost. Not ok: what the source says.
  Result<std::uint64_t> advance(CopySource& source);

 private:
  SlicedCopy(const Move& move, const Piece& piece, std::uint64_t slice_cost) noexcept;
  Piece take_pairs(std::uint32_t num) noexcept;
  Status take(CopySource& source, const CellPart& part);
  Status take_run(CopySource& source, const CellPart& part, std::uint32_t i, std::uint32_t j);
  Result<Scaling> scales_of_run(CopySource& source, const CellPart& part, std::uint32_t i, std::uint32_t j);

  const Move* move_;
  Piece left_;
  std::uint64_t slice_cost_;
  std::uint64_t pair_cost_;  // at most
  // How far the copy is inside a pair that is more than a slice, and what it has found of the granule
  // there.
  PieceCursor parts_;
  bool is_scale_known_ = true;
  float amax_ = 0, scale_ = 0;
};

}  // namespace kvxfer
