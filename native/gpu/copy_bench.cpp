#include "gpu/copy_bench.h"

#include <chrono>
#include <thread>
#include <utility>

namespace kvxfer::gpu {
namespace {

std::uint64_t now_ns() noexcept {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

// Makes a loop whose runs lie twice their length apart on the device, and side by side on the host.
CopyLoop loop_of(const BenchPiece& piece) noexcept {
  const std::uint64_t run_nbytes = piece.run_nbytes;
  CopyLoop loop{};
  loop.num_layers = 1;
  loop.nbytes = run_nbytes;
  loop.counts[0] = 1;
  loop.counts[1] =
      piece.form == Form::kRows ? static_cast<std::uint32_t>(piece.piece_nbytes / run_nbytes) : 1;
  const std::uint64_t block = run_nbytes * loop.counts[1];
  const bool to_host = piece.direction == Direction::kToHost;
  loop.src_block_stride = to_host ? 2 * block : block;
  loop.dst_block_stride = to_host ? block : 2 * block;
  loop.src_strides[1] = to_host ? 2 * run_nbytes : run_nbytes;
  loop.dst_strides[1] = to_host ? run_nbytes : 2 * run_nbytes;
  return loop;
}

}  // namespace

CopyBench::~CopyBench() {
  stream_.reset();  // waits
  const ContextScope scope(driver_, context_);
  if (device_ != 0) driver_.memory_free(device_);
  if (host_ != nullptr) driver_.host_free(host_);
}

Status CopyBench::open(const Kernels& kernels, const CopyStreamOptions& options) {
  {
    const ContextScope scope(driver_, context_);
    if (const int error = driver_.host_allocate(&host_, kBenchNbytes, kPortable | kDeviceMap); error != 0)
      return driver_.status(error, "cuMemHostAlloc to calibrate copies");
    if (const int error = driver_.memory_allocate(&device_, 2 * kBenchNbytes + kKernelAlignment); error != 0)
      return driver_.status(error, "cuMemAlloc to calibrate copies");
  }
  Result<std::unique_ptr<CopyStream>> stream = CopyStream::create(driver_, context_, kernels, options);
  if (!stream.ok()) return stream.status();
  stream_ = std::move(stream).value();
  return {};
}

Result<std::uint64_t> CopyBench::measure(const BenchPiece& piece) {
  CopyProgram program;
  program.num_layers = 1;
  program.loops = {loop_of(piece)};
  const Address apart = device_ + (piece.alignment == kKernelAlignment ? 0 : kLooseAlignment);
  const Placement device(apart), host(reinterpret_cast<Address>(host_));
  const auto num_pieces = static_cast<std::uint32_t>(kBenchNbytes / piece.piece_nbytes);
  const auto num_pairs =
      piece.form == Form::kRows ? 1 : static_cast<std::uint32_t>(piece.piece_nbytes / piece.run_nbytes);
  const std::uint32_t num_ids = num_pairs * num_pieces;  // a power of two
  packed_.resize(num_pairs);
  pages_.resize(num_pairs);
  CopyStream::Ticket last = 0;
  const std::uint64_t begin = now_ns();
  for (std::uint32_t index = 0; index < num_pieces; ++index) {
    for (std::uint32_t k = 0; k < num_pairs; ++k) {
      packed_[k] = index * num_pairs + k;
      pages_[k] = packed_[k] * 5 % num_ids;  // each page once, never two neighbours in a row
    }
    const Part part{0, 1, num_pairs, 0};
    const Result<CopyStream::Ticket> ticket =
        piece.direction == Direction::kToHost
            ? stream_->submit(program, part, pages_, packed_, device, host, piece.direction)
            : stream_->submit(program, part, packed_, pages_, host, device, piece.direction);
    if (!ticket.ok()) return ticket.status();
    last = ticket.value();
  }
  while (stream_->done() < last) {
    if (Status status = stream_->check(); !status.ok()) return status;
    std::this_thread::yield();
  }
  return now_ns() - begin;
}

}  // namespace kvxfer::gpu
