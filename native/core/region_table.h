// The memory that this agent registered, and the checks that keep programs inside it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/wire.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// The bytes of block 0 over all layers, as disjoint ascending intervals; block b owns the same,
// b * block_stride further.
class Footprint {
 public:
  struct Interval {
    std::uint64_t first, last;  // [first, last)
    std::uint64_t block_stride;
  };

  enum class Half : std::uint8_t { kSrc, kDst };

  // Of what `program` touches of block 0 of each layer on one side. Refused (kOutOfRange) where
  // block 0 or block num_blocks - 1, or what lies between, leaves the spans.
  static Result<Footprint> create(const CopyProgram& program, Half half, std::uint32_t num_blocks,
                                  std::span<const MemorySpan> spans);

  // Does `program`, on this side, touch only bytes of the blocks that it is given? Costs a search
  // for every run of every unit of block 0, at most kMaxRuns, once for each program.
  static constexpr std::uint64_t kMaxRuns = 1 << 20;
  Status contains(const CopyProgram& program, Half half) const;

 private:
  std::vector<Interval> intervals_;
};

struct Region {
  LocalRegion memory;
  std::string name;
  std::uint32_t num_blocks = 0;
  Footprint footprint;
  wire::Bytes layout;
  std::vector<wire::TransportKeys> keys;
  std::shared_ptr<const void> keepalive;  // of the pool it lies in

  wire::Region described() const;
};

using RegionTable = std::map<RegionId, std::unique_ptr<Region>>;

// Ids below num_blocks; with `distinct` also none twice. The message names the first offender.
Status check_blocks(std::span<const std::uint32_t> blocks, std::uint32_t num_blocks, bool distinct,
                    std::string_view what, std::string_view region_name);

// The same of one side of a transfer's tables: ids of units, the last num_fine of tokens. Distinct
// are the tokens that they name.
Status check_ids(std::span<const std::uint32_t> ids, std::uint32_t num_fine, const CopyProgram& program,
                 Footprint::Half half, std::uint32_t num_blocks, std::string_view region_name);

// Structure alone: sizes within bounds, no loop beyond num_layers, no index beyond its table.
Status check_program(const CopyProgram& program);

}  // namespace kvxfer
