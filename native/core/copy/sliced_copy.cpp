#include "core/copy/sliced_copy.h"

#include <algorithm>
#include <cstring>

#include "core/copy/convert.h"
#include "core/copy/work.h"

namespace kvxfer {
namespace {

float as_float(const std::byte* at) noexcept {
  float value;
  std::memcpy(&value, at, sizeof value);  // a region's scales need not be aligned
  return value;
}

}  // namespace

SlicedCopy::SlicedCopy(const Move& move, const Piece& piece, std::uint64_t slice_cost) noexcept
    : move_(&move),
      left_(piece),
      slice_cost_(slice_cost),
      pair_cost_(std::max<std::uint64_t>(1, pair_work(*move.program, left_))),
      parts_(*move.program, left_, move.src_ids.data(), move.dst_ids.data()) {}

std::uint64_t SlicedCopy::cost() const noexcept {
  return work_sum(work_product(pair_cost_, left_.num_pairs), loops_work(*move_->program, left_.layer));
}

SlicedCopy SlicedCopy::take(std::uint64_t cost) noexcept {
  const std::uint64_t num = std::clamp<std::uint64_t>(cost / pair_cost_, 1, left_.num_pairs);
  SlicedCopy taken(*move_, take_pairs(static_cast<std::uint32_t>(num)), slice_cost_);
  parts_ = PieceCursor(*move_->program, left_, move_->src_ids.data(), move_->dst_ids.data());
  return taken;
}

Result<std::uint64_t> SlicedCopy::advance(CopySource& source) {
  std::uint64_t cost = 0;
  Status status;
  if (pair_cost_ <= slice_cost_) {
    const auto num =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(left_.num_pairs, slice_cost_ / pair_cost_));
    cost = num * pair_cost_ + loops_work(*move_->program, left_.layer);
    status = source.copy(*move_, take_pairs(num));
  } else {
    cost = parts_.advance(slice_cost_, SliceUnit::kCopied, [&](const CellPart& part) {
      if (status.ok()) status = take(source, part);
    });
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

// Copies the runs of a part. For a granule: finds the scale once all of its runs have been looked at.
Status SlicedCopy::take(CopySource& source, const CellPart& part) {
  if (part.looks && is_scale_known_) {
    is_scale_known_ = false;
    amax_ = 0;
  } else if (!part.looks && !is_scale_known_) {
    is_scale_known_ = true;
    const Conversion& conversion = *move_->program->conversion_of(*part.cell->loop);
    scale_ = scale_for(conversion.dst_dtype, amax_);
    std::memcpy(move_->local->base + found_scale_offset(*part.cell, conversion, part.granule), &scale_,
                sizeof scale_);
  }
  for (std::uint32_t i = 0; i < part.loop->counts[0]; ++i)
    for (std::uint32_t j = 0; j < part.loop->counts[1]; ++j)
      if (Status status = take_run(source, part, i, j); !status.ok()) return status;
  return {};
}

// Goes through run (i, j) of a part, chunk by chunk: copies it, converts it, or looks for its largest
// magnitude.
Status SlicedCopy::take_run(CopySource& source, const CellPart& part, std::uint32_t i, std::uint32_t j) {
  const CopyLoop& loop = *part.loop;
  const Conversion* const conversion = move_->program->conversion_of(loop);
  const std::uint64_t from = part.src + i * loop.src_strides[0] + j * loop.src_strides[1];
  std::byte* const to = move_->local->base + part.dst + i * loop.dst_strides[0] + j * loop.dst_strides[1];
  Scaling scaling;
  if (conversion != nullptr) {
    Result<Scaling> found = scales_of_run(source, part, part.i + i, part.j + j);
    if (!found.ok()) return found.status();
    scaling = found.value();
  }
  for (std::uint64_t at = 0; at < loop.nbytes; at += kChunkNbytes) {
    const std::size_t nbytes = std::min<std::uint64_t>(loop.nbytes - at, kChunkNbytes);
    const Result<const std::byte*> bytes = source.read(from + at, nbytes);
    if (!bytes.ok()) return bytes.status();
    if (conversion == nullptr) {
      copy_run(to + at, bytes.value(), nbytes);
      continue;
    }
    const std::size_t item = itemsize(conversion->src_dtype), count = nbytes / item;
    if (part.looks)
      amax_ = std::max(amax_, amax_run(conversion->src_dtype, bytes.value(), count, scaling));
    else
      convert_run(conversion->src_dtype, bytes.value(), conversion->dst_dtype,
                  to + at / item * itemsize(conversion->dst_dtype), count, scaling,
                  {.next = nullptr, .stream = true});
  }
  return {};
}

// The scales of run (i, j) of the part's cell.
Result<Scaling> SlicedCopy::scales_of_run(CopySource& source, const CellPart& part, std::uint32_t i,
                                          std::uint32_t j) {
  const Cell& cell = *part.cell;
  const Conversion& c = *move_->program->conversion_of(*part.loop);
  const std::vector<float>& table = move_->program->scales;
  Scaling scaling;
  scaling.has_src = c.src_scales != ScalePlace::kNone;
  scaling.has_dst = c.dst_scales != ScalePlace::kNone;
  scaling.saturate = c.saturate != 0;
  const std::uint64_t src = src_scales_at(cell, c) + i * c.src_strides[0] + j * c.src_strides[1];
  if (c.src_scales == ScalePlace::kProgram) scaling.src = table[src];
  if (c.src_scales == ScalePlace::kRegion) {
    const Result<const std::byte*> scale = source.read(src, sizeof(float));
    if (!scale.ok()) return scale.status();
    scaling.src = as_float(scale.value());
  }
  if (c.dst_scales == ScalePlace::kProgram)
    scaling.dst = table[dst_scales_at(cell, c) + i * c.dst_strides[0] + j * c.dst_strides[1]];
  if (c.finds_scales()) scaling.dst = scale_;
  return scaling;
}

}  // namespace kvxfer
