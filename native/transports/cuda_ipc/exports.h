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
  // The allocations of each region, by region.
  using Regions = std::map<RegionId, std::vector<MemoryId>>;
  // Returns the region with those of its allocations in which no region lies any longer; empty: the region is
  // unknown.
  Regions::node_type remove(RegionId region) noexcept;

  // By number, which is also the order in which peers hear of them.
  const std::map<MemoryId, Entry>& all() const noexcept { return entries_; }
  MemoryId last() const noexcept { return last_; }

 private:
  // Peers are not told of these yet, because the region may still fail.
  Status export_missing(const LocalRegion& region, std::vector<gpu::ExportedMemory>& missing) const;

  const gpu::Driver& driver_;
  std::map<MemoryId, Entry> entries_;
  Regions regions_;
  MemoryId last_ = 0;
};

}  // namespace kvxfer::cuda_ipc
