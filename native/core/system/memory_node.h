// Which NUMA node memory lies on, by what the kernel says of some of its pages.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kvxfer/transport.h"

namespace kvxfer {

// This many pages tell a region that lies on one node from one that is spread over two: by chance, fewer
// than one spread region in a thousand million looks like one on a single node.
inline constexpr std::size_t kMostSampledPages = 64;

// The node of host memory; -1 if it lies on several, or if the node is not known. Asks for at most
// kMostSampledPages and brings none in; a page that was never touched tells nothing. Takes some
// microseconds. If the kernel does not let this process ask, the node is not known.
int numa_node_of(const LocalRegion& region);

// The two halves of numa_node_of. This one: addresses of pages, each in its own stretch of the region, at a
// place that is random but always the same. So if a policy deals pages out in turn, the sample is not all
// from one turn.
std::vector<std::byte*> sampled_pages(const LocalRegion& region, std::size_t page_nbytes);
// Of pages on these nodes (below 0: not known): the node that holds seven eighths or more of the known ones.
// A region whose node became full has its last pages elsewhere, and is near its node all the same.
int node_of_most(std::span<const int> nodes);

}  // namespace kvxfer
