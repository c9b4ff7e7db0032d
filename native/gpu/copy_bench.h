// Copies between a GPU and pinned memory of the host whose time is taken.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/copy_stream.h"
#include "gpu/copy_way.h"
#include "gpu/driver.h"
#include "kvxfer/status.h"

namespace kvxfer::gpu {

// What is copied at a time, again and again: runs that lie apart on the device, side by side on the host.
struct BenchPiece {
  Direction direction;
  Form form;
  std::uint32_t alignment;   // kKernelAlignment or kLooseAlignment
  std::uint64_t run_nbytes;  // run, piece and kBenchNbytes are powers of two
  std::uint64_t piece_nbytes;
};

// By arithmetic 160 us at 25 GB/s, beside which clocks are exact.
inline constexpr std::uint64_t kBenchNbytes = 4 * 1024 * 1024;

// Memory at both ends, and the stream.
class CopyBench {
 public:
  CopyBench(const Driver& driver, Context context) : driver_(driver), context_(context) {}
  CopyBench(const CopyBench&) = delete;
  CopyBench& operator=(const CopyBench&) = delete;
  ~CopyBench();  // waits for its own copies

  Status open(const Kernels& kernels, const CopyStreamOptions& options);

  // What kBenchNbytes take, piece behind piece without a pause: from the first's submission to the last's
  // end, in ns.
  Result<std::uint64_t> measure(const BenchPiece& piece);

  void set_num_ctas(std::uint32_t num_ctas) noexcept { stream_->set_num_ctas(num_ctas); }
  // Of everything from now on that can go either way.
  void set_way(Way way) noexcept {
    stream_->set_calibration(way == Way::kCopyEngine ? Calibration::always() : Calibration());
  }
  bool has_copy_engines() const noexcept { return stream_->has_copy_engines(); }

 private:
  const Driver& driver_;
  const Context context_;
  void* host_ = nullptr;
  Address device_ = 0;
  std::unique_ptr<CopyStream> stream_;
  std::vector<std::uint32_t> packed_, pages_;
};

}  // namespace kvxfer::gpu
