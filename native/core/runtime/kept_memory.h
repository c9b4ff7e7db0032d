// What keeps the memory of regions: pinned for devices, and owned by whoever registered it. It is let go without the
// gate, by who takes it from here.
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

  // Deregistered, and nobody has heard yet that its memory is free.
  void begin_leaving(RegionId region, std::string name) { leaving_.emplace(region, std::move(name)); }
  const std::string* leaving(RegionId region) const {
    const auto found = leaving_.find(region);
    return found == leaving_.end() ? nullptr : &found->second;
  }

  // Nothing is under way on it any more.
  std::vector<Pinned> unpin(RegionId region) {
    leaving_.erase(region);
    auto node = pinned_.extract(region);
    return node.empty() ? std::vector<Pinned>() : std::move(node.mapped());
  }
  // And no peer has it mapped.
  Owner disown(RegionId region) {
    auto node = owners_.extract(region);
    return node.empty() ? nullptr : std::move(node.mapped());
  }
  // Of all regions, at the agent's end.
  auto unpin_all() { return std::exchange(pinned_, {}); }
  auto disown_all() { return std::exchange(owners_, {}); }

 private:
  std::map<RegionId, std::vector<Pinned>> pinned_;  // of regions that are registered, or leave
  std::unordered_map<RegionId, Owner> owners_;
  std::map<RegionId, std::string> leaving_;
};

}  // namespace kvxfer
