#include "transports/shm/foreign_reader.h"

#include <algorithm>
#include <cerrno>

#include "core/copy/executor.h"

namespace kvxfer::shm {
namespace {

// Bytes of short runs that are read at a time: few enough to be in the L2 cache still when they are spread.
constexpr std::size_t kBufferNbytes = SlicedCopy::kChunkNbytes;

// To find a run costs the kernel as much as to read 2 to 3 KiB. Where the next run begins this close behind,
// both are read together with the bytes between.
constexpr std::uint64_t kTogetherNbytes = 2048;

// The bytes from the first run to the last, and whether one read takes them all. Where a block spans all
// runs, the bytes between them belong to that block.
bool is_together(std::uint64_t span, std::uint64_t num_runs, std::uint64_t block_stride) noexcept {
  return num_runs > 1 && span <= block_stride && span <= num_runs * kTogetherNbytes;
}

std::uint64_t row_nbytes(const CopyLoop& loop) noexcept {
  return (loop.counts[1] - 1) * loop.src_strides[1] + loop.nbytes;
}

// Whether reading through the buffer needs fewer look-ups than reading into place, or is the only way.
bool needs_buffer(const CopyProgram& program) noexcept {
  return !program.conversions.empty() ||
         std::any_of(program.loops.begin(), program.loops.end(), [](const CopyLoop& loop) {
           return loop.grain == kCoarse && loop.nbytes < kTogetherNbytes &&
                  is_together(row_nbytes(loop), loop.counts[1], loop.src_block_stride);
         });
}

}  // namespace

Status ForeignReader::fetch_pairs(const ForeignMemory& memory, const Move& move, const Piece& pairs,
                                  std::uint64_t remote_base) {
  return needs_buffer(*move.program) ? fetch_cells(memory, move, pairs, remote_base)
                                     : fetch_runs(memory, move, pairs, remote_base);
}

Result<const std::byte*> ForeignReader::read(const ForeignMemory& memory, std::uint64_t address,
                                             std::size_t nbytes) {
  if (buffer_.size() < nbytes) buffer_.resize(2 * kBufferNbytes);
  named_.assign(1, {reinterpret_cast<void*>(address), nbytes});
  buffer_nbytes_ = nbytes;
  Status status = read_buffer(memory);
  named_.clear();
  buffer_nbytes_ = 0;
  if (!status.ok()) return status;
  return buffer_.data();
}

Status ForeignReader::fetch_runs(const ForeignMemory& memory, const Move& move, const Piece& piece,
                                 std::uint64_t remote_base) {
  std::size_t num_runs = 0;
  Status status;
  for_each_run(move.program->view_of(piece.layer), piece, move.src_ids.data(), move.dst_ids.data(),
               [&](std::uint64_t src_offset, std::uint64_t dst_offset, std::uint64_t nbytes) {
                 if (!status.ok()) return;
                 local_[num_runs] = {move.local->base + dst_offset, nbytes};
                 remote_[num_runs] = {reinterpret_cast<void*>(remote_base + src_offset), nbytes};
                 if (++num_runs < kMaxRuns) return;
                 status = read_runs(memory, num_runs);
                 num_runs = 0;
               });
  if (status.ok() && num_runs != 0) status = read_runs(memory, num_runs);
  return status;
}

Status ForeignReader::fetch_cells(const ForeignMemory& memory, const Move& move, const Piece& piece,
                                  std::uint64_t remote_base) {
  named_.clear();
  fetched_.clear();
  buffer_nbytes_ = 0;
  Status status;
  for_each_cell(move.program->view_of(piece.layer), piece, move.src_ids.data(), move.dst_ids.data(),
                [&](const Cell& cell) {
                  if (!status.ok()) return;
                  Fetched& fetched = fetched_.emplace_back(
                      Fetched{cell, *cell.loop, move.program->conversion_of(*cell.loop), 0, 0, {}});
                  CopyLoop& loop = fetched.loop;
                  fetched.src = name(remote_base + cell.src, loop.counts, loop.src_strides, loop.nbytes,
                                     loop.src_block_stride);
                  if (const Conversion* conversion = fetched.conversion;
                      conversion != nullptr && conversion->src_scales == ScalePlace::kRegion) {
                    // An axis along which the scale is the same counts 1.
                    std::uint32_t counts[2];
                    for (int axis = 0; axis < 2; ++axis) {
                      fetched.scale_strides[axis] = conversion->src_strides[axis];
                      counts[axis] = conversion->src_strides[axis] == 0 ? 1 : loop.counts[axis];
                    }
                    fetched.scales = name(remote_base + src_scales_at(cell, *conversion), counts,
                                          fetched.scale_strides, sizeof(float), conversion->src_block_stride);
                  }
                  if (buffer_nbytes_ >= kBufferNbytes || named_.size() >= kMaxRuns)
                    status = land(memory, move);
                });
  if (status.ok() && !fetched_.empty()) status = land(memory, move);
  copy_fence();
  return status;
}

// Names an operand of a cell for the next read, behind what is named already: [counts[0], counts[1]] runs
// from `at` on. Returns its place in the buffer, and its strides there in `strides`.
std::size_t ForeignReader::name(std::uint64_t at, const std::uint32_t* counts, std::uint64_t* strides,
                                std::uint64_t nbytes, std::uint64_t block_stride) {
  const std::size_t place = buffer_nbytes_;
  const auto take = [this](std::uint64_t from, std::uint64_t length) {
    named_.push_back({reinterpret_cast<void*>(from), length});
    buffer_nbytes_ += length;
  };
  const std::uint64_t row = (counts[1] - 1) * strides[1] + nbytes;
  const std::uint64_t all = (counts[0] - 1) * strides[0] + row;
  if (is_together(all, std::uint64_t{counts[0]} * counts[1], block_stride)) {
    take(at, all);
    return place;
  }
  const bool rows = is_together(row, counts[1], block_stride);
  for (std::uint32_t i = 0; i < counts[0]; ++i) {
    const std::uint64_t begin = at + i * strides[0];
    if (rows) {
      take(begin, row);
      continue;
    }
    for (std::uint32_t j = 0; j < counts[1]; ++j) take(begin + j * strides[1], nbytes);
  }
  if (!rows) strides[1] = nbytes;
  strides[0] = rows ? row : nbytes * counts[1];
  return place;
}

// Reads what is named into the buffer, and spreads it.
Status ForeignReader::land(const ForeignMemory& memory, const Move& move) {
  if (buffer_.size() < buffer_nbytes_) buffer_.resize(std::max(buffer_nbytes_, 2 * kBufferNbytes));
  Status status = read_buffer(memory);
  for (const Fetched& fetched : fetched_) {
    if (!status.ok()) break;
    const std::byte* src = buffer_.data() + fetched.src;
    std::byte* dst = move.local->base + fetched.cell.dst;
    if (fetched.conversion == nullptr) {
      copy_cell(fetched.loop, nullptr, src, dst, {});
      continue;
    }
    CellScales scales =
        scales_of(move.program->view(), *fetched.conversion, fetched.cell, nullptr, move.local->base);
    Conversion conversion = *fetched.conversion;
    if (conversion.src_scales == ScalePlace::kRegion) {
      scales.src = buffer_.data() + fetched.scales;
      for (int axis = 0; axis < 2; ++axis)
        conversion.src_strides[axis] =
            fetched.conversion->src_strides[axis] == 0 ? 0 : fetched.scale_strides[axis];
    }
    copy_cell(fetched.loop, &conversion, src, dst, scales);
  }
  named_.clear();
  fetched_.clear();
  buffer_nbytes_ = 0;
  return status;
}

Status ForeignReader::read_buffer(const ForeignMemory& memory) {
  std::byte* at = buffer_.data();
  for (std::size_t first = 0; first < named_.size();) {
    const std::size_t num = std::min(named_.size() - first, kMaxRuns);
    iovec local{at, static_cast<std::size_t>(buffer_.data() + buffer_nbytes_ - at)};
    const ssize_t result = ::process_vm_readv(memory.pid(), &local, 1, &named_[first], num, 0);
    if (result < 0 && errno == EINTR) continue;
    if (result < 0) return memory.failed(errno);
    if (result == 0) return {Code::kSystem, "process_vm_readv moved nothing"};
    at += result;
    auto left = static_cast<std::size_t>(result);
    while (first < named_.size() && left >= named_[first].iov_len) left -= named_[first++].iov_len;
    if (left != 0) {
      named_[first].iov_base = static_cast<std::byte*>(named_[first].iov_base) + left;
      named_[first].iov_len -= left;
    }
  }
  return {};
}

Status ForeignReader::read_runs(const ForeignMemory& memory, std::size_t num_runs) {
  std::size_t first = 0;
  while (first < num_runs) {
    const ssize_t result = ::process_vm_readv(memory.pid(), &local_[first], num_runs - first, &remote_[first],
                                              num_runs - first, 0);
    if (result < 0 && errno == EINTR) continue;
    if (result < 0) return memory.failed(errno);
    if (result == 0) return {Code::kSystem, "process_vm_readv moved nothing"};
    // Runs have the same length on both sides, so both lists advance together.
    auto left = static_cast<std::size_t>(result);
    while (first < num_runs && left >= local_[first].iov_len) left -= local_[first++].iov_len;
    if (left != 0) {
      local_[first] = {static_cast<std::byte*>(local_[first].iov_base) + left, local_[first].iov_len - left};
      remote_[first] = {static_cast<std::byte*>(remote_[first].iov_base) + left,
                        remote_[first].iov_len - left};
    }
  }
  return {};
}

}  // namespace kvxfer::shm
