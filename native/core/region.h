// The memory that this agent registered, and the checks that keep programs inside it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/control/wire.h"
#include "core/copy/footprint.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

struct Region {
  LocalRegion memory;
  std::shared_ptr<const LocalRegion> shared;  // the same, for moves; set once the region has an id
  std::string name;
  std::uint32_t num_blocks = 0;
  Footprint footprint;
  wire::Bytes layout;
  std::vector<wire::TransportKeys> keys;
  std::vector<std::string> notes;         // which rails could not register it, and why
  std::shared_ptr<const void> keepalive;  // of the pool it lies in
  // The numbers of changes of our regions (Regions): of the one that added it, and of those that brought the
  // last of its keys, one each.
  std::uint64_t added = 0;
  std::vector<std::uint64_t> late_keys;

  wire::Region described() const;
  // For a peer that was told the rest, and of changes up to this number: later keys alone.
  wire::Region keys_after(std::uint64_t told) const;
};

// A region that a caller describes, without an id and without keys. An error says what is wrong with the
// description.
Result<std::unique_ptr<Region>> make_region(std::string name,
                                            std::vector<std::pair<std::byte*, std::uint64_t>> spans,
                                            std::uint32_t num_blocks, const CopyProgram& loops,
                                            wire::Bytes layout, MemoryKind kind, int device);

using RegionTable = std::map<RegionId, std::unique_ptr<Region>>;

// Ids below num_blocks; with `distinct`, none twice. The message names the first offender.
Status check_blocks(std::span<const std::uint32_t> blocks, std::uint32_t num_blocks, bool distinct,
                    std::string_view what, std::string_view region_name);

// The same for one side of a transfer's tables: ids of units, the last num_fine of tokens. check_ids: at the
// destination's side no token is named twice, either, which costs memory for each id.
Status check_range(std::span<const std::uint32_t> ids, std::uint32_t num_fine, const CopyProgram& program,
                   Side side, std::uint32_t num_blocks, std::string_view region_name);
Status check_ids(std::span<const std::uint32_t> ids, std::uint32_t num_fine, const CopyProgram& program,
                 Side side, std::uint32_t num_blocks, std::string_view region_name);

}  // namespace kvxfer
