// Copies on a GPU, one after the other: a stream that kernels are launched on.
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

// Of a device. A null function is a kernel that it does not have.
struct Kernels { std::array<Function, kNumKernels> functions{}; };

struct CopyStreamOptions {
  // CTAs of a launch at most: what the rail's speed wants, and what the model's kernels can spare.
  std::uint32_t num_ctas = kUnmeasuredCtas;
  // Bytes of block tables that may be under way.
  std::uint32_t tables_nbytes = 1024 * 1024;
  bool high_priority = true;
  // What goes by copy engines, of copies that say that one side is the host's.
  Calibration calibration{};
};

// Everything that a copy needs is allocated when the stream is made; submitting neither allocates device
// memory nor waits. Calls come from one thread at a time. Memory that is copied must outlive the copy.
class CopyStream {
 public:
  using Ticket = std::uint64_t;  // of a submission; they end in order

  static Result<std::unique_ptr<CopyStream>> create(const Driver& driver, Context context,
                                                    const Kernels& kernels, const CopyStreamOptions& options);
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;
  ~CopyStream();  // waits for what was submitted

  // Copies a part of a transfer between two regions in memory that the device reaches, after everything
  // submitted before. The tables are the part's; they are copied. kAgain where tables of earlier copies
  // are in the way, kExhausted where these never fit. `direction` says what the device cannot see: whether
  // one side is pinned memory of the host, which copy engines may be the better way to. A device that refuses
  // them copies by kernels from then on; that one time this waits for what is under way.
  Result<Ticket> submit(const CopyProgram& program, const Part& part, std::span<const std::uint32_t> src_ids,
                        std::span<const std::uint32_t> dst_ids, const Placement& src, const Placement& dst,
                        Direction direction = Direction::kOnDevice);

  // Whether tables of so many pairs leave room for as many behind them, which can be submitted while these are
  // under way.
  bool has_room_for_two(std::uint32_t num_pairs) const noexcept {
    return 4 * std::uint64_t{num_pairs} * sizeof(std::uint32_t) <= options_.tables_nbytes;
  }

  // What is submitted from now on begins after the event.
  Status wait_for(Event event);

  // Up to which ticket everything is done: its bytes are seen by whoever reads this.
  Ticket done() const noexcept;

  // What the device has to say of work that does not end: kSystem where it failed, and then everything
  // that was under way is lost.
  Status check() const;

  // Whether the device works on what was submitted. False as well once it has failed, and runs nothing.
  bool is_running() const;

  // Waits until everything is done, or failed.
  Status synchronize();

  Stream handle() const noexcept { return stream_; }

  void set_num_ctas(std::uint32_t num_ctas) noexcept { options_.num_ctas = num_ctas; }

  // Of copies to come.
  void set_calibration(const Calibration& calibration) noexcept { options_.calibration = calibration; }
  // False where the driver has no calls for copy engines, or the device has refused them.
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
  std::uint64_t* done_ = nullptr;  // pinned; the last kernel's last CTA writes it, or the stream itself
  Ticket last_ = 0;  // that was submitted
  Status failed_;  // a launch: nothing can be submitted any more
  std::deque<Tables> under_way_;
  std::uint32_t free_from_ = 0;  // in the tables' ring
};

}  // namespace kvxfer::gpu
