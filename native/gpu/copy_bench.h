// Timed copies between a GPU and pinned memory of the host.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/copy_stream.h"
#include "gpu/copy_way.h"
#include "gpu/driver.h"
#include "kvxfer/status.h"

namespace kvxfer::gpu {

// The piece that is copied again and again. Its runs lie apart on the device, and side by side on the host.
struct BenchPiece {
  Direction direction;
  Form form;
  std::uint32_t alignment;   // kKernelAlignment or kLooseAlignment
  std::uint64_t run_nbytes;  // run, piece and kBenchNbytes are powers of two
  std::uint64_t piece_nbytes;
};

// 160 us at 25 GB/s by arithmetic, for which the clock is exact enough.
inline constexpr std::uint64_t kBenchNbytes = 4 * 1024 * 1024;

// Memory at both ends, and the stream.
class CopyBench {
 public:
  CopyBench(const Driver& driver, Context context) : driver_(driver), context_(context) {}
  CopyBench(const CopyBench&) = delete;
  CopyBench& operator=(const CopyBench&) = delete;
  ~CopyBench();  // waits for its own copies

  Status open(const Kernels& kernels, const CopyStreamOptions& options);

  // Copies kBenchNbytes, piece after piece without a pause. Returns the ns from the first piece's submission
  // to the last one's end.
  Result<std::uint64_t> measure(const BenchPiece& piece);

  void set_num_ctas(std::uint32_t num_ctas) noexcept { stream_->set_num_ctas(num_ctas); }
  // For all later copies that can go either way.
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
