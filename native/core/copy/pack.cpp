#include "core/copy/pack.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "core/copy/convert_cell.h"
#include "core/copy/crc32c.h"
#include "core/copy/work.h"

namespace kvxfer {
namespace {

// What is converted for a checksum is still in the L2 cache when it is read.
constexpr std::uint64_t kChecksumStepNbytes = 64 * 1024;

// In all caches that we know `nbytes` is a multiple of 64. Then the loop becomes vector moves in line; a
// call of memcpy would cost as much again as moving 256 bytes.
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

// Runs that follow each other without a gap at one end are one stretch of it. The mean is over the cells of
// the grain of most pairs; it ignores blocks that lie side by side.
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

bool finds_gathers_src(const CopyProgram& program) noexcept {
  return !program.conversions.empty() || mean_stretch_nbytes(program, true) < kGatherBelowNbytes;
}

bool finds_scatters_dst(const CopyProgram& program) noexcept {
  return mean_stretch_nbytes(program, false) < kGatherBelowNbytes;
}

std::uint64_t find_least_room(const CopyProgram& program) noexcept {
  std::uint64_t least = sizeof(std::uint64_t);
  for (const CopyLoop& loop : program.loops)
    if (const Conversion* conversion = program.conversion_of(loop);
        conversion != nullptr && conversion->finds_scales())
      least = std::max(least, packed_nbytes(loop, conversion));
  return least;
}

// Of the runs alone.
std::uint64_t find_work_of_a_byte(const CopyProgram& program) noexcept {
  std::uint64_t most = 1;
  for (const CopyLoop& loop : program.loops) {
    const Conversion* conversion = program.conversion_of(loop);
    const std::uint64_t run = std::min(loop.nbytes, dst_run_nbytes(loop, conversion));
    const std::uint64_t runs = std::uint64_t{loop.counts[0]} * loop.counts[1];
    if (run != 0 && runs != 0) most = std::max(most, (kRunWork + kCellWork / runs) / run);
  }
  return most;
}

// Gives each layer the value of the first loop that is put and has it. Layers that have one are passed by
// links, so that none is visited twice.
class Places {
 public:
  Places(std::vector<LayerCount>& layers, std::size_t LayerCount::* place)
      : layers_(layers), place_(place), next_(layers.size() + 1) {
    std::iota(next_.begin(), next_.end(), 0u);
  }
  void put(const CopyLoop& loop, std::size_t value) noexcept {
    for (std::uint32_t l = find(loop.first_layer); l < loop.first_layer + loop.num_layers; l = find(l)) {
      layers_[l].*place_ = value;
      next_[l] = l + 1;
    }
  }

 private:
  std::uint32_t find(std::uint32_t layer) noexcept {
    while (next_[layer] != layer) layer = next_[layer] = next_[next_[layer]];
    return layer;
  }

  std::vector<LayerCount>& layers_;
  std::size_t LayerCount::* place_;
  std::vector<std::uint32_t> next_;  // the layer itself, or one behind it
};

std::vector<LayerCount> count_layers(const CopyProgram& program) {
  std::vector<LayerCount> layers(program.num_layers);
  Places first(layers, &LayerCount::first_loop), end(layers, &LayerCount::end_loop);
  for (std::size_t k = 0; k < program.loops.size(); ++k) first.put(program.loops[k], k);
  for (std::size_t k = program.loops.size(); k-- != 0;) end.put(program.loops[k], k + 1);
  // Where a loop begins and ends, in numbers that wrap; their sums up to a layer are the layer's.
  for (const CopyLoop& loop : program.loops) {
    const Conversion* conversion = program.conversion_of(loop);
    const std::uint64_t nbytes = packed_nbytes(loop, conversion), work = cell_work(loop, conversion);
    layers[loop.first_layer].nbytes[loop.grain] += nbytes;
    layers[loop.first_layer].work[loop.grain] += work;
    if (const std::uint32_t behind = loop.first_layer + loop.num_layers; behind < program.num_layers) {
      layers[behind].nbytes[loop.grain] -= nbytes;
      layers[behind].work[loop.grain] -= work;
    }
  }
  for (std::size_t l = 1; l < layers.size(); ++l)
    for (const std::uint32_t grain : {kCoarse, kFine}) {
      layers[l].nbytes[grain] += layers[l - 1].nbytes[grain];
      layers[l].work[grain] += layers[l - 1].work[grain];
    }
  const bool alike = std::all_of(program.loops.begin(), program.loops.end(), [&](const CopyLoop& loop) {
    return loop.first_layer == 0 && loop.num_layers == program.num_layers;
  });
  if (alike) layers.resize(1);
  return layers;
}

}  // namespace

std::uint64_t pair_nbytes(const CopyProgram& program, std::uint32_t layer, std::uint32_t grain) noexcept {
  if (program.is_counted()) return program.count_of(layer).nbytes[grain];
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

std::uint64_t pair_work(const CopyProgram& program, const Piece& piece) noexcept {
  const bool has[kNumGrains] = {piece.num_fine != piece.num_pairs, piece.num_fine != 0};
  std::uint64_t total = 0;
  if (program.is_counted()) {
    for (const std::uint32_t grain : {kCoarse, kFine})
      if (has[grain]) total = work_sum(total, program.count_of(piece.layer).work[grain]);
    return total;
  }
  for (const CopyLoop& loop : program.loops)
    if (has[loop.grain] && piece.layer - loop.first_layer < loop.num_layers)
      total = work_sum(total, cell_work(loop, program.conversion_of(loop)));
  return total;
}

void count(CopyProgram& program) {
  // Each frame of a stream has some 32 bytes besides the piece's own.
  constexpr std::uint64_t kFrameNbytes = 32;
  ProgramCounts counts;
  counts.layers = count_layers(program);
  counts.least_room = find_least_room(program);
  counts.gathers_src = finds_gathers_src(program);
  counts.scatters_dst = finds_scatters_dst(program);
  counts.work_of_a_byte = find_work_of_a_byte(program);
  for (const LayerCount& layer : counts.layers) {
    std::uint64_t nbytes = UINT64_MAX;
    for (const std::uint64_t each : layer.nbytes)
      if (each != 0) nbytes = std::min(nbytes, each);
    if (nbytes != UINT64_MAX)
      counts.work_of_a_byte = std::max(
          counts.work_of_a_byte, (layer.end_loop - layer.first_loop) * kLoopWork / (nbytes + kFrameNbytes));
  }
  program.counts = std::move(counts);
  for (const std::uint32_t grain : {kCoarse, kFine}) program.pair_nbytes[grain] = 0;
  for (const CopyLoop& loop : program.loops)
    program.pair_nbytes[loop.grain] += loop.num_layers * packed_nbytes(loop, program.conversion_of(loop));
}

std::uint64_t nbytes_of_loops(const CopyProgram& program, const PieceGrid& grid) noexcept {
  std::uint64_t total = 0;
  for (const CopyLoop& loop : program.loops) {
    const std::uint32_t first = std::max(loop.first_layer, grid.first_layer);
    const std::uint32_t last =
        std::min(loop.first_layer + loop.num_layers, grid.first_layer + grid.num_layers);
    const std::uint64_t num_pairs = loop.grain == kFine ? grid.num_fine : grid.num_pairs - grid.num_fine;
    if (first < last) total += (last - first) * num_pairs * packed_nbytes(loop, program.conversion_of(loop));
  }
  return total;
}

bool gathers_src(const CopyProgram& program) noexcept {
  return program.is_counted() ? program.counts.gathers_src : finds_gathers_src(program);
}

bool scatters_dst(const CopyProgram& program) noexcept {
  return program.is_counted() ? program.counts.scatters_dst : finds_scatters_dst(program);
}

std::uint64_t work_of_a_byte(const CopyProgram& program) noexcept {
  return program.is_counted() ? program.counts.work_of_a_byte : find_work_of_a_byte(program);
}

std::uint64_t PieceChecksum::advance(std::uint64_t nbytes) {
  std::uint64_t read = 0;
  while (read < nbytes && !cursor_.done())
    read += cursor_.advance(std::min(nbytes - read, kChecksumStepNbytes), SliceUnit::kWork,
                            [this](const CellPart& part) { add(part); });
  return read;
}

void PieceChecksum::add(const CellPart& part) {
  const CopyLoop& loop = *part.loop;
  const Conversion* conversion = program_->conversion_of(loop);
  const bool src = side_ == Side::kSrc;
  const std::byte* at = base_ + (src ? part.src : part.dst);
  if (src && conversion != nullptr) {
    packed_.resize(packed_nbytes(loop, conversion));
    pack_cell(loop, *conversion, at, scales_of(program_->view(), *conversion, part, base_, nullptr),
              packed_.data());
    sum_ = crc32c(sum_, packed_.data(), packed_.size());
    return;
  }
  const std::uint64_t* strides = src ? loop.src_strides : loop.dst_strides;
  const std::uint64_t nbytes = dst_run_nbytes(loop, conversion);
  for (std::uint32_t i = 0; i < loop.counts[0]; ++i)
    for (std::uint32_t j = 0; j < loop.counts[1]; ++j)
      sum_ = crc32c(sum_, at + i * strides[0] + j * strides[1], nbytes);
  for (std::uint64_t k = 0; k < num_found_scales(loop, conversion); ++k)
    sum_ = crc32c(sum_, base_ + found_scale_offset(*part.cell, *conversion, k), sizeof(float));
}

std::uint32_t checksum_piece(const Move& move, std::uint32_t index, Side side, const std::byte* base) {
  PieceChecksum checksum(move, index, side, base);
  checksum.advance(UINT64_MAX);
  return checksum.value();
}

std::uint64_t Packer::least_room(const CopyProgram& program) noexcept {
  return program.is_counted() ? program.counts.least_room : find_least_room(program);
}

std::size_t Packer::pack(std::byte* out, std::size_t room) noexcept {
  const CopyProgram& program = *move_->program;
  const std::byte* base = move_->local->base;
  std::size_t used = 0;
  do {  // twice if everything that fits was sent before
    const std::uint64_t visited = cursor_.advance(room - used, SliceUnit::kPacked, [&](const CellPart& part) {
      const CopyLoop& loop = *part.loop;
      const Conversion* conversion = program.conversion_of(loop);
      if (conversion == nullptr)
        gather_cell(loop, base + part.src, out + used);
      else
        pack_cell(loop, *conversion, base + part.src,
                  scales_of(program.view(), *conversion, part, base, nullptr), out + used);
      std::uint64_t kept = packed_nbytes(loop, conversion);
      if (drop_ != 0) {
        const std::uint64_t dropped = std::min(drop_, kept);
        kept -= dropped;
        std::memmove(out + used, out + used + dropped, kept);
        drop_ -= dropped;
      }
      used += kept;
    });
    if (visited == 0) break;
  } while (used == 0);
  return used;
}

void Packer::skip(std::uint64_t nbytes) noexcept {
  drop_ += nbytes;
  drop_ -= cursor_.advance(drop_, SliceUnit::kPacked, [](const CellPart&) {});
}

}  // namespace kvxfer
