#include "transports/shm/peer_pools.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/system/memfd.h"

namespace kvxfer::shm {
namespace {

const std::string kNotIntroduced = "the peer has not sent its hello yet";

}  // namespace

Status PeerPools::add(const Message& message, UniqueFd fd) {
  if (Status usable = check_memfd(fd.get(), message.nbytes); !usable.ok()) return usable;
  if (memfds_.size() == kMaxMemfds)
    return {Code::kRailFailed, "it sent more than " + std::to_string(kMaxMemfds) + " memfds"};
  const auto [entry, is_new] = memfds_.try_emplace(message.memfd_id);
  if (!is_new) return {Code::kRailFailed, "it sent the same memfd twice"};
  Memfd& memfd = entry->second;
  memfd.kept = Charge::take(budget_, Resource::kDescriptors, 1);
  if (!memfd.kept)
    return {Code::kRailFailed,
            "it passes more memory than it may: " + budget_->in_words(Resource::kDescriptors)};
  memfd.fd = share(std::move(fd));
  memfd.nbytes = message.nbytes;
  for (auto& [id, region] : regions_) {
    if (region.keys.where != Where::kPool || region.keys.memfd_id != message.memfd_id) continue;
    region.failure = map_for(region).message();  // told by its work: attach() has succeeded long ago
  }
  return {};
}

void PeerPools::remove(std::uint64_t memfd_id) {
  populating_.erase(memfd_id);
  memfds_.erase(memfd_id);
}

Status PeerPools::attach(const RemoteRegion& remote) {
  Region region{.keys = {}, .base = remote.base, .end = end_of(remote.spans), .failure = {}};
  if (remote.keys.size() != sizeof(Keys))
    return {Code::kUnsupported,
            "keys of " + std::to_string(remote.keys.size()) + " bytes are not of this version"};
  std::memcpy(&region.keys, remote.keys.data(), sizeof(Keys));
  switch (region.keys.where) {
    case Where::kForeign:
      if (Status readable = read_by_kernel(region); !readable.ok()) return readable;
      break;
    case Where::kPool:
      if (region.keys.memfd_offset > region.keys.memfd_nbytes ||
          region.end > region.keys.memfd_nbytes - region.keys.memfd_offset)
        return {Code::kUnsupported, "the region of " + name_ + " ends outside its pool of " +
                                        std::to_string(region.keys.memfd_nbytes) + " bytes"};
      if (Status mapped = map_for(region); !mapped.ok())
        return {Code::kUnsupported, "the pool of " + name_ + ": " + mapped.message()};
      break;
    default: return {Code::kUnsupported, "keys of an unknown kind"};
  }
  regions_[remote.id] = std::move(region);
  return {};
}

void PeerPools::detach(RegionId id) {
  const auto attached = regions_.find(id);
  if (attached == regions_.end()) return;
  const Keys keys = attached->second.keys;
  regions_.erase(attached);
  const auto memfd = memfds_.find(keys.memfd_id);
  if (keys.where != Where::kPool || memfd == memfds_.end()) return;
  const bool used = std::any_of(regions_.begin(), regions_.end(), [&](const auto& entry) {
    return entry.second.keys.where == Where::kPool && entry.second.keys.memfd_id == keys.memfd_id;
  });
  if (!used) unmap(keys.memfd_id, memfd->second);
}

const PeerPools::Region* PeerPools::find(RegionId region) const noexcept {
  const auto found = regions_.find(region);
  return found == regions_.end() ? nullptr : &found->second;
}

bool PeerPools::can_read(RegionId id) const noexcept {
  const Region* const region = find(id);
  if (region == nullptr || region->keys.where == Where::kForeign) return true;
  const auto memfd = memfds_.find(region->keys.memfd_id);
  if (memfd == memfds_.end()) return false;
  return memfd->second.mapped == nullptr || memfd->second.mapped->mapping.readable();
}

std::optional<PieceSource> PeerPools::source_of(const Region& region) const noexcept {
  if (region.by_kernel) return PieceSource(process_, region.base);
  const auto memfd = memfds_.find(region.keys.memfd_id);
  if (memfd == memfds_.end() || memfd->second.mapped == nullptr) return std::nullopt;
  return PieceSource(memfd->second.mapped, region.keys.memfd_offset);
}

Status PeerPools::map_for(Region& region) {
  const auto found = memfds_.find(region.keys.memfd_id);
  if (found == memfds_.end()) return {};  // its work waits
  Memfd& memfd = found->second;
  if (memfd.nbytes != region.keys.memfd_nbytes)
    return {Code::kUnsupported, "the region's keys name a memfd of " +
                                    std::to_string(region.keys.memfd_nbytes) +
                                    " bytes; the memfd that came has " + std::to_string(memfd.nbytes)};
  if (memfd.mapped != nullptr) return {};
  if (!is_sealed_against_holes(memfd.fd->get())) return read_by_kernel(region);
  auto mapped = std::make_shared<MappedPool>();
  mapped->fd = memfd.fd;
  mapped->charge = Charge::take(budget_, Resource::kMapped, memfd.nbytes);
  if (!mapped->charge)
    return {Code::kUnsupported,
            "its " + std::to_string(memfd.nbytes) +
                " bytes are more than it may have mapped: " + budget_->in_words(Resource::kMapped)};
  Result<PeerMapping> mapping = PeerMapping::map(memfd.fd->get(), memfd.nbytes);
  if (!mapping.ok()) return mapping.status();
  mapped->mapping = std::move(mapping).value();
  memfd.mapped = std::move(mapped);
  populating_.insert(found->first);
  return {};
}

Status PeerPools::read_by_kernel(Region& region) const {
  const std::string why = region.keys.where == Where::kForeign
                              ? "is not in a pool"
                              : "is in a pool that can get holes (no F_SEAL_FUTURE_WRITE: Linux before 5.1)";
  const std::string& refusal = process_ == nullptr ? kNotIntroduced : process_->refusal();
  if (!refusal.empty())
    return {Code::kUnsupported, "the region of " + name_ + " " + why + ", and " + refusal +
                                    ". Or allocate this memory from a kvxfer pool"};
  if (region.end > UINT64_MAX - region.base)
    return {Code::kUnsupported, "the region ends beyond the address space"};
  region.by_kernel = true;
  return {};
}

Status PeerPools::populate_some() {
  const std::uint64_t memfd_id = *populating_.begin();
  PeerMapping& mapping = memfds_.at(memfd_id).mapped->mapping;
  Status populated = mapping.populate_some();
  if (mapping.populated()) populating_.erase(memfd_id);
  return populated;
}

void PeerPools::unmap(std::uint64_t memfd_id, Memfd& memfd) {
  populating_.erase(memfd_id);
  memfd.mapped.reset();
}

std::size_t PeerPools::num_mapped() const noexcept {
  return static_cast<std::size_t>(std::count_if(
      memfds_.begin(), memfds_.end(), [](const auto& entry) { return entry.second.mapped != nullptr; }));
}

void PeerPools::clear() {
  populating_.clear();
  regions_.clear();
  memfds_.clear();
}

}  // namespace kvxfer::shm
