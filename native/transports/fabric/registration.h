// Our memory as the library and peers know it, and a peer's memory as the peer described it.
#pragma once

#include <memory>
#include <vector>

#include "transports/fabric/fabric.h"

namespace kvxfer::fabric {

// The library knows the memory while this object lives, which may be longer than the rail.
class Registration {
 public:
  // Merges spans that touch.
  static Result<std::shared_ptr<const Registration>> create(std::shared_ptr<Fabric> fabric,
                                                            const LocalRegion& region, bool takes_writes);
  const KeyedSpans& local() const noexcept { return local_; }
  const RegionKeys& keys() const noexcept { return keys_; }  // as sent to peers

 private:
  explicit Registration(std::shared_ptr<Fabric> fabric) : fabric_(std::move(fabric)) {}

  const std::shared_ptr<Fabric> fabric_;  // must outlive the memory
  std::vector<std::unique_ptr<Memory>> memory_;
  KeyedSpans local_;
  RegionKeys keys_;
};

// A peer's keys, turned into keys of this process.
struct RemoteMemory {
  // Every number of the keys is the peer's, so they may be unusable; the error says why, in words.
  static Result<std::shared_ptr<const RemoteMemory>> unpack(const RegionKeys& keys, Endpoint& endpoint);

  KeyedSpans spans;
  std::vector<std::shared_ptr<const void>> holders;  // keep the spans' keys alive
};

}  // namespace kvxfer::fabric
