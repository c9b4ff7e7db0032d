// A place within a piece. From there on the cursor turns the piece's runs into requests for a device or a
// library.
#pragma once

#include <cstdint>

#include "kvxfer/copy_program.h"
#include "kvxfer/half_loop.h"
#include "kvxfer/transport.h"
#include "transports/common/keyed_spans.h"

namespace kvxfer {

// Walks the cells of copy_program.h run by run, for programs without conversions. It can stop and go on: a
// piece may have more runs than a chain takes, and a run more bytes than a request. The move and the spans
// outlive the cursor.
//
// Chain: takes the runs by `std::uint64_t add(remote, remote_key, local, local_key, nbytes)`, which returns
// how many of the bytes found room; 0: the chain is full.
template <class Key>
class RequestCursorOf {
 public:
  enum class Stop : std::uint8_t {
    kDone,     // all of the piece is named
    kFull,     // the chain is full
    kTired,    // the allowed number of runs was looked at
    kOutside,  // a run is in no span: outside() says at which end
  };

  RequestCursorOf() = default;
  // For READs `local` is the destination, for WRITEs the source.
  RequestCursorOf(const Move& move, std::uint32_t piece, const KeyedSpansOf<Key>& remote,
                  const KeyedSpansOf<Key>& local, Side local_side) noexcept
      : move_(&move),
        piece_(move.grid.piece(piece)),
        is_write_(local_side == Side::kSrc),
        src_(is_write_ ? &local : &remote),
        dst_(is_write_ ? &remote : &local) {}

  // Adds the next runs to the chain. Subtracts the runs that it looked at from `num_runs`.
  template <class Chain>
  Stop advance(Chain& chain, std::uint32_t& num_runs) noexcept {
    const CopyProgram& program = *move_->program;
    for (; loop_ < program.loops.size(); ++loop_, pair_ = 0) {
      const CopyLoop& loop = program.loops[loop_];
      const std::uint32_t layer = piece_.layer - loop.first_layer;  // wraps below first_layer
      if (layer >= loop.num_layers || loop.nbytes == 0) continue;
      const std::uint32_t first = piece_.begin(loop.grain), num_pairs = piece_.end(loop.grain) - first;
      const bool is_one_run = loop.counts[0] == 1 && loop.counts[1] == 1;
      for (; pair_ < num_pairs; ++pair_, i_ = 0) {
        const Cell cell = cell_of(loop, program.units[loop.grain], layer, move_->src_ids[first + pair_],
                                  move_->dst_ids[first + pair_]);
        if (is_one_run) {  // the page of most layouts
          if (num_runs != 0 && within_ == 0 && is_in(src_span_, cell.src, loop.nbytes) &&
              is_in(dst_span_, cell.dst, loop.nbytes)) [[likely]] {
            within_ = name(chain, cell.src, cell.dst, loop.nbytes);
            if (within_ == 0) return Stop::kFull;
            --num_runs;
          }
          if (within_ != loop.nbytes) {
            const Stop stop = add(chain, num_runs, cell.src, cell.dst, loop.nbytes);
            if (stop != Stop::kDone) return stop;
          }
          within_ = 0;
          continue;
        }
        for (; i_ < loop.counts[0]; ++i_, j_ = 0)
          for (; j_ < loop.counts[1]; ++j_, within_ = 0) {
            const Stop stop =
                add(chain, num_runs, cell.src + i_ * loop.src_strides[0] + j_ * loop.src_strides[1],
                    cell.dst + i_ * loop.dst_strides[0] + j_ * loop.dst_strides[1], loop.nbytes);
            if (stop != Stop::kDone) return stop;
          }
      }
    }
    return Stop::kDone;
  }

  // The side at which a run was in no span.
  Side outside() const noexcept { return outside_; }

 private:
  // Adds the rest of a run.
  template <class Chain>
  Stop add(Chain& chain, std::uint32_t& num_runs, std::uint64_t src, std::uint64_t dst,
           std::uint64_t nbytes) noexcept {
    while (within_ < nbytes) {
      if (num_runs == 0) return Stop::kTired;
      --num_runs;
      const std::uint64_t from = src + within_, to = dst + within_;
      // A run nearly always lies in the same span as the one before it.
      if (src_span_ == nullptr || !src_span_->contains(from)) {
        src_span_ = src_->find(from);
        if (src_span_ == nullptr) return outside(Side::kSrc);
      }
      if (dst_span_ == nullptr || !dst_span_->contains(to)) {
        dst_span_ = dst_->find(to);
        if (dst_span_ == nullptr) return outside(Side::kDst);
      }
      std::uint64_t num = nbytes - within_;
      if (num > src_span_->end - from) num = src_span_->end - from;
      if (num > dst_span_->end - to) num = dst_span_->end - to;
      const std::uint64_t added = name(chain, from, to, num);
      if (added == 0) return Stop::kFull;
      within_ += added;
    }
    return Stop::kDone;
  }
  // Whether a run lies in the span of the run before it, as nearly all do.
  static bool is_in(const KeyedSpanOf<Key>* span, std::uint64_t at, std::uint64_t nbytes) noexcept {
    return span != nullptr && at >= span->offset && at < span->end && nbytes <= span->end - at;
  }
  // Hands bytes to the chain that lie in one span at either end.
  template <class Chain>
  std::uint64_t name(Chain& chain, std::uint64_t src, std::uint64_t dst, std::uint64_t nbytes) noexcept {
    const std::uint64_t src_at = src_span_->address + (src - src_span_->offset);
    const std::uint64_t dst_at = dst_span_->address + (dst - dst_span_->offset);
    return is_write_ ? chain.add(dst_at, dst_span_->key, src_at, src_span_->key, nbytes)
                     : chain.add(src_at, src_span_->key, dst_at, dst_span_->key, nbytes);
  }
  Stop outside(Side side) noexcept {
    outside_ = side;
    return Stop::kOutside;
  }

  const Move* move_ = nullptr;
  Piece piece_;
  bool is_write_ = false;
  const KeyedSpansOf<Key>*src_ = nullptr, *dst_ = nullptr;
  const KeyedSpanOf<Key>*src_span_ = nullptr, *dst_span_ = nullptr;
  std::size_t loop_ = 0;
  std::uint32_t pair_ = 0, i_ = 0, j_ = 0;
  std::uint64_t within_ = 0;  // bytes of the run that are named
  Side outside_ = Side::kSrc;
};

}  // namespace kvxfer
