// The memory that a piece of a peer's region is read from, held until the reads have ended: a pool that is
// mapped here, or the peer's process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/copy/sliced_copy.h"
#include "kvxfer/budget.h"
#include "transports/common/message_channel.h"
#include "transports/common/peer_mapping.h"
#include "transports/shm/foreign_reader.h"

namespace kvxfer::shm {

// A peer's pool, mapped, and charged to the peer. Only the driving thread populates it; any thread may read
// it.
struct MappedPool {
  SharedFd fd;
  Charge charge;
  PeerMapping mapping;
};

class PieceSource {
 public:
  PieceSource(std::shared_ptr<const MappedPool> pool, std::uint64_t offset) noexcept
      : pool_(std::move(pool)), base_(offset) {}
  PieceSource(std::shared_ptr<const ForeignMemory> process, std::uint64_t address) noexcept
      : process_(std::move(process)), base_(address) {}

  bool is_mapped() const noexcept { return pool_ != nullptr; }
  // Copies one slice more. Not ok, for a pool: it has holes, and must not be read any more.
  Result<std::uint64_t> advance(SlicedCopy& slices, std::unique_ptr<ForeignReader>& reader) const;
  // Called after the reads: whether what was read counts. kRailFailed: the process ended.
  Status check() const { return is_mapped() ? Status() : process_->check_alive(); }

 private:
  std::shared_ptr<const MappedPool> pool_;  // or
  std::shared_ptr<const ForeignMemory> process_;
  std::uint64_t base_;  // of the region, in the pool or in the process
};

}  // namespace kvxfer::shm
