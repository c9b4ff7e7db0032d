// A place within a piece's runs at one end, which makes iovecs as a socket takes them.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

#include "kvxfer/copy_program.h"
#include "kvxfer/half_loop.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Walks the cells of copy_program.h run by run, and can stop anywhere: a piece may have more runs than one
// system call takes, and a socket stops anywhere. Runs that touch at this end are merged, which is all that
// a stream needs. The order of the bytes is the same at both ends, and the same as in core/copy/pack.h.
// Converted runs are named at the destination only, in the form in which they land. The move must outlive
// the cursor.
class RunCursor {
 public:
  RunCursor() = default;
  RunCursor(const Move& move, std::uint32_t index, Side side) noexcept
      : move_(&move), piece_(move.grid.piece(index)), side_(side) {
    std::tie(loop_, end_) = move.program->loops_of(piece_.layer);
  }

  // Appends iovecs for the next bytes, at most max_nbytes of them and until `out` has
  // max_entries. Returns how many bytes they name.
  std::uint64_t append(std::vector<iovec>& out, std::size_t max_entries, std::uint64_t max_nbytes) {
    return walk(max_nbytes, [&](std::byte* at, std::uint64_t nbytes) {
      if (!out.empty()) {
        iovec& last = out.back();
        if (static_cast<std::byte*>(last.iov_base) + last.iov_len == at) {
          last.iov_len += nbytes;
          return true;
        }
        if (out.size() >= max_entries) return false;
      }
      out.push_back({at, nbytes});
      return true;
    });
  }

  // Copies `nbytes` from `bytes` to where the next bytes lie.
  void scatter(const std::byte* bytes, std::uint64_t nbytes) noexcept {
    walk(nbytes, [&bytes](std::byte* at, std::uint64_t num) {
      std::memcpy(at, bytes, num);
      bytes += num;
      return true;
    });
  }

  // Leaves out the next `nbytes` of a piece that has just begun. Costs a step for each loop, not for each
  // run.
  void skip(std::uint64_t nbytes) noexcept {
    const CopyProgram& program = *move_->program;
    const bool source = side_ == Side::kSrc;
    for (; loop_ < end_; ++loop_, pair_ = 0) {
      const CopyLoop& loop = program.loops[loop_];
      if (piece_.layer - loop.first_layer >= loop.num_layers || loop.nbytes == 0) continue;
      const Conversion* conversion = source ? nullptr : program.conversion_of(loop);
      const std::uint64_t run = source ? loop.nbytes : dst_run_nbytes(loop, conversion);
      const std::uint64_t row = run * loop.counts[1], runs = row * loop.counts[0];
      const std::uint64_t cell = runs + num_found_scales(loop, conversion) * sizeof(float);
      const std::uint32_t num_pairs = piece_.end(loop.grain) - piece_.begin(loop.grain);
      pair_ = static_cast<std::uint32_t>(std::min<std::uint64_t>(num_pairs, nbytes / cell));
      nbytes -= pair_ * cell;
      if (pair_ == num_pairs) continue;
      i_ = static_cast<std::uint32_t>(std::min<std::uint64_t>(loop.counts[0], nbytes / row));
      nbytes -= i_ * row;
      j_ = nbytes / (i_ == loop.counts[0] ? sizeof(float) : run);
      within_ = nbytes % (i_ == loop.counts[0] ? sizeof(float) : run);
      return;
    }
  }

 private:
  // Calls take(address, nbytes) until max_nbytes are named, the piece ends, or take returns false.
  template <class Take>
  std::uint64_t walk(std::uint64_t max_nbytes, Take&& take) {
    const CopyProgram& program = *move_->program;
    const bool source = side_ == Side::kSrc;
    std::uint64_t left = max_nbytes;
    for (; loop_ < end_; ++loop_, pair_ = 0) {
      const CopyLoop& loop = program.loops[loop_];
      const std::uint32_t layer = piece_.layer - loop.first_layer;  // wraps below first_layer
      if (layer >= loop.num_layers || loop.nbytes == 0) continue;
      const Conversion* conversion = source ? nullptr : program.conversion_of(loop);
      const std::uint64_t run_nbytes = source ? loop.nbytes : dst_run_nbytes(loop, conversion);
      const std::uint64_t num_scales = num_found_scales(loop, conversion);
      const std::uint64_t* strides = source ? loop.src_strides : loop.dst_strides;
      const std::uint32_t first = piece_.begin(loop.grain), num_pairs = piece_.end(loop.grain) - first;
      for (; pair_ < num_pairs; ++pair_, i_ = 0) {
        const Cell cell = cell_of(loop, program.units[loop.grain], layer, move_->src_ids[first + pair_],
                                  move_->dst_ids[first + pair_]);
        const std::uint64_t at = source ? cell.src : cell.dst;
        // Row counts[0] is that of the scales, if the loop has any.
        for (; i_ < loop.counts[0]; ++i_, j_ = 0)
          for (; j_ < loop.counts[1]; ++j_, within_ = 0)
            if (!take_run(at + i_ * strides[0] + j_ * strides[1], run_nbytes, left, take))
              return max_nbytes - left;
        if (num_scales == 0) continue;
        for (; j_ < num_scales; ++j_, within_ = 0)
          if (!take_run(found_scale_offset(cell, *conversion, j_), sizeof(float), left, take))
            return max_nbytes - left;
        j_ = 0;
      }
    }
    return max_nbytes - left;
  }

  // Takes what is left of a run of `nbytes` at `offset`. False if the walk ends before or inside it.
  template <class Take>
  bool take_run(std::uint64_t offset, std::uint64_t nbytes, std::uint64_t& left, Take&& take) {
    if (left == 0) return false;
    const std::uint64_t num = std::min(nbytes - within_, left);
    if (!take(move_->local->base + offset + within_, num)) return false;
    left -= num;
    within_ += num;
    return within_ == nbytes;
  }

  const Move* move_ = nullptr;
  Piece piece_;
  Side side_ = Side::kSrc;
  std::size_t loop_ = 0, end_ = 0;
  std::uint32_t pair_ = 0, i_ = 0;
  std::uint64_t j_ = 0;
  std::uint64_t within_ = 0;  // bytes of the current run that are already named
};

}  // namespace kvxfer
