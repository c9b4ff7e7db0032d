#include "gpu/calibrate.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

namespace kvxfer::gpu {
namespace {

constexpr std::uint64_t kPieceNbytes = Calibration::kLeastCopyNbytes;
constexpr std::uint32_t kNumPieces = 16;  // by arithmetic 160 us at 25 GB/s, beside which clocks are exact
constexpr int kRounds = 5;
constexpr std::uint64_t kRunNbytes[] = {256 * 1024, 64 * 1024, 16 * 1024, 4 * 1024};

std::uint64_t now_ns() noexcept {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

// Runs twice their length apart at one end and side by side at the other.
CopyLoop loop_of(Direction direction, Form form, std::uint64_t run_nbytes) noexcept {
  CopyLoop loop{};
  loop.num_layers = 1;
  loop.nbytes = run_nbytes;
  loop.counts[0] = 1;
  loop.counts[1] = form == Form::kRows ? static_cast<std::uint32_t>(kPieceNbytes / run_nbytes) : 1;
  const std::uint64_t block = run_nbytes * loop.counts[1];
  const bool to_host = direction == Direction::kToHost;
  loop.src_block_stride = to_host ? 2 * block : block;
  loop.dst_block_stride = to_host ? block : 2 * block;
  loop.src_strides[1] = to_host ? 2 * run_nbytes : run_nbytes;
  loop.dst_strides[1] = to_host ? run_nbytes : 2 * run_nbytes;
  return loop;
}

// Memory at both ends, and the stream.
class Bench {
 public:
  Bench(const Driver& driver, Context context) : driver_(driver), context_(context) {}
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench() {
    stream_.reset();  // waits
    const ContextScope scope(driver_, context_);
    if (device_ != 0) driver_.memory_free(device_);
    if (host_ != nullptr) driver_.host_free(host_);
  }

  Status open(const Kernels& kernels, const CopyStreamOptions& options) {
    {
      const ContextScope scope(driver_, context_);
      constexpr std::uint64_t kNbytes = kNumPieces * kPieceNbytes;
      if (const int error = driver_.host_allocate(&host_, kNbytes, kPortable | kDeviceMap); error != 0)
        return driver_.status(error, "cuMemHostAlloc to calibrate copies");
      if (const int error = driver_.memory_allocate(&device_, 2 * kNbytes + kKernelAlignment); error != 0)
        return driver_.status(error, "cuMemAlloc to calibrate copies");
    }
    Result<std::unique_ptr<CopyStream>> stream = CopyStream::create(driver_, context_, kernels, options);
    if (!stream.ok()) return stream.status();
    stream_ = std::move(stream).value();
    return {};
  }

  // What it takes at best one way, after a round that does not count.
  Result<std::uint64_t> measure(const Sample& sample, Way way, std::uint64_t until_ns) {
    stream_->set_calibration(way == Way::kCopyEngine ? Calibration::always() : Calibration());
    CopyProgram program;
    program.num_layers = 1;
    program.loops = {loop_of(sample.direction, sample.form, sample.run_nbytes)};
    std::uint64_t best = UINT64_MAX;
    for (int round = 0; round <= kRounds && (round < 2 || now_ns() < until_ns); ++round) {
      const Result<std::uint64_t> taken = measure_once(program, sample);
      if (!taken.ok()) return taken.status();
      if (round != 0) best = std::min(best, taken.value());
    }
    return best;
  }

  bool has_copy_engines() const noexcept { return stream_->has_copy_engines(); }

 private:
  Result<std::uint64_t> measure_once(const CopyProgram& program, const Sample& sample) {
    const Address apart = device_ + (sample.alignment == kKernelAlignment ? 0 : kLooseAlignment);
    const Placement device(apart), host(reinterpret_cast<Address>(host_));
    const bool to_host = sample.direction == Direction::kToHost;
    const auto num_pairs =
        sample.form == Form::kRows ? 1 : static_cast<std::uint32_t>(kPieceNbytes / sample.run_nbytes);
    const std::uint32_t num_ids = num_pairs * kNumPieces;  // a power of two
    packed_.resize(num_pairs);
    pages_.resize(num_pairs);
    CopyStream::Ticket last = 0;
    const std::uint64_t begin = now_ns();
    for (std::uint32_t piece = 0; piece < kNumPieces; ++piece) {
      for (std::uint32_t k = 0; k < num_pairs; ++k) {
        packed_[k] = piece * num_pairs + k;
        pages_[k] = packed_[k] * 5 % num_ids;  // each once, none beside the one before
      }
      const Part part{0, 1, num_pairs, 0};
      const Result<CopyStream::Ticket> ticket =
          to_host ? stream_->submit(program, part, pages_, packed_, device, host, sample.direction)
                  : stream_->submit(program, part, packed_, pages_, host, device, sample.direction);
      if (!ticket.ok()) return ticket.status();
      last = ticket.value();
    }
    while (stream_->done() < last) {
      if (Status status = stream_->check(); !status.ok()) return status;
      std::this_thread::yield();
    }
    return now_ns() - begin;
  }

  const Driver& driver_;
  const Context context_;
  void* host_ = nullptr;
  Address device_ = 0;
  std::unique_ptr<CopyStream> stream_;
  std::vector<std::uint32_t> packed_, pages_;
};

Status no_engines() {
  return {
      Code::kUnsupported,
      "the NVIDIA driver has no batches of copies (cuMemcpyBatchAsync, CUDA 12.8) for this device: copies "
      "go by kernels"};
}

}  // namespace

Result<std::vector<Sample>> calibrate(const Driver& driver, Context context, const Kernels& kernels,
                                      const CopyStreamOptions& options, std::uint64_t most_ns) {
  if (!driver.has_copy_engines()) return no_engines();
  const std::uint64_t until = now_ns() + most_ns;
  Bench bench(driver, context);
  if (Status opened = bench.open(kernels, options); !opened.ok()) return opened;
  std::vector<Sample> samples;
  for (const std::uint32_t alignment : {kKernelAlignment, kLooseAlignment})
    for (const std::uint64_t run_nbytes : kRunNbytes)
      for (const Form form : {Form::kRuns, Form::kRows})
        for (const Direction direction : {Direction::kToHost, Direction::kToDevice}) {
          if (form == Form::kRows && run_nbytes >= kMostRowNbytes) continue;
          if (now_ns() >= until) return samples;
          Sample sample{direction, form, alignment, run_nbytes, 0, 0};
          for (const Way way : {Way::kKernel, Way::kCopyEngine}) {
            const Result<std::uint64_t> taken = bench.measure(sample, way, until);
            if (!taken.ok()) return taken.status();
            (way == Way::kKernel ? sample.kernel_ns : sample.engine_ns) = taken.value();
          }
          if (!bench.has_copy_engines()) return no_engines();
          samples.push_back(sample);
        }
  return samples;
}

}  // namespace kvxfer::gpu
