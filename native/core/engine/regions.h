// The regions of this agent: registered ones, and deregistered ones while works on them are under way.
#pragma once

#include <cstddef>
#include <map>
#include <memory>

#include "core/engine/context.h"
#include "core/region_table.h"

namespace kvxfer {

class Regions {
 public:
  explicit Regions(Context& context) : context_(context) {}

  RegionId add(std::unique_ptr<Region> region);
  const Region* find(RegionId id) const {
    auto found = regions_.find(id);
    return found == regions_.end() ? nullptr : found->second.get();
  }
  const RegionTable& all() const noexcept { return regions_; }
  Region* find(RegionId id) {
    auto found = regions_.find(id);
    return found == regions_.end() ? nullptr : found->second.get();
  }
  void lies_on(RegionId id, int numa_node);  // does nothing if it is gone
  RegionId reserve_id() noexcept { return next_id_++; }

  // From now on it is not found. Keeps its memory until `num_draining` transfers have drained; then tells
  // the host.
  void remove(RegionId id, std::size_t num_draining);
  void drained(RegionId id);  // one of those transfers has drained
  bool is_leaving(RegionId id) const { return leaving_.contains(id); }

 private:
  struct Leaving {
    std::unique_ptr<Region> region;  // with what keeps its memory
    std::size_t num_draining;
  };
  void fenced(RegionId id, std::unique_ptr<Region> region);

  Context& context_;
  RegionTable regions_;
  std::map<RegionId, Leaving> leaving_;
  RegionId next_id_ = 1;
};

}  // namespace kvxfer
