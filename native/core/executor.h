// The CPU's copy executor: runs of a copy program, moved or summed. Non-temporal stores where
// the copy is large and the machine has them (AVX-512 or AVX2, chosen once at run time).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kvxfer/copy_program.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Copies nbytes; the regions must not overlap. Stores bypass the cache from about a page on:
// the destination's reader is a GPU or another core, later. Callers end a batch with
// copy_fence() before they publish it.
void copy_run(std::byte* dst, const std::byte* src, std::size_t nbytes) noexcept;
void copy_fence() noexcept;

// One piece, from a source region mapped at src_base into dst_base. Ends with copy_fence().
void copy_piece(const Move& move, std::uint32_t piece, const std::byte* src_base,
                std::byte* dst_base) noexcept;

enum class Side : std::uint8_t { kSrc, kDst };

// One past the last byte that the piece touches on that side, from the region's base; UINT64_MAX
// where the arithmetic overflows. Costs a pass over the piece's blocks, not over its runs: what a
// transport checks before it follows a peer's offsets.
std::uint64_t piece_end(const Move& move, std::uint32_t piece, Side side) noexcept;

// crc32c (Castagnoli; SSE4.2 where there is) over the piece's bytes in program order, the same
// at both ends.
std::uint32_t checksum_piece(const Move& move, std::uint32_t piece, Side side,
                             const std::byte* base) noexcept;
std::uint32_t crc32c(std::uint32_t crc, const std::byte* bytes, std::size_t nbytes) noexcept;

std::string_view copy_kernel_name() noexcept;  // "avx512-nt", "avx2-nt", "memcpy"

}  // namespace kvxfer
