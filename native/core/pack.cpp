#include "core/pack.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/cell.h"
#include "core/crc32c.h"

namespace kvxfer {
namespace {

// `nbytes` is a multiple of 64 in all caches that we know: the loop becomes vector moves in line,
// where a call of memcpy costs as much again as moving 256 bytes.
inline std::byte* append_run(std::byte* out, const std::byte* src, std::uint64_t nbytes) noexcept {
  std::uint64_t at = 0;
  for (; at + 64 <= nbytes; at += 64) std::memcpy(out + at, src + at, 64);
  if (at != nbytes) std::memcpy(out + at, src + at, nbytes - at);
  return out + nbytes;
}

void gather_cell(const CopyLoop& loop, const std::byte* src, std::byte* out) noexcept {
  for (std::uint32_t i = 0; i < loop.counts[0]; ++i)
    for (std::uint32_t j = 0; j < loop.counts[1]; ++j)
      out = append_run(out, src + i * loop.src_strides[0] + j * loop.src_strides[1], loop.nbytes);
}

// Runs that follow each other without a gap at one end are one stretch of it. Mean over the cells of
// the grain that most pairs are of; blocks that lie side by side are not counted.
std::uint64_t mean_stretch_nbytes(const CopyProgram& program, bool src) noexcept {
  double nbytes = 0, stretches = 0;
  for (const CopyLoop& loop : program.loops) {
    if (loop.grain != kCoarse) continue;
    const std::uint64_t run = src ? loop.nbytes : dst_run_nbytes(loop, program.conversion_of(loop));
    const std::uint64_t* strides = src ? loop.src_strides : loop.dst_strides;
    std::uint64_t stretch = run;
    if (strides[1] == stretch || loop.counts[1] == 1) {
      stretch *= loop.counts[1];
      if (strides[0] == stretch || loop.counts[0] == 1) stretch *= loop.counts[0];
    }
    const double all = static_cast<double>(run) * loop.counts[0] * loop.counts[1] * loop.num_layers;
    nbytes += all;
    stretches += all / static_cast<double>(stretch);
  }
  return stretches == 0 ? 0 : static_cast<std::uint64_t>(nbytes / stretches);
}

}  // namespace

std::uint64_t pair_nbytes(const CopyProgram& program, std::uint32_t layer, std::uint32_t grain) noexcept {
  std::uint64_t total = 0;
  for (const CopyLoop& loop : program.loops)
    if (loop.grain == grain && layer - loop.first_layer < loop.num_layers)
      total += packed_nbytes(loop, program.conversion_of(loop));
  return total;
}

std::uint64_t piece_nbytes(const CopyProgram& program, const Piece& piece) noexcept {
  std::uint64_t total = (piece.num_pairs - piece.num_fine) * pair_nbytes(program, piece.layer, kCoarse);
  if (piece.num_fine != 0) total += piece.num_fine * pair_nbytes(program, piece.layer, kFine);
  return total;
}

bool gathers_src(const CopyProgram& program) noexcept {
  return !program.conversions.empty() || mean_stretch_nbytes(program, true) < kGatherBelowNbytes;
}

bool scatters_dst(const CopyProgram& program) noexcept {
  return mean_stretch_nbytes(program, false) < kGatherBelowNbytes;
}

std::uint32_t checksum_piece(const Move& move, std::uint32_t index, Side side, const std::byte* base) {
  const CopyProgram& program = *move.program;
  const ProgramView view = program.view();
  std::vector<std::byte> packed;
  std::uint32_t sum = 0;
  for_each_cell(view, move.grid.piece(index), move.src_ids.data(), move.dst_ids.data(),
                [&](const Cell& cell) {
                  const CopyLoop& loop = *cell.loop;
                  const Conversion* conversion = program.conversion_of(loop);
                  if (side == Side::kSrc && conversion != nullptr) {
                    packed.resize(packed_nbytes(loop, conversion));
                    pack_cell(loop, *conversion, base + cell.src,
                              scales_of(view, *conversion, cell, base, nullptr), packed.data());
                    sum = crc32c(sum, packed.data(), packed.size());
                    return;
                  }
                  const bool src = side == Side::kSrc;
                  const std::uint64_t* strides = src ? loop.src_strides : loop.dst_strides;
                  const std::byte* at = base + (src ? cell.src : cell.dst);
                  const std::uint64_t nbytes = dst_run_nbytes(loop, conversion);
                  for (std::uint32_t i = 0; i < loop.counts[0]; ++i)
                    for (std::uint32_t j = 0; j < loop.counts[1]; ++j)
                      sum = crc32c(sum, at + i * strides[0] + j * strides[1], nbytes);
                  for (std::uint64_t k = 0; k < num_found_scales(loop, conversion); ++k)
                    sum = crc32c(sum, base + found_scale_offset(cell, *conversion, k), sizeof(float));
                });
  return sum;
}

std::uint64_t Packer::longest_cell(const CopyProgram& program) noexcept {
  std::uint64_t longest = 0;
  for (const CopyLoop& loop : program.loops)
    longest = std::max(longest, packed_nbytes(loop, program.conversion_of(loop)));
  return longest;
}

std::size_t Packer::pack(std::byte* out, std::size_t room) noexcept {
  const CopyProgram& program = *move_->program;
  std::size_t used = 0;
  for (; loop_ < program.loops.size(); ++loop_, pair_ = 0) {
    const CopyLoop& loop = program.loops[loop_];
    const std::uint32_t layer = piece_.layer - loop.first_layer;  // wraps below first_layer
    if (layer >= loop.num_layers) continue;
    const Conversion* conversion = program.conversion_of(loop);
    const std::uint64_t nbytes = packed_nbytes(loop, conversion);
    const std::uint32_t first = piece_.begin(loop.grain), num_pairs = piece_.end(loop.grain) - first;
    for (; pair_ < num_pairs; ++pair_) {
      if (room - used < nbytes) return used;
      const Cell cell = cell_of(loop, program.units[loop.grain], layer, move_->src_ids[first + pair_],
                                move_->dst_ids[first + pair_]);
      const std::byte* src = move_->local_base + cell.src;
      if (conversion == nullptr)
        gather_cell(loop, src, out + used);
      else
        pack_cell(loop, *conversion, src,
                  scales_of(program.view(), *conversion, cell, move_->local_base, nullptr), out + used);
      std::uint64_t kept = nbytes;
      if (drop_ != 0) {
        kept -= drop_;
        std::memmove(out + used, out + used + drop_, kept);
        drop_ = 0;
      }
      used += kept;
    }
  }
  return used;
}

void Packer::skip(std::uint64_t nbytes) noexcept {
  const CopyProgram& program = *move_->program;
  drop_ += nbytes;
  for (; loop_ < program.loops.size(); ++loop_, pair_ = 0) {
    const CopyLoop& loop = program.loops[loop_];
    if (piece_.layer - loop.first_layer >= loop.num_layers) continue;
    const std::uint64_t cell_nbytes = packed_nbytes(loop, program.conversion_of(loop));
    const std::uint32_t num_pairs = piece_.end(loop.grain) - piece_.begin(loop.grain);
    for (; pair_ < num_pairs; ++pair_, drop_ -= cell_nbytes)
      if (drop_ < cell_nbytes) return;
  }
}

}  // namespace kvxfer
