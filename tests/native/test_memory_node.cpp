// On which NUMA node memory lies: the queries, and what follows from the answers.
#include <sys/mman.h>

#include <algorithm>
#include <set>
#include <vector>

#include "check.h"
#include "core/system/memory_node.h"

namespace kvxfer {
namespace {

constexpr std::size_t kPage = 4096;

LocalRegion region_of(std::byte* base, std::vector<MemorySpan> spans) {
  LocalRegion region;
  region.base = base;
  region.spans = std::move(spans);
  return region;
}

TEST(memory_lies_on_the_node_of_nearly_all_pages_that_are_known) {
  const struct {
    std::vector<int> nodes;
    int expected;
  } cases[] = {
      {{}, -1},
      {{-2, -14}, -1},  // never touched
      {{0}, 0},
      {{1, 1, -2, 1}, 1},
      {{0, 1, 0, 1, 0, 1}, -1},  // interleaved
      {{0, 0, 0, 0, 0, 0, 0, 1}, 0},
      {{0, 0, 0, 0, 0, 0, 1, 1}, -1},
      {{3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 0, -2}, 3},
  };
  for (const auto& [nodes, expected] : cases) CHECK_EQ(node_of_most(nodes), expected);
}

TEST(pages_of_all_stretches_are_asked_and_none_besides) {
  auto* const base = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
  constexpr std::uint64_t kPart = std::uint64_t{1} << 30;
  const LocalRegion region = region_of(base, {{100, kPart}, {5 * kPart, kPart}});
  const std::vector<std::byte*> pages = sampled_pages(region, kPage);
  REQUIRE_EQ(pages.size(), kMostSampledPages);
  CHECK(std::is_sorted(pages.begin(), pages.end()));
  std::size_t num_odd = 0;
  for (const std::byte* const page : pages) {
    const auto at = static_cast<std::uint64_t>(page - base);
    CHECK_EQ(at % kPage, 0u);
    CHECK(at <= kPart + 100 || (at >= 5 * kPart && at < 6 * kPart));
    num_odd += at / kPage % 2;
  }
  CHECK_EQ(std::count_if(pages.begin(), pages.end(), [&](auto* page) { return page < base + 2 * kPart; }),
           32);
  CHECK(num_odd > 16 && num_odd < 48);  // as a policy that interleaves pages over two nodes
  CHECK(pages == sampled_pages(region, kPage));
  // Of small memory every page is asked for, at any alignment.
  const LocalRegion small = region_of(base, {{kPage / 2, 3 * kPage}});
  CHECK(sampled_pages(small, kPage).size() == 3);
  CHECK(sampled_pages(region_of(base, {}), kPage).empty());
}

TEST(this_machine_says_where_touched_pages_are_and_brings_in_none) {
  constexpr std::size_t kNum = 256;
  auto* const memory = static_cast<std::byte*>(
      ::mmap(nullptr, kNum * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  REQUIRE(memory != MAP_FAILED);
  ::madvise(memory, kNum * kPage, MADV_NOHUGEPAGE);
  const LocalRegion region = region_of(memory, {{0, kNum * kPage}});
  CHECK_EQ(numa_node_of(region), -1);
  std::vector<unsigned char> present(kNum);
  REQUIRE_EQ(::mincore(memory, kNum * kPage, present.data()), 0);
  CHECK_EQ(std::count(present.begin(), present.end(), 0), static_cast<std::ptrdiff_t>(kNum));
  for (std::size_t i = 0; i < kNum; ++i) memory[i * kPage] = std::byte{1};
  std::printf("  these pages lie on node %d\n", numa_node_of(region));  // -1: this process may not ask
  LocalRegion gpu = region;
  gpu.kind = MemoryKind::kGpu;
  CHECK_EQ(numa_node_of(gpu), -1);
  ::munmap(memory, kNum * kPage);
}

TEST(places_of_memory_are_apart) {
  MemoryPlaces places;
  CHECK(!places.differ_by_node());
  places.add(MemoryKind::kGpu);
  CHECK(!places.differ_by_node());
  CHECK(places.has(MemoryKind::kGpu, -1) && !places.has(MemoryKind::kHost, -1) &&
        !places.has(MemoryKind::kHost, 0));
  places.add(MemoryKind::kHost, MemoryPlaces::kMostNodes - 1);
  CHECK(places.differ_by_node());
  CHECK(places.has(MemoryKind::kHost, MemoryPlaces::kMostNodes - 1) && !places.has(MemoryKind::kHost, 0));
  places.add(MemoryKind::kHost, MemoryPlaces::kMostNodes);  // counts as unknown
  CHECK(places.has(MemoryKind::kHost, -1) && places.has(MemoryKind::kHost, 900));
}

}  // namespace
}  // namespace kvxfer
