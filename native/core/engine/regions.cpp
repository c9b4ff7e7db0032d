#include "core/engine/regions.h"

namespace kvxfer {

RegionId Regions::add(std::unique_ptr<Region> region) {
  if (region->memory.id == 0) region->memory.id = reserve_id();
  const RegionId id = region->memory.id;
  region->shared = std::make_shared<const LocalRegion>(region->memory);
  const auto added = regions_.emplace(id, std::move(region)).first;
  try {
    gone_.reserve(gone_.size() + regions_.size());
    changed(id);
    added->second->added = newest_change_;
  } catch (...) {
    regions_.erase(added);
    throw;
  }
  return id;
}

void Regions::changed(RegionId id) {
  const auto found = change_of_.find(id);
  if (found == change_of_.end()) {
    const auto change = changes_.emplace(newest_change_ + 1, id).first;
    try {
      change_of_.emplace(id, newest_change_ + 1);
    } catch (...) {
      changes_.erase(change);
      throw;
    }
  } else {  // takes no memory
    auto change = changes_.extract(found->second);
    change.key() = found->second = newest_change_ + 1;
    changes_.insert(std::move(change));
  }
  ++newest_change_;
}

// The change that added the region stays where it is: a peer that has not come to it yet is told of the
// region first.
void Regions::add_keys(Region& region, wire::TransportKeys keys) {
  region.keys.reserve(region.keys.size() + 1);
  region.late_keys.reserve(region.late_keys.size() + 1);
  if (region.late_keys.empty()) {
    changes_.emplace(newest_change_ + 1, region.memory.id);
  } else {  // takes no memory
    auto change = changes_.extract(region.late_keys.back());
    change.key() = newest_change_ + 1;
    changes_.insert(std::move(change));
  }
  region.keys.push_back(std::move(keys));
  region.late_keys.push_back(++newest_change_);
}

std::optional<Regions::Change> Regions::change_after(std::uint64_t number) const {
  const auto found = changes_.upper_bound(number);
  return found == changes_.end() ? std::nullopt : std::optional(Change{found->first, found->second});
}

void Regions::all_told() noexcept {
  for (const RegionId id : gone_) {
    const auto found = change_of_.find(id);
    changes_.erase(found->second);
    change_of_.erase(found);
  }
  gone_.clear();
}

void Regions::lies_on(RegionId id, int numa_node) {
  Region* const region = find(id);
  if (region == nullptr || region->memory.numa_node == numa_node) return;
  region->memory.numa_node = numa_node;
  region->shared = std::make_shared<const LocalRegion>(region->memory);
}

void Regions::remove(RegionId id, std::size_t num_draining) {
  context_.make_room();
  const auto found = regions_.find(id);
  Leaving* const leaving = num_draining != 0 ? &leaving_[id] : nullptr;  // takes memory before the region
  std::unique_ptr<Region> region = std::move(found->second);
  regions_.erase(found);
  if (!region->late_keys.empty()) changes_.erase(region->late_keys.back());
  changed(id);
  gone_.push_back(id);
  if (leaving == nullptr) return fenced(id, std::move(region));
  leaving->region = std::move(region);
  leaving->num_draining = num_draining;
}

void Regions::drained(RegionId id) {
  auto found = leaving_.find(id);
  if (found == leaving_.end() || --found->second.num_draining != 0) return;
  std::unique_ptr<Region> gone = std::move(found->second.region);
  leaving_.erase(found);
  fenced(id, std::move(gone));
}

void Regions::fenced(RegionId id, std::unique_ptr<Region> region) {
  context_.keep_for_this_round(std::move(region));
  context_.host.region_fenced(id);
}

}  // namespace kvxfer
