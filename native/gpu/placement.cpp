#include "gpu/placement.h"

#include <algorithm>

namespace kvxfer::gpu {

std::optional<Address> Placement::find(std::uint64_t offset, std::uint64_t nbytes) const noexcept {
  auto after = std::upper_bound(extents_.begin(), extents_.end(), offset,
                                [](std::uint64_t at, const Extent& extent) { return at < extent.offset; });
  if (after == extents_.begin()) return std::nullopt;
  const Extent& extent = *--after;
  const std::uint64_t within = offset - extent.offset;
  if (within > extent.nbytes || nbytes > extent.nbytes - within) return std::nullopt;
  return extent.address + within;
}

}  // namespace kvxfer::gpu
