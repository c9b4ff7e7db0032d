// Enqueues copies by a device's copy engines in a stream.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "gpu/driver.h"
#include "gpu/engine_share.h"

namespace kvxfer::gpu {

// Room for a batch is allocated at construction; enqueue() does not allocate.
class EngineCopies {
 public:
  // At most this many copies per call. More take several calls; the engines do not wait between them.
  static constexpr std::size_t kMostCopies = 1024;

  explicit EngineCopies(const Driver& driver) : driver_(driver) {}

  // True if the driver has the calls and has not refused one yet.
  bool work() const noexcept { return works_ && driver_.has_copy_engines(); }
  // From now on work() returns false.
  void give_up() noexcept { works_ = false; }

  // Has engines copy the shares in the stream, after everything enqueued there before, and in no order among
  // themselves. Returns 0 or the driver's error; after an error some copies may be under way.
  int enqueue(std::span<const EngineShare> shares, std::span<const std::uint32_t> src_ids,
              std::span<const std::uint32_t> dst_ids, Stream stream) noexcept;

 private:
  struct Batch {
    std::array<Address, kMostCopies> dst, src;
    std::array<std::size_t, kMostCopies> nbytes;
  };
  int add(const EngineShare& share, std::span<const std::uint32_t> src_ids,
          std::span<const std::uint32_t> dst_ids, Stream stream) noexcept;
  int add_run(Address src, Address dst, std::uint64_t nbytes, Stream stream) noexcept;
  int add_rows(const PairRuns& runs, Address src, Address dst, Stream stream) const noexcept;
  int flush(Stream stream) noexcept;

  const Driver& driver_;
  bool works_ = true;
  std::unique_ptr<Batch> batch_ = std::make_unique<Batch>();
  std::size_t num_ = 0;  // in the batch
};

}  // namespace kvxfer::gpu
