// Where a region lies in the addresses that this process's kernels use.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "gpu/driver.h"

namespace kvxfer::gpu {

// A stretch of a region that lies in one piece.
struct Extent {
  std::uint64_t offset;  // from the region's base
  std::uint64_t nbytes;
  Address address;  // of its first byte
};

// Memory of our own lies as the region says. A peer's lies wherever each of its allocations was mapped.
class Placement {
 public:
  explicit Placement(Address base) : extents_{{0, UINT64_MAX, base}} {}
  // In order, apart.
  explicit Placement(std::vector<Extent> extents) : extents_(std::move(extents)) {}

  // Where `nbytes` from `offset` on lie in one piece; nothing where they do not.
  std::optional<Address> find(std::uint64_t offset, std::uint64_t nbytes) const noexcept;

 private:
  std::vector<Extent> extents_;
};

}  // namespace kvxfer::gpu
