// Keeps the memory of regions: its registrations with devices, and its owners. A caller takes these from
// here, and drops them without the gate.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvxfer/transport.h"

namespace kvxfer {

class KeptMemory {
 public:
  using Owner = std::shared_ptr<const void>;

  void pin(RegionId region, const Pinned& pinned) { pinned_[region].push_back(pinned); }
  void own(RegionId region, Owner owner) { owners_.emplace(region, std::move(owner)); }

  // The region is deregistered, and its owner has not heard yet that its memory is free.
  void begin_leaving(RegionId region, std::string name) { leaving_.emplace(region, std::move(name)); }
  const std::string* leaving(RegionId region) const {
    const auto found = leaving_.find(region);
    return found == leaving_.end() ? nullptr : &found->second;
  }

  // No work on the region is under way any more.
  std::vector<Pinned> unpin(RegionId region) {
    leaving_.erase(region);
    auto node = pinned_.extract(region);
    return node.empty() ? std::vector<Pinned>() : std::move(node.mapped());
  }
  // And no peer has the region mapped.
  Owner disown(RegionId region) {
    auto node = owners_.extract(region);
    return node.empty() ? nullptr : std::move(node.mapped());
  }
  // Of all regions, when the agent ends.
  auto unpin_all() { return std::exchange(pinned_, {}); }
  auto disown_all() { return std::exchange(owners_, {}); }

 private:
  std::map<RegionId, std::vector<Pinned>> pinned_;  // of registered regions, and of regions that leave
  std::unordered_map<RegionId, Owner> owners_;
  std::map<RegionId, std::string> leaving_;
};

}  // namespace kvxfer
