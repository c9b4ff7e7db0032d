#include "core/system/memory_node.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace kvxfer {
namespace {

// The byte at that position, counted over the region's spans.
std::byte* byte_at(const LocalRegion& region, std::uint64_t at) {
  for (const MemorySpan& span : region.spans) {
    if (at < span.nbytes) return region.base + span.offset + at;
    at -= span.nbytes;
  }
  return region.base;
}

}  // namespace

std::vector<std::byte*> sampled_pages(const LocalRegion& region, std::size_t page_nbytes) {
  std::uint64_t nbytes = 0;
  for (const MemorySpan& span : region.spans) nbytes += span.nbytes;
  const std::uint64_t num =
      std::min<std::uint64_t>(kMostSampledPages, (nbytes + page_nbytes - 1) / page_nbytes);
  std::vector<std::byte*> pages;
  pages.reserve(num);
  std::uint64_t random = 0;
  for (std::uint64_t i = 0; i < num; ++i) {
    // Knuth's constants; the high bits are good.
    random = random * 6364136223846793005u + 1442695040888963407u;
    const std::uint64_t first = nbytes / num * i, stretch = std::max<std::uint64_t>(nbytes / num, 1);
    const auto address = reinterpret_cast<std::uintptr_t>(byte_at(region, first + (random >> 16) % stretch));
    pages.push_back(reinterpret_cast<std::byte*>(address / page_nbytes * page_nbytes));
  }
  return pages;
}

int node_of_most(std::span<const int> nodes) {
  std::vector<int> known;
  std::copy_if(nodes.begin(), nodes.end(), std::back_inserter(known), [](int node) { return node >= 0; });
  if (known.empty()) return -1;
  std::sort(known.begin(), known.end());
  const int node = known[known.size() / 2];  // the node of more than half of them is in the middle
  const auto num = static_cast<std::size_t>(std::count(known.begin(), known.end(), node));
  return num * 8 >= known.size() * 7 ? node : -1;
}

int numa_node_of([[maybe_unused]] const LocalRegion& region) {
#if defined(SYS_move_pages)
  if (region.kind != MemoryKind::kHost) return -1;
  static const auto page_nbytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::vector<std::byte*> pages = sampled_pages(region, page_nbytes);
  std::vector<int> nodes(pages.size(), -1);
  // move_pages(2) that names no nodes moves nothing: it says where each page is, or a negative error.
  if (::syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) != 0) return -1;
  return node_of_most(nodes);
#else
  return -1;
#endif
}

}  // namespace kvxfer
