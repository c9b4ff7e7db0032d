#include "core/sliced_copy.h"

#include <algorithm>
#include <cstring>

#include "core/convert.h"

namespace kvxfer {
namespace {

constexpr std::uint64_t kRunCost = 64, kLoopCost = 16;

std::uint64_t cost_of_pair(const CopyProgram& program, const Piece& piece) noexcept {
  std::uint64_t cost = 0;
  for (const CopyLoop& loop : program.loops) {
    cost += kLoopCost;
    if (piece.layer - loop.first_layer >= loop.num_layers || piece.begin(loop.grain) == piece.end(loop.grain))
      continue;
    std::uint64_t run, runs = std::uint64_t{loop.counts[0]} * loop.counts[1];
    if (__builtin_add_overflow(loop.nbytes, kRunCost, &run) || __builtin_mul_overflow(runs, run, &runs) ||
        __builtin_add_overflow(cost, runs, &cost))
      return UINT64_MAX;
  }
  return cost;
}

float as_float(const std::byte* at) noexcept {
  float value;
  std::memcpy(&value, at, sizeof value);  // a region's scales need not be aligned
  return value;
}

}  // namespace

// A cell that is more than a slice, run by run and a long run chunk by chunk.
class SlicedCopy::OneCell {
 public:
  OneCell(const Move& move, const Cell& cell, Place& place) noexcept
      : move_(move),
        cell_(cell),
        loop_(*cell.loop),
        conversion_(move.program->conversion_of(loop_)),
        place_(place) {
    if (conversion_ == nullptr) return;
    scaling_.has_src = conversion_->src_scales != ScalePlace::kNone;
    scaling_.has_dst = conversion_->dst_scales != ScalePlace::kNone;
    scaling_.saturate = conversion_->saturate != 0;
    if (!conversion_->finds_scales()) return;
    // An axis along which the scale stays is inside a granule; along the others granules follow each other.
    for (int axis = 0; axis < 2; ++axis)
      if (conversion_->dst_strides[axis] != 0) granules_[axis] = loop_.counts[axis];
  }

  // Returns whether the cell's end is reached; else the slice's is.
  Result<bool> advance(CopySource& source, std::uint64_t& cost, std::uint64_t slice_cost) {
    const std::uint64_t num_granules = std::uint64_t{granules_[0]} * granules_[1];
    const std::uint64_t inner = loop_.counts[1] / granules_[1];
    const std::uint64_t num_runs = loop_.counts[0] / granules_[0] * inner;
    const bool finds = conversion_ != nullptr && conversion_->finds_scales();
    for (; place_.granule < num_granules; place_ = {place_.granule + 1}) {
      const std::uint64_t a = place_.granule / granules_[1], b = place_.granule % granules_[1];
      for (;;) {
        for (; place_.run < num_runs; ++place_.run, place_.at = 0) {
          const std::uint64_t i = a + place_.run / inner, j = b + place_.run % inner;
          cost += kRunCost;
          while (place_.at < loop_.nbytes) {
            if (cost >= slice_cost) return false;
            const std::size_t nbytes = std::min<std::uint64_t>(loop_.nbytes - place_.at, kChunkNbytes);
            if (Status taken = take(source, i, j, nbytes, finds && !place_.is_scale_known); !taken.ok())
              return taken;
            place_.at += nbytes;
            cost += nbytes;
          }
        }
        if (!finds || place_.is_scale_known) break;
        place_.scale = scale_for(conversion_->dst_dtype, place_.amax);
        std::memcpy(move_.local->base + found_scale_offset(cell_, *conversion_, place_.granule),
                    &place_.scale, sizeof place_.scale);
        place_.is_scale_known = true;
        place_.run = 0;
      }
    }
    return true;
  }

 private:
  // Of run (i, j) the next bytes: are copied, converted, or looked at for their largest magnitude.
  Status take(CopySource& source, std::uint64_t i, std::uint64_t j, std::size_t nbytes, bool looks) {
    const std::uint64_t from = cell_.src + i * loop_.src_strides[0] + j * loop_.src_strides[1] + place_.at;
    std::byte* const to = move_.local->base + cell_.dst + i * loop_.dst_strides[0] + j * loop_.dst_strides[1];
    if (Status scaled = set_scales(source, i, j); !scaled.ok()) return scaled;
    const Result<const std::byte*> bytes = source.read(from, nbytes);
    if (!bytes.ok()) return bytes.status();
    if (conversion_ == nullptr) {
      copy_run(to + place_.at, bytes.value(), nbytes);
      return {};
    }
    const std::size_t item = itemsize(conversion_->src_dtype), count = nbytes / item;
    if (looks)
      place_.amax = std::max(place_.amax, amax_run(conversion_->src_dtype, bytes.value(), count, scaling_));
    else
      convert_run(conversion_->src_dtype, bytes.value(), conversion_->dst_dtype,
                  to + place_.at / item * itemsize(conversion_->dst_dtype), count, scaling_,
                  {.next = nullptr, .stream = true});
    return {};
  }

  Status set_scales(CopySource& source, std::uint64_t i, std::uint64_t j) {
    if (conversion_ == nullptr) return {};
    const std::vector<float>& table = move_.program->scales;
    const Conversion& c = *conversion_;
    if (scaling_.has_src) {
      const std::uint64_t at = c.src_offset + cell_.layer * c.src_layer_stride +
                               cell_.src_block * c.src_block_stride + i * c.src_strides[0] +
                               j * c.src_strides[1];
      if (c.src_scales == ScalePlace::kProgram) {
        scaling_.src = table[at];
      } else {
        const Result<const std::byte*> scale = source.read(at, sizeof(float));
        if (!scale.ok()) return scale.status();
        scaling_.src = as_float(scale.value());
      }
    }
    if (c.dst_scales == ScalePlace::kProgram)
      scaling_.dst =
          table[c.dst_offset + cell_.layer * c.dst_layer_stride + cell_.dst_block * c.dst_block_stride +
                i * c.dst_strides[0] + j * c.dst_strides[1]];
    if (c.finds_scales()) scaling_.dst = place_.scale;
    return {};
  }

  const Move& move_;
  const Cell& cell_;
  const CopyLoop& loop_;
  const Conversion* const conversion_;
  Place& place_;
  std::uint32_t granules_[2] = {1, 1};
  Scaling scaling_;
};

SlicedCopy::SlicedCopy(const Move& move, std::uint32_t piece, std::uint64_t slice_cost) noexcept
    : move_(&move),
      left_(move.grid.piece(piece)),
      slice_cost_(slice_cost),
      pair_cost_(cost_of_pair(*move.program, left_)) {}

Result<std::uint64_t> SlicedCopy::advance(CopySource& source) {
  std::uint64_t cost = 0;
  Status status;
  if (pair_cost_ <= slice_cost_) {
    const auto num =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(left_.num_pairs, slice_cost_ / pair_cost_));
    cost = num * pair_cost_;
    status = source.copy(*move_, take_pairs(num));
  } else {
    status = advance_pair(source, cost);
    copy_fence();
  }
  if (!status.ok()) return status;
  return cost;
}

Piece SlicedCopy::take_pairs(std::uint32_t num) noexcept {
  const std::uint32_t num_coarse = left_.num_pairs - left_.num_fine;
  const Piece taken{left_.layer, left_.first_pair, num, num > num_coarse ? num - num_coarse : 0};
  left_.first_pair += num;
  left_.num_pairs -= num;
  left_.num_fine -= taken.num_fine;
  return taken;
}

Status SlicedCopy::advance_pair(CopySource& source, std::uint64_t& cost) {
  const CopyProgram& program = *move_->program;
  const std::uint32_t pair = left_.first_pair;
  const std::uint32_t grain = left_.num_pairs > left_.num_fine ? kCoarse : kFine;
  for (; loop_ < program.loops.size(); ++loop_, place_ = {}) {
    const CopyLoop& loop = program.loops[loop_];
    const std::uint32_t layer = left_.layer - loop.first_layer;  // wraps below first_layer
    cost += kLoopCost;
    if (layer >= loop.num_layers || loop.grain != grain) continue;
    const Cell cell = cell_of(loop, program.units[grain], layer, move_->src_ids[pair], move_->dst_ids[pair]);
    const Result<bool> ended = OneCell(*move_, cell, place_).advance(source, cost, slice_cost_);
    if (!ended.ok()) return ended.status();
    if (!ended.value()) return {};
  }
  loop_ = 0;
  take_pairs(1);
  return {};
}

}  // namespace kvxfer
