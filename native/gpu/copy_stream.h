// A CUDA stream on which copies run one after the other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>

#include "gpu/copy_way.h"
#include "gpu/cta_choice.h"
#include "gpu/driver.h"
#include "gpu/engine_copies.h"
#include "gpu/make_job.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/status.h"

namespace kvxfer::gpu {

// The kernels of a device. A null function means that the device does not have that kernel.
struct Kernels { std::array<Function, kNumKernels> functions{}; };

struct CopyStreamOptions {
  // At most this many CTAs per launch: enough for the rail's speed, and few enough for the model's kernels.
  std::uint32_t num_ctas = kUnmeasuredCtas;
  // At most this many bytes of block tables are under way.
  std::uint32_t tables_nbytes = 1024 * 1024;
  bool high_priority = true;
  // Which copies between device and host go by copy engines.
  Calibration calibration{};
};

// create() allocates everything that a copy needs; submit() neither allocates device memory nor waits. One
// thread at a time calls this. The caller keeps the memory until its copies have ended.
class CopyStream {
 public:
  using Ticket = std::uint64_t;  // names a submission; submissions end in order

  static Result<std::unique_ptr<CopyStream>> create(const Driver& driver, Context context,
                                                    const Kernels& kernels, const CopyStreamOptions& options);
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;
  ~CopyStream();  // waits for what was submitted

  // Copies a part of a transfer between two regions in memory that the device reaches, after everything
  // submitted before. The tables are the part's; this copies them. kAgain: tables of earlier copies still
  // take the room. kExhausted: these tables never fit. `direction` says whether one side is pinned memory of
  // the host, which the device cannot see; copy engines may then be faster. If the driver refuses the
  // engines, kernels copy from then on; that one time this waits for what is under way.
  Result<Ticket> submit(const CopyProgram& program, const Part& part, std::span<const std::uint32_t> src_ids,
                        std::span<const std::uint32_t> dst_ids, const Placement& src, const Placement& dst,
                        Direction direction = Direction::kOnDevice);

  // True if the tables of `num_pairs` pairs leave room for as many again, which can be submitted while the
  // first are under way.
  bool has_room_for_two(std::uint32_t num_pairs) const noexcept {
    return 4 * std::uint64_t{num_pairs} * sizeof(std::uint32_t) <= options_.tables_nbytes;
  }

  // Everything submitted from now on begins after the event.
  Status wait_for(Event event);

  // Returns the last ticket that is done, as are all before it. The calling thread sees their bytes.
  Ticket done() const noexcept;

  // Asks the device about work that does not end. kSystem: the device failed, and everything under way is
  // lost.
  Status check() const;

  // True while the device works on submitted copies; false also after the device has failed.
  bool is_running() const;

  // Waits until everything is done or has failed.
  Status synchronize();

  Stream handle() const noexcept { return stream_; }

  void set_num_ctas(std::uint32_t num_ctas) noexcept { options_.num_ctas = num_ctas; }

  // For later copies.
  void set_calibration(const Calibration& calibration) noexcept { options_.calibration = calibration; }
  // False if the driver has no calls for copy engines, or has refused them for this device.
  bool has_copy_engines() const noexcept { return engines_.work(); }

 private:
  struct Tables {
    Ticket ticket;
    std::uint32_t begin, nbytes;
  };

  CopyStream(const Driver& driver, Context context, const Kernels& kernels, const CopyStreamOptions& options)
      : driver_(driver), context_(context), kernels_(kernels), options_(options), engines_(driver) {}

  Status allocate();
  Result<std::uint32_t> reserve(std::uint64_t nbytes);
  Result<Ticket> submit_once(const CopyProgram& program, const Part& part,
                             std::span<const std::uint32_t> src_ids, std::span<const std::uint32_t> dst_ids,
                             const Placement& src, const Placement& dst, Direction direction);
  Status engines_fail(int error, const char* call);
  Status launch(const Launch& launch, Address scales);

  const Driver& driver_;
  Context context_;
  Kernels kernels_;
  CopyStreamOptions options_;
  EngineCopies engines_;

  Stream stream_ = nullptr;
  std::byte* host_tables_ = nullptr;  // pinned
  Address device_tables_ = 0;
  Address arrivals_ = 0;
  std::uint64_t* done_ = nullptr;  // pinned; written by the last kernel's last CTA, or by the stream itself
  Ticket last_ = 0;  // the last submission
  Status failed_;  // not ok: a launch failed, and nothing can be submitted any more
  std::deque<Tables> under_way_;
  std::uint32_t free_from_ = 0;  // in the tables' ring
};

}  // namespace kvxfer::gpu
