// What two prepared lists become: copy programs and tables.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "door/descriptor_list.h"
#include "kvxfer/copy_program.h"

namespace kvxfer::door {

// One transfer: a program between two regions, and which of its units go.
struct Way {
  RegionId src = 0, dst = 0;
  CopyProgram program;
  std::vector<std::uint32_t> src_ids, dst_ids;
  std::uint64_t nbytes = 0;
  bool is_regular = true;  // others may have the same program; else it is of this list alone

  // Alike where programs are.
  std::string key() const;
};

// Pairs src[src_entries[i]] with dst[dst_entries[i]]; null entries are all of a list in order. kLengthMismatch where a pair
// differs in length, or the two name different numbers.
//
// Where some grids have the same blocks named, as the tensors of a cache have, those are the layers of one transfer. Else each
// pair of grids has its own; or, where that would be many of few blocks, a program names each run.
Result<std::vector<Way>> find_ways(const PreparedList& src, const std::uint32_t* src_entries,
                                   const PreparedList& dst, const std::uint32_t* dst_entries,
                                   std::size_t num);

}  // namespace kvxfer::door
