// A place within a piece, from which its cells are visited in slices. So copying, packing or summing a piece
// stops when we say, however much a peer's program puts into one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/copy/convert_cell.h"
#include "core/copy/work.h"
#include "kvxfer/copy_program.h"

namespace kvxfer {

// How much of a piece is done before the thread looks at something else: about 0.1 ms of copying.
inline constexpr std::uint64_t kSliceNbytes = 1024 * 1024;

// What a slice is counted in.
enum class SliceUnit : std::uint8_t {
  kWork,  // what it costs (core/copy/work.h). A slice may exceed its bound by a few KiB, and by a cell that
  // finds scales.
  kCopied,  // the same, but a cell that finds scales is cut like any other. Granule by granule, whose runs are
  // visited twice: first looked at, then converted once the scale is known.
  kPacked,  // bytes as they cross a stream. A slice never exceeds its bound, which holds least_room().
};

// Visits in program order, as for_each_cell does, and cuts runs at elements. A cell that finds scales is not
// cut when it is packed or summed, since a scale is known only after its last element; check_program bounds
// such cells. The program and the ids must outlive the cursor.
class PieceCursor {
 public:
  PieceCursor() = default;
  PieceCursor(const CopyProgram& program, const Piece& piece, const std::uint32_t* src_ids,
              const std::uint32_t* dst_ids) noexcept
      : program_(&program),
        piece_(piece),
        src_ids_(src_ids),
        dst_ids_(dst_ids),
        loop_(program.loops_of(piece.layer).first),
        end_(program.loops_of(piece.layer).second) {}

  // Calls visit(part) for the parts that come next, `bound` in all. Returns how much of that it visited.
  template <class Visit>
  std::uint64_t advance(std::uint64_t bound, SliceUnit unit, Visit&& visit) {
    std::uint64_t left = bound;
    for (; loop_ < end_; ++loop_, pair_ = 0) {
      const CopyLoop& loop = program_->loops[loop_];
      const std::uint32_t layer = piece_.layer - loop.first_layer;  // wraps below first_layer
      const std::uint32_t first = piece_.begin(loop.grain), num_pairs = piece_.end(loop.grain) - first;
      if (layer >= loop.num_layers || num_pairs == 0) {
        if (unit == SliceUnit::kPacked) continue;
        if (left == 0) return bound;
        left -= std::min(left, kLoopWork);
        continue;
      }
      const Conversion* conversion = program_->conversion_of(loop);
      const Weights weights = weigh(loop, conversion, unit);
      for (; pair_ < num_pairs; ++pair_) {
        if (left == 0) return bound;
        const Cell cell = cell_of(loop, program_->units[loop.grain], layer, src_ids_[first + pair_],
                                  dst_ids_[first + pair_]);
        if (!weights.divisible && unit == SliceUnit::kCopied) {
          if (!visit_granules(cell, *conversion, weights.run, left, visit)) return bound - left;
          continue;
        }
        const bool is_cut = (i_ | j_ | within_) != 0;
        if (!is_cut &&
            (weights.cell <= left || (!weights.divisible && unit == SliceUnit::kWork && left == bound))) {
          visit(CellPart{&loop, &cell, 0, 0, cell.src, cell.dst, true});
          left -= std::min(left, weights.cell);
        } else if (!weights.divisible || !visit_parts(cell, conversion, weights.run, unit,
                                                      {0, 0, loop.counts[0], loop.counts[1]}, left, visit)) {
          return bound - left;
        }
      }
    }
    return bound - left;
  }

  bool done() const noexcept { return program_ == nullptr || loop_ == end_; }

 private:
  // A run is not cut below this size unless it must be, and a cut falls at a multiple of whole lines.
  static constexpr std::uint64_t kLeastCutNbytes = 4096;

  struct Weights {
    std::uint64_t run, cell;  // UINT64_MAX: beyond
    bool divisible;
  };

  static Weights weigh(const CopyLoop& loop, const Conversion* conversion, SliceUnit unit) noexcept {
    const bool divisible = conversion == nullptr || !conversion->finds_scales();
    if (unit != SliceUnit::kPacked)
      return {run_work(loop, conversion), cell_work(loop, conversion), divisible};
    const std::uint64_t run = dst_run_nbytes(loop, conversion);
    return {run,
            divisible ? work_product(work_product(run, loop.counts[1]), loop.counts[0])
                      : packed_nbytes(loop, conversion),
            divisible};
  }

  // Some runs of a cell.
  struct Box { std::uint32_t i, j, num_rows, num_columns; };

  // Along an axis with a scale stride of 0 runs share a granule; along the others granules follow each
  // other.
  template <class Visit>
  bool visit_granules(const Cell& cell, const Conversion& conversion, std::uint64_t run_weight,
                      std::uint64_t& left, Visit&& visit) {
    const std::uint32_t rows = cell.loop->counts[0], columns = cell.loop->counts[1];
    const bool down = conversion.dst_strides[0] != 0, across = conversion.dst_strides[1] != 0;
    const std::uint64_t num_across = across ? columns : 1, num_granules = (down ? rows : 1) * num_across;
    for (; granule_ < num_granules; ++granule_, has_looked_ = false) {
      const Box box{static_cast<std::uint32_t>(granule_ / num_across),
                    static_cast<std::uint32_t>(granule_ % num_across), down ? 1 : rows, across ? 1 : columns};
      for (;; has_looked_ = true) {
        const auto visit_one = [&](CellPart part) {
          part.granule = granule_;
          part.looks = !has_looked_;
          visit(part);
        };
        if (!visit_parts(cell, &conversion, run_weight, SliceUnit::kCopied, box, left, visit_one))
          return false;
        if (has_looked_) break;
      }
    }
    granule_ = 0;
    return true;
  }

  // Visits what is left of a box, in parts. False if `left` is used up before the box ends.
  template <class Visit>
  bool visit_parts(const Cell& cell, const Conversion* conversion, std::uint64_t run_weight, SliceUnit unit,
                   const Box& box, std::uint64_t& left, Visit&& visit) {
    const CopyLoop& loop = *cell.loop;
    const std::uint64_t src_item = conversion == nullptr ? 1 : itemsize(conversion->src_dtype);
    const std::uint64_t dst_item = conversion == nullptr ? 1 : itemsize(conversion->dst_dtype);
    const std::uint64_t row_weight = work_product(run_weight, box.num_columns);
    while (i_ < box.num_rows) {
      if (left == 0) return false;
      CopyLoop part = loop;
      const std::uint32_t i = box.i + i_, j = box.j + j_;
      const std::uint64_t within = within_;
      std::uint64_t weight;
      if (within_ == 0 && j_ == 0 && row_weight <= left) {
        part.counts[0] = least(box.num_rows - i_, left / row_weight);
        part.counts[1] = box.num_columns;
        weight = part.counts[0] * row_weight;
        i_ += part.counts[0];
      } else if (within_ == 0 && run_weight <= left) {
        part.counts[0] = 1;
        part.counts[1] = least(box.num_columns - j_, left / run_weight);
        weight = part.counts[1] * run_weight;
        j_ += part.counts[1];
      } else {
        std::uint64_t num = left / dst_item;
        if (unit != SliceUnit::kPacked) {
          const std::uint64_t most = std::max(left, kLeastCutNbytes) / std::max(src_item, dst_item);
          num = most / kRunWork * kRunWork;  // whole lines
        }
        num = std::min(num, (loop.nbytes - within_) / src_item);
        if (num == 0) return false;
        part.counts[0] = part.counts[1] = 1;
        part.nbytes = num * src_item;
        weight = num * (unit == SliceUnit::kPacked ? dst_item : std::max(src_item, dst_item));
        within_ += part.nbytes;
        if (within_ == loop.nbytes) {
          within_ = 0;
          ++j_;
        }
      }
      if (j_ == box.num_columns) {
        j_ = 0;
        ++i_;
      }
      visit(CellPart{
          &part, &cell, i, j, cell.src + i * loop.src_strides[0] + j * loop.src_strides[1] + within,
          cell.dst + i * loop.dst_strides[0] + j * loop.dst_strides[1] + within / src_item * dst_item,
          false});
      left -= std::min(left, weight);
    }
    i_ = 0;
    return true;
  }

  static std::uint32_t least(std::uint32_t a, std::uint64_t b) noexcept {
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(a, b));
  }

  const CopyProgram* program_ = nullptr;
  Piece piece_;
  const std::uint32_t* src_ids_ = nullptr;
  const std::uint32_t* dst_ids_ = nullptr;
  std::size_t loop_ = 0, end_ = 0;
  std::uint32_t pair_ = 0;  // of the piece's pairs of the loop's grain
  std::uint64_t granule_ = 0;  // kCopied: of the pair
  bool has_looked_ = false;  // it has looked at all runs of that granule
  std::uint32_t i_ = 0, j_ = 0;  // the run of the pair, or of the granule, that comes next
  std::uint64_t within_ = 0;  // bytes of it at the source that were visited
};

}  // namespace kvxfer
