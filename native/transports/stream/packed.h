// A piece's way to or from the form in which it crosses a stream (core/copy/pack.h), as a copy program of its own:
// what kernels gather and scatter by. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/make_job.h"
#include "kvxfer/copy_program.h"

namespace kvxfer {

// The piece's loops, one side replaced by the places in the packed piece. That side's offsets count from the
// packed piece's first byte, and its table is `pairs`; the other side is as it was.
struct PackedProgram {
  CopyProgram program;
  gpu::Part part;
  std::vector<std::uint32_t> pairs;  // 0, 1, ... of each grain
};

// From pages to the packed piece: what is converted is converted here, and scales that are found go behind
// their pair's runs.
PackedProgram gathered(const CopyProgram& program, const Piece& piece);

// From the packed piece to pages: bytes as they are, scales that were found among them.
PackedProgram scattered(const CopyProgram& program, const Piece& piece);

}  // namespace kvxfer
