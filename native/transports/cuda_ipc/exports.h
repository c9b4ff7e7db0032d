// Our allocations in which regions lie, in the form in which peers can map them.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "gpu/driver.h"
#include "gpu/shared_memory.h"
#include "kvxfer/transport.h"
#include "transports/common/message_channel.h"
#include "transports/cuda_ipc/message.h"

namespace kvxfer::cuda_ipc {

class Exports {
 public:
  struct Entry {
    Message message;  // tells a peer of it
    SharedFd fd;      // goes with the message, or null
    std::size_t num_regions = 0;
  };

  explicit Exports(const gpu::Driver& driver) : driver_(driver) {}

  // Exports the region's allocations that are not exported yet. Returns the new ones; the caller tells peers
  // of them in this order. All or nothing. Called in the device's context. kUnsupported, kExhausted.
  Result<std::vector<MemoryId>> add(const LocalRegion& region);
  // Returns the allocations in which no region lies any longer.
  std::vector<MemoryId> remove(RegionId region);

  // By number, which is also the order in which peers hear of them.
  const std::map<MemoryId, Entry>& all() const noexcept { return entries_; }
  MemoryId last() const noexcept { return last_; }

 private:
  // Peers are not told of these yet, because the region may still fail.
  Status export_missing(const LocalRegion& region, std::vector<gpu::ExportedMemory>& missing) const;

  const gpu::Driver& driver_;
  std::map<MemoryId, Entry> entries_;
  std::map<RegionId, std::vector<MemoryId>> regions_;  // the allocations of each region
  MemoryId last_ = 0;
};

}  // namespace kvxfer::cuda_ipc
