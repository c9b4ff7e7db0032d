// Cells that change their elements on the way: scales are looked up or found, runs are converted.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvxfer/copy_program.h"

namespace kvxfer {

// Where the scales of a cell's run (0, 0) are; null where the conversion has none at that side.
struct CellScales {
  const std::byte* src = nullptr;
  const std::byte* dst = nullptr;  // that are given
  std::byte* found = nullptr;      // where those go that are found
};

// A cell that finds scales is converted in one go, since a scale is known after its last element:
// check_program refuses larger ones. A page of 1,024 tokens, 16 heads of 256 numbers and two bytes each
// has 8 MiB.
inline constexpr std::uint64_t kMostFoundNbytes = 16 * 1024 * 1024;

// Runs of one cell: all of them, or a box of them, or a part of one run.
struct CellPart {
  const CopyLoop* loop;  // the program's where the cell is whole, else with the part's counts and nbytes
  const Cell* cell;
  std::uint32_t i, j;      // of the part's first run, for its scales
  std::uint64_t src, dst;  // where that begins
  bool whole;
  // Of a cell that finds scales and is copied in parts: which scale is its runs', and whether it is still looked for.
  std::uint64_t granule = 0;
  bool looks = false;
};

// `src_base` and `dst_base` are the regions' bases; either may be null where the conversion keeps
// no scales in that region.
CellScales scales_of(const ProgramView& program, const Conversion& conversion, const Cell& cell,
                     const std::byte* src_base, std::byte* dst_base) noexcept;

// Of the part's first run.
CellScales scales_of(const ProgramView& program, const Conversion& conversion, const CellPart& part,
                     const std::byte* src_base, std::byte* dst_base) noexcept;

// Converts every run of the cell from `src` to `dst`, where its run (0, 0) lies. Strides are the
// loop's and the conversion's; a caller that gathers or packs passes copies with strides of its own.
// `dst` is written past the cache where lines are filled: copy_fence() comes before it is published.
// `next`: where run (0, 0) of the loop's next cell lies at the source, to be fetched meanwhile.
void convert_cell(const CopyLoop& loop, const Conversion& conversion, const std::byte* src, std::byte* dst,
                  const CellScales& scales, const std::byte* next = nullptr) noexcept;

// convert_cell() of one cell after the other, each when the next one is known. Ends with drain().
class ConvertStream {
 public:
  // `loop` and `conversion` are kept by address.
  void push(const CopyLoop& loop, const Conversion& conversion, const std::byte* src, std::byte* dst,
            const CellScales& scales) noexcept;
  void drain() noexcept;

 private:
  void convert_pushed(const std::byte* next) noexcept;

  const CopyLoop* loop_ = nullptr;  // of the cell that was pushed last, which is not converted yet
  const Conversion* conversion_ = nullptr;
  const std::byte* src_ = nullptr;
  std::byte* dst_ = nullptr;
  CellScales scales_;
};

// The same from run (0, 0) at `src` to `packed`, through the cache: run after run without gaps, then the
// scales that were found. packed_nbytes(loop, &conversion) bytes.
void pack_cell(const CopyLoop& loop, const Conversion& conversion, const std::byte* src,
               const CellScales& scales, std::byte* packed) noexcept;

// Bytes of one pair of the loop as it crosses a stream, or lands at the destination.
inline std::uint64_t packed_nbytes(const CopyLoop& loop, const Conversion* conversion) noexcept {
  return dst_run_nbytes(loop, conversion) * loop.counts[0] * loop.counts[1] +
         num_found_scales(loop, conversion) * sizeof(float);
}

}  // namespace kvxfer
