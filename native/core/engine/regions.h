// The regions of this agent: registered ones, and deregistered ones while works on them are under way.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/engine/context.h"
#include "core/region.h"

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

  // ---- what peers are told: changes are numbered, and of each region the newest is kept
  struct Change {
    std::uint64_t number;
    RegionId region;  // if it is not found, it is gone
  };
  std::optional<Change> change_after(std::uint64_t number) const;
  std::uint64_t newest_change() const noexcept { return newest_change_; }  // never 0
  void add_keys(Region& region, wire::TransportKeys keys);
  void all_told() noexcept;  // no peer has to hear of those that are gone

 private:
  struct Leaving {
    std::unique_ptr<Region> region;  // with what keeps its memory
    std::size_t num_draining;
  };
  void changed(RegionId id);
  void fenced(RegionId id, std::unique_ptr<Region> region);

  Context& context_;
  RegionTable regions_;
  std::map<RegionId, Leaving> leaving_;
  std::map<std::uint64_t, RegionId> changes_;
  std::map<RegionId, std::uint64_t> change_of_;  // the same
  std::vector<RegionId> gone_;  // those among them that are gone; there is always room for all of them
  std::uint64_t newest_change_ = 1;
  RegionId next_id_ = 1;
};

}  // namespace kvxfer
