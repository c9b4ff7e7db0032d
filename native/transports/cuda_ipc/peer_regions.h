// A peer's regions, and its allocations of GPU memory in which they lie, mapped for our kernels.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gpu/driver.h"
#include "gpu/placement.h"
#include "gpu/shared_memory.h"
#include "kvxfer/budget.h"
#include "kvxfer/transport.h"
#include "transports/cuda_ipc/message.h"

namespace kvxfer::cuda_ipc {

class PeerRegions {
 public:
  struct Region {
    std::uint64_t base = 0;  // in the peer's process
    std::vector<MemorySpan> spans;
    MemoryId last_memory = 0;
    std::optional<gpu::Placement> placement;  // once its memory is mapped
    std::string failure;                      // why its memory cannot be mapped
    Code failure_code = Code::kUnsupported;   // kRailFailed: it was mapped, and its memory is gone
  };

  // The device on which kernels run; memory is mapped for this device.
  struct Reader {
    const gpu::Driver& driver;
    gpu::Context context;
    int device;
  };

  // An allocation, mapped for the device.
  struct Mapped {
    gpu::PeerMemory memory;
    Charge charge;
  };

  // The budget is charged for what is mapped, and for each descriptor that is kept; null: no budget.
  PeerRegions(const Reader& reader, std::string peer_name, std::shared_ptr<Budget> budget)
      : reader_(reader), name_(std::move(peer_name)), budget_(std::move(budget)) {}

  // The peer tells of an allocation. Not ok: it may not tell this.
  Status add_memory(const Message& message, UniqueFd fd);
  // The owner takes an allocation back. Regions there have ended, or end with the next frame, and no new
  // kernel may read there. Returns the mapping, which kernels that run already may still read. kRailFailed:
  // the peer had not told of it.
  Result<std::optional<Mapped>> take_back(MemoryId memory);

  // Places the region as soon as all of its memory has been told of. kUnsupported, in words.
  Status attach(const RemoteRegion& region);
  bool detach(RegionId region) { return regions_.erase(region) != 0; }
  const Region* find(RegionId region) const noexcept;

  // Called when no kernel can read the unused mappings any more.
  void unmap_unused();
  void clear();

  std::size_t num_mapped() const noexcept;

 private:
  struct Memory {
    gpu::ExportedMemory exported;
    Charge kept;                   // for its descriptor
    std::optional<Mapped> mapped;  // while a region lies in it
  };

  void place(Region& region);
  Result<gpu::Placement> placement_of(const Region& region);
  Status map(Memory& memory) const;

  const Reader reader_;
  const std::string name_;
  const std::shared_ptr<Budget> budget_;
  MemoryId last_memory_ = 0;  // the last one that it told of
  std::map<MemoryId, Memory> memories_;
  std::map<RegionId, Region> regions_;
};

}  // namespace kvxfer::cuda_ipc
