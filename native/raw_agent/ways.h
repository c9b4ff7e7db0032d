// Turns two prepared lists into copy programs and tables.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvxfer/copy_program.h"
#include "raw_agent/descriptor_list.h"

namespace kvxfer::raw_agent {

// The most bytes of one loop (core/copy/footprint.cpp).
inline constexpr std::uint64_t kMostLoopNbytes = std::uint64_t{1} << 30;

// One transfer: a program between two regions, and which of its units it moves.
struct Way {
  RegionId src = 0, dst = 0;
  CopyProgram program;
  std::vector<std::uint32_t> src_ids, dst_ids;
  std::uint64_t nbytes = 0;
  bool is_regular = true;  // other requests may use the program; else this list only

  // Equal where programs are equal.
  std::string key() const;
};

// Pairs src[src_entries[i]] with dst[dst_entries[i]]; null entries stand for the whole list in order.
// kLengthMismatch: a pair differs in length, or the two lists name different numbers of entries.
//
// Where several grids have the same blocks named, as the tensors of a cache do, they become the layers of one
// transfer. Else each pair of grids becomes a transfer; or, if that would be many transfers of few blocks,
// one program names each run.
Result<std::vector<Way>> find_ways(const PreparedList& src, const std::uint32_t* src_entries,
                                   const PreparedList& dst, const std::uint32_t* dst_entries,
                                   std::size_t num);

}  // namespace kvxfer::raw_agent
