#include "core/engine/regions.h"

namespace kvxfer {

RegionId Regions::add(std::unique_ptr<Region> region) {
  if (region->memory.id == 0) region->memory.id = reserve_id();
  const RegionId id = region->memory.id;
  region->shared = std::make_shared<const LocalRegion>(region->memory);
  regions_.emplace(id, std::move(region));
  return id;
}

void Regions::lies_on(RegionId id, int numa_node) {
  Region* const region = find(id);
  if (region == nullptr || region->memory.numa_node == numa_node) return;
  region->memory.numa_node = numa_node;
  region->shared = std::make_shared<const LocalRegion>(region->memory);
}

void Regions::remove(RegionId id, std::size_t num_draining) {
  context_.make_room();
  auto found = regions_.find(id);
  if (num_draining != 0)
    leaving_.emplace(id, Leaving{std::move(found->second), num_draining});
  else
    fenced(id, std::move(found->second));
  regions_.erase(found);
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
