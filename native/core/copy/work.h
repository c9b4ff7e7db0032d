// What it costs to walk a program, in bytes of long runs. A peer writes programs and chooses what a piece is, so
// whatever walks one in slices counts these, and not the bytes that move.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvxfer/copy_program.h"

namespace kvxfer {

inline constexpr std::uint64_t kRunWork = 64;  // at least: a cache line
inline constexpr std::uint64_t kCellWork = 64;  // finding where the runs of a pair lie
inline constexpr std::uint64_t kLoopWork = 8;  // passing a loop, also one without the layer

// a * b, or the most.
inline std::uint64_t work_product(std::uint64_t a, std::uint64_t b) noexcept {
  std::uint64_t out;
  return __builtin_mul_overflow(a, b, &out) ? UINT64_MAX : out;
}
inline std::uint64_t work_sum(std::uint64_t a, std::uint64_t b) noexcept {
  std::uint64_t out;
  return __builtin_add_overflow(a, b, &out) ? UINT64_MAX : out;
}

inline std::uint64_t run_work(const CopyLoop& loop, const Conversion* conversion) noexcept {
  return std::max({loop.nbytes, dst_run_nbytes(loop, conversion), kRunWork});
}
inline std::uint64_t cell_work(const CopyLoop& loop, const Conversion* conversion) noexcept {
  const std::uint64_t runs = std::uint64_t{loop.counts[0]} * loop.counts[1];
  return work_sum(work_product(run_work(loop, conversion), runs), kCellWork);
}

// Of one pair of a piece with pairs of both grains, at most.
std::uint64_t pair_work(const CopyProgram& program, const Piece& piece) noexcept;
// Of passing the loops of a layer, once.
inline std::uint64_t loops_work(const CopyProgram& program, std::uint32_t layer) noexcept {
  const auto [first, end] = program.loops_of(layer);
  return (end - first) * kLoopWork;
}
inline std::uint64_t piece_work(const CopyProgram& program, const Piece& piece) noexcept {
  return work_sum(work_product(pair_work(program, piece), piece.num_pairs), loops_work(program, piece.layer));
}

}  // namespace kvxfer
