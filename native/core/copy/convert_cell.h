// Cells that change their elements on the way: their scales are looked up or found, and their runs are
// converted.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvxfer/copy_program.h"

namespace kvxfer {

// Where the scales of a cell's run (0, 0) are; null if the conversion has no scales at that side.
struct CellScales {
  const std::byte* src = nullptr;
  const std::byte* dst = nullptr;  // scales that are given
  std::byte* found = nullptr;      // where found scales are stored
};

// A cell that finds scales is converted in one go, since its scale is known only after its last element.
// check_program refuses cells larger than this. A page of 1,024 tokens, 16 heads of 256 numbers and two
// bytes each has 8 MiB.
inline constexpr std::uint64_t kMostFoundNbytes = 16 * 1024 * 1024;

// Runs of one cell: all of them, or a box of them, or a part of one run.
struct CellPart {
  const CopyLoop* loop;  // the program's where the cell is whole, else with the part's counts and nbytes
  const Cell* cell;
  std::uint32_t i, j;      // of the part's first run, by which its scales are found
  std::uint64_t src, dst;  // where that run begins
  bool whole;
  // For a cell that finds scales and is copied in parts: which scale its runs have, and whether that is
  // still sought.
  std::uint64_t granule = 0;
  bool looks = false;
};

// `src_base` and `dst_base` are the regions' bases. Either may be null if the conversion keeps no scales in
// that region.
CellScales scales_of(const ProgramView& program, const Conversion& conversion, const Cell& cell,
                     const std::byte* src_base, std::byte* dst_base) noexcept;

// The scales of the part's first run.
CellScales scales_of(const ProgramView& program, const Conversion& conversion, const CellPart& part,
                     const std::byte* src_base, std::byte* dst_base) noexcept;

// Converts every run of the cell. Its run (0, 0) lies at `src` and `dst`. Strides are the loop's and the
// conversion's; a caller that gathers or packs passes copies with strides of its own. `dst` is written past
// the cache where lines are filled, so call copy_fence() before publishing it. `next`: run (0, 0) of the
// loop's next cell at the source, to be fetched meanwhile.
void convert_cell(const CopyLoop& loop, const Conversion& conversion, const std::byte* src, std::byte* dst,
                  const CellScales& scales, const std::byte* next = nullptr) noexcept;

// Calls convert_cell() for one cell after the other, each when the next one is known. Ends with drain().
class ConvertStream {
 public:
  // Keeps the addresses of `loop` and `conversion`.
  void push(const CopyLoop& loop, const Conversion& conversion, const std::byte* src, std::byte* dst,
            const CellScales& scales) noexcept;
  void drain() noexcept;

 private:
  void convert_pushed(const std::byte* next) noexcept;

  const CopyLoop* loop_ = nullptr;  // of the last pushed cell, which is not converted yet
  const Conversion* conversion_ = nullptr;
  const std::byte* src_ = nullptr;
  std::byte* dst_ = nullptr;
  CellScales scales_;
};

// The same, from run (0, 0) at `src` to `packed`, through the cache: run after run without gaps, then the
// found scales. Writes packed_nbytes(loop, &conversion) bytes.
void pack_cell(const CopyLoop& loop, const Conversion& conversion, const std::byte* src,
               const CellScales& scales, std::byte* packed) noexcept;

// Bytes of one pair of the loop as it crosses a stream, or lands at the destination.
inline std::uint64_t packed_nbytes(const CopyLoop& loop, const Conversion* conversion) noexcept {
  return dst_run_nbytes(loop, conversion) * loop.counts[0] * loop.counts[1] +
         num_found_scales(loop, conversion) * sizeof(float);
}

}  // namespace kvxfer
