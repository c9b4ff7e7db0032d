// Which NUMA node memory lies on, as the kernel says of some of its pages.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kvxfer/transport.h"

namespace kvxfer {

// So few tell a region that lies on one node from one that is spread over two: by chance fewer than one in a thousand
// million is taken for it.
inline constexpr std::size_t kMostSampledPages = 64;

// Of host memory; -1: on several, or not known. Asks of kMostSampledPages at most, and brings in none: a page that was
// never touched says nothing. Some microseconds. Where the kernel does not let this process ask it is not known.
int numa_node_of(const LocalRegion& region);

// Its two halves. Addresses of pages, each from a stretch of the region of its own, and within that at random but
// always the same: pages that a policy deals out in turn are not all of one turn.
std::vector<std::byte*> sampled_pages(const LocalRegion& region, std::size_t page_nbytes);
// Of pages that lie on these nodes, below 0 where that is not known: the node of seven eighths or more of those that
// are known. A region that found its node full has its last pages elsewhere, and is near its node all the same.
int node_of_most(std::span<const int> nodes);

}  // namespace kvxfer
