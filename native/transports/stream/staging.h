// What an agent's rails need to stage pages of its GPU: pinned memory, and streams that copy between it and
// the pages. One for each agent; the rails of all its streams share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "gpu/copy_stream.h"
#include "gpu/driver.h"
#include "gpu/gpu_part.h"
#include "kvxfer/status.h"
#include "transports/stream/slots.h"

namespace kvxfer {

class Staging {
 public:
  struct Options {
    int device = 0;
    gpu::Kernels kernels;
    gpu::CopyStreamOptions stream;
    std::uint64_t nbytes = 64 * 1024 * 1024;  // of the arena, both directions together
  };

  // One half of the arena. Sending and receiving share nothing, so neither can block the other. Otherwise two
  // agents that write to each other could wait for each other's slots (gpu/DESIGN.md).
  struct Lane {
    std::byte* base;
    Slots slots;
    std::unique_ptr<gpu::CopyStream> stream;
  };

  Staging(const gpu::Driver& driver, const Options& options) : driver_(driver), options_(options) {}
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging();  // waits for its kernels

  // Allocates all that staging ever needs; does nothing if that has happened. If the arena cannot be had it
  // tries half as much, and so on. kExhausted: not even GpuPart::kLeastStagingNbytes can be had. kSystem: the
  // device does not work.
  Status open();
  bool is_open() const noexcept { return sends_.has_value(); }
  // Bytes of the arena: what was asked for; once it is open, what could be had.
  std::uint64_t nbytes() const noexcept { return is_open() ? nbytes_ : options_.nbytes; }
  std::uint64_t most_piece_nbytes() const noexcept { return Slots::most_nbytes(nbytes() / 2); }

  int device() const noexcept { return options_.device; }
  Lane& sends() noexcept { return *sends_; }
  Lane& receives() noexcept { return *receives_; }

  // What the device said when it failed. No copy begins any more. Copies under way may go on if the device
  // only refused a launch; they are lost if it runs nothing any more.
  const Status& failure() const noexcept { return failure_; }
  void fail(const Status& why) {
    if (failure_.ok()) failure_ = why;
  }

 private:
  Result<Lane> make_lane(std::byte* base) const;

  const gpu::Driver& driver_;
  const Options options_;
  std::optional<gpu::PrimaryContext> context_;
  std::byte* memory_ = nullptr;  // pinned
  std::uint64_t nbytes_ = 0;
  std::optional<Lane> sends_, receives_;
  Status failure_;
};

}  // namespace kvxfer
