// The CPU's copy executor: copy programs, run. Non-temporal stores where a run is large and the
// machine has them (AVX-512 or AVX2, chosen once at run time).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/copy/convert_cell.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/half_loop.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Copies nbytes; the regions must not overlap. Stores bypass the cache from about a page on, since the
// destination's reader is a GPU or another core, later. Callers end a batch with copy_fence() before they
// publish it.
void copy_run(std::byte* dst, const std::byte* src, std::size_t nbytes) noexcept;
void copy_fence() noexcept;

// Copies all runs of a cell; its run (0, 0) lies at `src` and `dst`. Does not fence.
void copy_cell(const CopyLoop& loop, const Conversion* conversion, const std::byte* src, std::byte* dst,
               const CellScales& scales) noexcept;

// One piece, from a source region mapped at src_base into dst_base. Ends with copy_fence().
void execute(const CopyProgram& program, const Piece& piece, const std::uint32_t* src_ids,
             const std::uint32_t* dst_ids, const std::byte* src_base, std::byte* dst_base) noexcept;
void copy_piece(const Move& move, std::uint32_t piece, const std::byte* src_base,
                std::byte* dst_base) noexcept;

// One past the last byte that the piece touches on that side, from the region's base; UINT64_MAX if the
// arithmetic overflows. Costs a pass over the piece's pairs, not over its runs. A transport checks it before
// it follows a peer's offsets.
std::uint64_t piece_end(const Move& move, std::uint32_t piece, Side side) noexcept;

std::string_view copy_kernel_name() noexcept;  // "avx512-nt", "avx2-nt", "memcpy"

}  // namespace kvxfer
