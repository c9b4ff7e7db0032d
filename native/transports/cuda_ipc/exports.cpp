#include "transports/cuda_ipc/exports.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

namespace kvxfer::cuda_ipc {
namespace {

gpu::Address address_of(const LocalRegion& region, const MemorySpan& span) noexcept {
  return reinterpret_cast<gpu::Address>(region.base) + span.offset;
}

}  // namespace

Result<std::vector<MemoryId>> Exports::add(const LocalRegion& region) {
  std::vector<gpu::ExportedMemory> missing;
  if (Status exported = export_missing(region, missing); !exported.ok()) return exported;
  std::vector<MemoryId> added;
  for (gpu::ExportedMemory& memory : missing) {
    added.push_back(++last_);
    Entry& entry = entries_[last_];
    entry.message = Message::about(MessageKind::kMemory, last_);
    entry.message.base = memory.base;
    entry.message.nbytes = memory.nbytes;
    entry.message.handle_kind = memory.kind;
    entry.message.handle = memory.handle;
    if (memory.fd) entry.fd = share(std::move(memory.fd));
  }
  std::vector<MemoryId>& used = regions_[region.id];
  for (auto& [id, entry] : entries_) {
    const gpu::Address begin = entry.message.base, end = begin + entry.message.nbytes;
    const bool lies_there =
        std::any_of(region.spans.begin(), region.spans.end(), [&](const MemorySpan& span) {
          const gpu::Address at = address_of(region, span);
          return at < end && begin < at + span.nbytes;
        });
    if (!lies_there) continue;
    used.push_back(id);
    ++entry.num_regions;
  }
  return added;
}

Status Exports::export_missing(const LocalRegion& region, std::vector<gpu::ExportedMemory>& missing) const {
  const auto end_of_memory_at = [&](gpu::Address at) -> gpu::Address {
    for (const auto& [id, entry] : entries_)
      if (at >= entry.message.base && at - entry.message.base < entry.message.nbytes)
        return entry.message.base + entry.message.nbytes;
    for (const gpu::ExportedMemory& memory : missing)
      if (at >= memory.base && at - memory.base < memory.nbytes) return memory.base + memory.nbytes;
    return 0;
  };
  for (const MemorySpan& span : region.spans) {
    const gpu::Address begin = address_of(region, span);
    for (gpu::Address at = begin; at < begin + span.nbytes;) {
      gpu::Address end = end_of_memory_at(at);
      if (end == 0) {
        if (entries_.size() + missing.size() == kMaxMemories)
          return {Code::kExhausted, "regions already lie in " + std::to_string(kMaxMemories) +
                                        " allocations of GPU memory: use fewer, larger ones"};
        Result<gpu::ExportedMemory> memory = gpu::export_memory(driver_, at);
        if (!memory.ok()) return memory.status();
        end = memory.value().base + memory.value().nbytes;
        missing.push_back(std::move(memory).value());
      }
      at = end;
    }
  }
  return {};
}

Exports::Regions::node_type Exports::remove(RegionId region) noexcept {
  Regions::node_type removed = regions_.extract(region);
  if (!removed) return removed;
  std::erase_if(removed.mapped(), [this](MemoryId id) {
    const auto entry = entries_.find(id);
    if (--entry->second.num_regions != 0) return true;
    entries_.erase(entry);
    return false;
  });
  return removed;
}

}  // namespace kvxfer::cuda_ipc
