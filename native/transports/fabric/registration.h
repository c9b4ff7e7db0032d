// Memory of ours as the library and peers know it, and memory of a peer's as it told us.
#pragma once

#include <memory>
#include <vector>

#include "transports/fabric/fabric.h"

namespace kvxfer::fabric {

// Known to the library for as long as this lives, which may be longer than the rail.
class Registration {
 public:
  // Spans that touch are one.
  static Result<std::shared_ptr<const Registration>> create(std::shared_ptr<Fabric> fabric,
                                                            const LocalRegion& region);
  const KeyedSpans& local() const noexcept { return local_; }
  const RegionKeys& keys() const noexcept { return keys_; }  // as they go to peers

 private:
  explicit Registration(std::shared_ptr<Fabric> fabric) : fabric_(std::move(fabric)) {}

  const std::shared_ptr<Fabric> fabric_;  // ends after the memory
  std::vector<std::unique_ptr<Memory>> memory_;
  KeyedSpans local_;
  RegionKeys keys_;
};

// What a peer's keys are here.
struct RemoteMemory {
  // Or in words why they are nothing to read by: every number of them is the peer's.
  static Result<std::shared_ptr<const RemoteMemory>> unpack(const RegionKeys& keys, Endpoint& endpoint);

  KeyedSpans spans;
  std::vector<std::shared_ptr<const void>> holders;  // of the keys in the spans
};

}  // namespace kvxfer::fabric
