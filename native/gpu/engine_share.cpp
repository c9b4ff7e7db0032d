#include "gpu/engine_share.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace kvxfer::gpu {
namespace {

// If an axis has several runs, one such axis becomes the inner one.
void put_runs_inside(PairRuns& runs) noexcept {
  if (runs.counts[1] != 1) return;
  std::swap(runs.counts[0], runs.counts[1]);
  std::swap(runs.src_strides[0], runs.src_strides[1]);
  std::swap(runs.dst_strides[0], runs.dst_strides[1]);
}

}  // namespace

PairRuns runs_of_pair(const CopyLoop& loop) noexcept {
  PairRuns runs{loop.nbytes,
                {loop.counts[0], loop.counts[1]},
                {loop.src_strides[0], loop.src_strides[1]},
                {loop.dst_strides[0], loop.dst_strides[1]}};
  for (put_runs_inside(runs);
       runs.counts[1] > 1 && runs.src_strides[1] == runs.nbytes && runs.dst_strides[1] == runs.nbytes;
       put_runs_inside(runs)) {
    runs.nbytes *= runs.counts[1];
    runs.counts[1] = 1;
  }
  return runs;
}

Form form_of(const PairRuns& runs) noexcept {
  const auto is_pitch = [&](std::uint64_t stride) { return stride >= runs.nbytes && stride <= kMostPitch; };
  const bool rows = runs.counts[1] > 1 && runs.nbytes < kMostRowNbytes && is_pitch(runs.src_strides[1]) &&
                    is_pitch(runs.dst_strides[1]);
  return rows ? Form::kRows : Form::kRuns;
}

Runs runs_of(const EngineShare& share, std::span<const std::uint32_t> src_ids,
             std::span<const std::uint32_t> dst_ids) noexcept {
  const PairRuns of_pair = runs_of_pair(*share.loop);
  const CopyLoop& loop = *share.loop;
  const HalfLoop src_half = half_of(loop, nullptr, share.units, Side::kSrc),
                 dst_half = half_of(loop, nullptr, share.units, Side::kDst);
  const std::uint64_t bits = bits_of(src_half, share.layers.src, loop, share.layers) |
                             bits_of(dst_half, share.layers.dst, loop, share.layers) | loop.nbytes;
  Runs out;
  out.alignment = 1u << std::countr_zero(bits | kKernelAlignment);
  out.form = form_of(of_pair);
  out.num = std::uint64_t{of_pair.counts[0]} * of_pair.counts[1] * share.num_pairs * share.layers.num;
  out.run_nbytes = of_pair.nbytes;
  if (of_pair.counts[0] != 1 || of_pair.counts[1] != 1) return out;
  const std::uint64_t nbytes = out.run_nbytes * out.num;
  Address src_end = 0, dst_end = 0;
  for_each_pair(share, src_ids, dst_ids, [&](Address src, Address dst) {
    if (src == src_end && dst == dst_end) --out.num;
    src_end = src + of_pair.nbytes;
    dst_end = dst + of_pair.nbytes;
  });
  out.run_nbytes = nbytes / out.num;
  return out;
}

}  // namespace kvxfer::gpu
