// Lists of descriptors (address, length), by which callers of one-sided libraries name memory. Here they
// become blocks of grids.
//
// Caches are pages of equal length side by side, so nearly every list names only a few grids: one for each
// tensor. Whichever pages it names, a transfer is then a copy program over grids, and tables of block
// numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer::raw_agent {

struct Descriptor {
  std::uint64_t address, nbytes, device;
  bool operator==(const Descriptor&) const = default;
  auto operator<=>(const Descriptor&) const = default;
};
static_assert(sizeof(Descriptor) == 24);  // a row of an N x 3 array

// `count` blocks of one length, `stride` bytes apart.
struct Strided { std::uint64_t address, nbytes, device, stride, count; };
static_assert(sizeof(Strided) == 40);  // a row of an N x 5 array

// A contiguous stretch of registered memory.
struct Section {
  std::uint64_t address, nbytes;
  RegionId region;
  std::uint64_t offset;  // from the region's base
  MemoryKind kind;
  int device;  // of GPU memory; 0 for the host's
};

// Sections of one agent, ours or a peer's. A peer may name very many, in any order: what a call costs never
// grows with the square of their number.
class SectionMap {
 public:
  SectionMap() = default;
  explicit SectionMap(std::vector<Section> sections);
  // Those of `newer` replace all those of the regions that it names.
  void take(const SectionMap& newer);
  void remove(std::span<const RegionId> regions);
  // A section that holds the whole descriptor; null: none does.
  const Section* find(const Descriptor& descriptor, MemoryKind kind) const noexcept;
  const std::vector<Section>& all() const noexcept { return sections_; }

 private:
  void index();

  std::vector<Section> sections_;  // by kind, device and address; those of several regions may overlap
  // For each section: among those of its memory up to it, the one that ends last.
  std::vector<std::uint32_t> farthest_;
};

// Changes a copy, and publishes it: readers go on with the map that they have.
template <class F>
void change(std::shared_ptr<const SectionMap>& sections, F&& f) {
  auto changed = std::make_shared<SectionMap>(*sections);
  f(*changed);
  sections = std::move(changed);
}

// Blocks of equal length side by side within a section.
struct Grid {
  RegionId region;
  std::uint64_t offset;  // of block 0, from the region's base
  std::uint64_t nbytes;  // of each
  std::uint32_t num;
  std::uint64_t section_nbytes;  // of the section that it lies in
};

// A prepared list: entry i is block ids[i] of grids[grid_of(i)].
struct PreparedList {
  std::string agent;  // the agent whose memory it is; "" for ours
  std::vector<Grid> grids;
  std::vector<std::uint32_t> ids;
  std::vector<std::uint32_t> grid_numbers;  // empty where there is one grid
  std::vector<std::uint64_t> addresses;  // of each grid's block 0, in its process

  std::size_t size() const noexcept { return ids.size(); }
  std::uint32_t grid_of(std::size_t entry) const noexcept {
    return grid_numbers.empty() ? 0 : grid_numbers[entry];
  }
};

// Finds each descriptor's grid. kUnknownRegion, kOutOfRange: the message names the first descriptor that no
// section holds. Costs a pass over the list, and a search for each grid.
Result<PreparedList> prepare(const SectionMap& sections, std::span<const Descriptor> descriptors,
                             MemoryKind kind, std::string agent);
// Memory grows only with blocks that were found, whatever counts the rows name.
Result<PreparedList> prepare(const SectionMap& sections, std::span<const Strided> rows, MemoryKind kind,
                             std::string agent);

}  // namespace kvxfer::raw_agent
