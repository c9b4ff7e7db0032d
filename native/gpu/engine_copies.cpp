#include "gpu/engine_copies.h"

namespace kvxfer::gpu {

int EngineCopies::enqueue(std::span<const EngineShare> shares, std::span<const std::uint32_t> src_ids,
                          std::span<const std::uint32_t> dst_ids, Stream stream) noexcept {
  num_ = 0;
  for (const EngineShare& share : shares)
    if (const int error = add(share, src_ids, dst_ids, stream); error != 0) return error;
  return flush(stream);
}

int EngineCopies::add(const EngineShare& share, std::span<const std::uint32_t> src_ids,
                      std::span<const std::uint32_t> dst_ids, Stream stream) noexcept {
  const PairRuns runs = runs_of_pair(*share.loop);
  const bool in_rows = form_of(runs) == Form::kRows;
  int error = 0;
  for_each_pair(share, src_ids, dst_ids, [&](Address src, Address dst) {
    for (std::uint32_t i = 0; i < runs.counts[0] && error == 0; ++i) {
      const Address src_row = src + i * runs.src_strides[0], dst_row = dst + i * runs.dst_strides[0];
      if (in_rows) {
        error = add_rows(runs, src_row, dst_row, stream);
        continue;
      }
      for (std::uint32_t j = 0; j < runs.counts[1] && error == 0; ++j)
        error = add_run(src_row + j * runs.src_strides[1], dst_row + j * runs.dst_strides[1], runs.nbytes,
                        stream);
    }
  });
  return error;
}

int EngineCopies::add_run(Address src, Address dst, std::uint64_t nbytes, Stream stream) noexcept {
  if (num_ != 0) {
    const std::size_t last = num_ - 1;
    std::size_t& before = batch_->nbytes[last];
    if (batch_->src[last] + before == src && batch_->dst[last] + before == dst) {
      before += nbytes;
      return 0;
    }
  }
  if (num_ == kMostCopies)
    if (const int error = flush(stream); error != 0) return error;
  batch_->src[num_] = src;
  batch_->dst[num_] = dst;
  batch_->nbytes[num_++] = nbytes;
  return 0;
}

int EngineCopies::add_rows(const PairRuns& runs, Address src, Address dst, Stream stream) const noexcept {
  Copy2D copy;
  copy.src = src;
  copy.dst = dst;
  copy.src_pitch = runs.src_strides[1];
  copy.dst_pitch = runs.dst_strides[1];
  copy.width_nbytes = runs.nbytes;
  copy.height = runs.counts[1];
  return driver_.copy_2d(&copy, stream);
}

int EngineCopies::flush(Stream stream) noexcept {
  if (num_ == 0) return 0;
  CopyAttributes attributes;
  std::size_t first = 0, failed = 0;
  const std::size_t count = num_;
  num_ = 0;
  return driver_.copy_batch(batch_->dst.data(), batch_->src.data(), batch_->nbytes.data(), count, &attributes,
                            &first, 1, &failed, stream);
}

}  // namespace kvxfer::gpu
