// Copy programs between pages and the packed form in which a piece crosses a stream (core/copy/pack.h).
// Kernels gather and scatter by them. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/make_job.h"
#include "kvxfer/copy_program.h"

namespace kvxfer {

// The piece's loops, with one side replaced by the places in the packed piece. That side's offsets count from
// the packed piece's first byte, and its table is `pairs`. The other side stays as it is.
struct PackedProgram {
  CopyProgram program;
  gpu::Part part;
  std::vector<std::uint32_t> pairs;  // 0, 1, ... for each grain
};

// From pages to the packed piece. Conversions happen here. Scales that are stored with the pages go behind
// their pair's runs.
PackedProgram gathered(const CopyProgram& program, const Piece& piece);

// From the packed piece to pages: bytes as they are, and the scales that were stored among them.
PackedProgram scattered(const CopyProgram& program, const Piece& piece);

}  // namespace kvxfer
