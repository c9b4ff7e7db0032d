#include "transports/cuda_ipc/peer_regions.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvxfer::cuda_ipc {
namespace {

bool lies_in(const PeerRegions::Region& region, const gpu::ExportedMemory& memory) noexcept {
  return std::any_of(region.spans.begin(), region.spans.end(), [&](const MemorySpan& span) {
    const gpu::Address begin = region.base + span.offset;
    return begin < memory.base + memory.nbytes && memory.base < begin + span.nbytes;
  });
}

}  // namespace

Status PeerRegions::add_memory(const Message& message, UniqueFd fd) {
  if (memories_.size() == kMaxMemories)
    return {Code::kRailFailed, "it sent more than " + std::to_string(kMaxMemories) + " allocations"};
  if (message.memory_id <= last_memory_) return {Code::kRailFailed, "it sent the same memory twice"};
  last_memory_ = message.memory_id;
  Charge kept;
  if (fd && !(kept = Charge::take(budget_, Resource::kDescriptors, 1)))
    return {Code::kRailFailed,
            "it passes more memory than it may: " + budget_->in_words(Resource::kDescriptors)};
  Memory& memory = memories_[message.memory_id];
  memory.kept = std::move(kept);
  gpu::ExportedMemory& exported = memory.exported;
  exported.kind = message.handle_kind;
  exported.base = message.base;
  exported.nbytes = message.nbytes;
  exported.handle = message.handle;
  exported.fd = std::move(fd);
  for (auto& [id, region] : regions_) place(region);
  return {};
}

Result<std::optional<PeerRegions::Mapped>> PeerRegions::take_back(MemoryId memory) {
  const auto found = memories_.find(memory);
  if (found == memories_.end())
    return Status(Code::kRailFailed, "it took back memory that it had not announced");
  for (auto& [id, region] : regions_) {
    // A region without a place waits for memory that the owner has yet to tell of, maybe at the same address.
    if (!region.placement || !lies_in(region, found->second.exported)) continue;
    region.placement.reset();
    region.failure = "the region of " + name_ + ": its memory is gone";
    region.failure_code = Code::kRailFailed;  // the frame that says so is on its way
  }
  std::optional<Mapped> mapped = std::move(found->second.mapped);
  memories_.erase(found);
  return mapped;
}

Status PeerRegions::attach(const RemoteRegion& remote) {
  Keys keys;
  if (remote.keys.size() != sizeof keys ||
      std::memcmp(remote.keys.data(), keys.version.data(), sizeof keys.version) != 0)
    return {Code::kUnsupported,
            "keys of " + std::to_string(remote.keys.size()) + " bytes are not of this version"};
  std::memcpy(&keys, remote.keys.data(), sizeof keys);
  Region region;
  region.base = remote.base;
  region.spans = remote.spans;
  region.last_memory = keys.last_memory;
  place(region);
  if (!region.failure.empty()) return {Code::kUnsupported, region.failure};
  regions_[remote.id] = std::move(region);
  return {};
}

const PeerRegions::Region* PeerRegions::find(RegionId region) const noexcept {
  const auto found = regions_.find(region);
  return found == regions_.end() ? nullptr : &found->second;
}

void PeerRegions::place(Region& region) {
  if (region.placement || !region.failure.empty() || last_memory_ < region.last_memory) return;
  Result<gpu::Placement> placement = placement_of(region);
  if (placement.ok())
    region.placement = std::move(placement).value();
  else
    region.failure = "the region of " + name_ + ": " + placement.status().message();
}

Result<gpu::Placement> PeerRegions::placement_of(const Region& region) {
  std::vector<gpu::Extent> extents;
  for (const MemorySpan& span : region.spans) {
    if (span.offset > UINT64_MAX - region.base || span.nbytes > UINT64_MAX - region.base - span.offset)
      return Status(Code::kUnsupported, "it ends beyond the address space");
    const gpu::Address begin = region.base + span.offset, end = begin + span.nbytes;
    for (gpu::Address at = begin; at < end;) {
      const auto found = std::find_if(memories_.begin(), memories_.end(), [at](const auto& entry) {
        const gpu::ExportedMemory& memory = entry.second.exported;
        return at >= memory.base && at - memory.base < memory.nbytes;
      });
      if (found == memories_.end())
        return Status(Code::kUnsupported, "it lies outside the memory that its owner has announced");
      Memory& memory = found->second;
      if (Status mapped = map(memory); !mapped.ok()) return mapped;
      const std::uint64_t within = at - memory.exported.base;
      const std::uint64_t nbytes = std::min(end - at, memory.exported.nbytes - within);
      extents.push_back({at - region.base, nbytes, memory.mapped->memory.address() + within});
      at += nbytes;
    }
  }
  return gpu::Placement(std::move(extents));
}

Status PeerRegions::map(Memory& memory) const {
  if (memory.mapped) return {};
  Charge charge = Charge::take(budget_, Resource::kMapped, memory.exported.nbytes);
  if (!charge)
    return {Code::kUnsupported,
            "its " + std::to_string(memory.exported.nbytes) +
                " bytes are more than it may have mapped: " + budget_->in_words(Resource::kMapped)};
  Result<gpu::PeerMemory> mapped =
      gpu::PeerMemory::map(reader_.driver, reader_.context, reader_.device, memory.exported);
  if (!mapped.ok())
    return {Code::kUnsupported, "GPU " + std::to_string(reader_.device) + " cannot read it by its " +
                                    std::string(gpu::name_of(memory.exported.kind)) + " (" +
                                    mapped.status().message() +
                                    "): the two GPUs need NVLink or PCIe peer access, and must be visible "
                                    "to both processes"};
  memory.mapped.emplace(Mapped{std::move(mapped).value(), std::move(charge)});
  return {};
}

void PeerRegions::unmap_unused() {
  for (auto& [id, memory] : memories_) {
    // Copied to a name of its own, because clang 14 captures no structured binding.
    const bool used = std::any_of(
        regions_.begin(), regions_.end(),
        [&exported = memory.exported](const auto& entry) { return lies_in(entry.second, exported); });
    if (!used) memory.mapped.reset();
  }
}

void PeerRegions::clear() {
  regions_.clear();
  memories_.clear();
}

std::size_t PeerRegions::num_mapped() const noexcept {
  return static_cast<std::size_t>(std::count_if(
      memories_.begin(), memories_.end(), [](const auto& entry) { return entry.second.mapped.has_value(); }));
}

}  // namespace kvxfer::cuda_ipc
