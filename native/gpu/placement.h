// Where a region lies in the addresses that this process's kernels use.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "gpu/driver.h"

namespace kvxfer::gpu {

// A contiguous piece of a region.
struct Extent {
  std::uint64_t offset;  // from the region's base
  std::uint64_t nbytes;
  Address address;  // of its first byte
};

// Our own memory lies as its region says. A peer's memory lies where each of its allocations was mapped.
class Placement {
 public:
  explicit Placement(Address base) : extents_{{0, UINT64_MAX, base}} {}
  // In ascending order, without overlaps.
  explicit Placement(std::vector<Extent> extents) : extents_(std::move(extents)) {}

  // Returns the address of `nbytes` from `offset` on, or nothing if they do not lie in one piece.
  std::optional<Address> find(std::uint64_t offset, std::uint64_t nbytes) const noexcept;

 private:
  std::vector<Extent> extents_;
};

}  // namespace kvxfer::gpu
