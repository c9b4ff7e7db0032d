// A place within a piece's runs at one end, from which iovecs are made as a socket takes them.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kvxfer/copy_program.h"
#include "kvxfer/transport.h"

namespace kvxfer::tcp {

enum class End : std::uint8_t { kSource, kDestination };

inline std::uint64_t piece_nbytes(const Move& move, std::uint32_t index) noexcept {
  const Piece piece = move.grid.piece(index);
  return move.program->pair_nbytes(piece.layer) * piece.num_pairs;
}

// for_each_run of copy_program.h, made resumable: a piece may have more runs than one system
// call takes, and a socket stops anywhere. Runs are merged where they touch at this end, which
// is all that a stream asks for; the order of the bytes is the same at both ends. The move must
// outlive the cursor.
class RunCursor {
 public:
  RunCursor() = default;
  RunCursor(const Move& move, std::uint32_t index, End end) noexcept
      : move_(&move), piece_(move.grid.piece(index)), end_(end) {}

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

  void skip(std::uint64_t nbytes) noexcept {
    walk(nbytes, [](std::byte*, std::uint64_t) { return true; });
  }

 private:
  // Calls take(address, nbytes) until max_nbytes are named, the piece ends, or take says no.
  template <class Take>
  std::uint64_t walk(std::uint64_t max_nbytes, Take&& take) {
    const std::vector<CopyLoop>& loops = move_->program->loops;
    const bool source = end_ == End::kSource;
    const std::uint32_t* blocks = (source ? move_->src_blocks : move_->dst_blocks).data() + piece_.first_pair;
    std::uint64_t left = max_nbytes;
    for (; loop_ < loops.size(); ++loop_, pair_ = 0) {
      const CopyLoop& loop = loops[loop_];
      const std::uint32_t layer = piece_.layer - loop.first_layer;  // wraps below first_layer
      if (layer >= loop.num_layers || loop.nbytes == 0) continue;
      const std::uint64_t layer_offset = source ? loop.src_offset + layer * loop.src_layer_stride
                                                : loop.dst_offset + layer * loop.dst_layer_stride;
      const std::uint64_t block_stride = source ? loop.src_block_stride : loop.dst_block_stride;
      const std::uint64_t* strides = source ? loop.src_strides : loop.dst_strides;
      for (; pair_ < piece_.num_pairs; ++pair_, i_ = 0) {
        const std::uint64_t pair_offset = layer_offset + blocks[pair_] * block_stride;
        for (; i_ < loop.counts[0]; ++i_, j_ = 0) {
          for (; j_ < loop.counts[1]; ++j_, within_ = 0) {
            if (left == 0) return max_nbytes;
            const std::uint64_t offset = pair_offset + i_ * strides[0] + j_ * strides[1] + within_;
            const std::uint64_t nbytes = std::min(loop.nbytes - within_, left);
            if (!take(move_->local_base + offset, nbytes)) return max_nbytes - left;
            left -= nbytes;
            within_ += nbytes;
            if (within_ < loop.nbytes) return max_nbytes;  // `left` ended inside this run
          }
        }
      }
    }
    return max_nbytes - left;
  }

  const Move* move_ = nullptr;
  Piece piece_;
  End end_ = End::kSource;
  std::size_t loop_ = 0;
  std::uint32_t pair_ = 0, i_ = 0, j_ = 0;
  std::uint64_t within_ = 0;  // bytes of the current run that are already named
};

}  // namespace kvxfer::tcp
