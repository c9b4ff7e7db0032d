// Copy programs between equal layouts.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string_view>
#include <utility>

#include "core/control/wire.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace block_programs {

using namespace kvxfer;  // as in every test

// Copies every block of every layer to its pair's block. The blocks of a layer lie side by side.
inline CopyProgram pages_of(std::uint64_t block_nbytes, std::uint32_t num_layers = 1,
                            std::uint64_t layer_nbytes = 0) {
  CopyLoop loop{};
  loop.num_layers = num_layers;
  loop.src_layer_stride = loop.dst_layer_stride = layer_nbytes;
  loop.src_block_stride = loop.dst_block_stride = loop.nbytes = block_nbytes;
  loop.counts[0] = loop.counts[1] = 1;
  CopyProgram program;
  program.loops = {loop};
  program.num_layers = num_layers;
  return program;
}

// Pairs of rows x columns runs, all in one place, as one piece.
inline Move heap_of(std::uint32_t rows, std::uint32_t columns, std::uint64_t nbytes,
                    std::uint32_t num_pairs = 1) {
  CopyProgram program = pages_of(nbytes);
  program.loops[0].counts[0] = rows;
  program.loops[0].counts[1] = columns;
  program.loops[0].src_block_stride = program.loops[0].dst_block_stride = 0;
  Move move;
  move.program = std::make_shared<CopyProgram>(std::move(program));
  move.grid = {0, 1, num_pairs, num_pairs};
  move.src_ids.resize(num_pairs);
  std::iota(move.src_ids.begin(), move.src_ids.end(), 0u);
  move.dst_ids = move.src_ids;
  return move;
}

// For tests that check programs: 16 tokens a block, and two heads of 64 bytes a token, one layer after the
// other. A page of the source is two units, a page of the destination one. The scales of the source's pages
// lie behind all pages.
inline constexpr std::uint32_t kTokens = 16, kBlocks = 8, kLayers = 2;
inline constexpr std::uint64_t kTokenNbytes = 128, kBlockNbytes = kTokens * kTokenNbytes,
                               kLayerNbytes = kBlocks * kBlockNbytes, kNbytes = kLayers * kLayerNbytes,
                               kScalesNbytes = kLayers * kBlocks * 4;

inline constexpr std::uint32_t kHuge = wire::kMaxUnits;

inline bool says(const Status& status, std::string_view words) {
  if (status.message().find(words) != std::string::npos) return true;
  std::printf("  it says: %s\n", status.message().c_str());
  return false;
}

inline CopyProgram whole_blocks() {
  CopyLoop loop{};
  loop.num_layers = kLayers;
  loop.src_layer_stride = loop.dst_layer_stride = kLayerNbytes;
  loop.src_block_stride = loop.dst_block_stride = kBlockNbytes;
  loop.counts[0] = kTokens;
  loop.counts[1] = 2;
  loop.src_strides[0] = loop.dst_strides[0] = kTokenNbytes;
  loop.src_strides[1] = loop.dst_strides[1] = loop.nbytes = kTokenNbytes / 2;
  CopyProgram program;
  program.loops = {loop};
  program.num_layers = kLayers;
  return program;
}

// The same in units of 8 tokens, with single tokens.
inline CopyProgram units_and_tokens() {
  CopyProgram program = whole_blocks();
  program.units[kCoarse] = {2, 2};
  program.units[kFine] = {16, 16};
  CopyLoop loop = program.loops[0];
  loop.counts[0] = 8;
  loop.src_unit_stride = loop.dst_unit_stride = 8 * kTokenNbytes;
  program.loops = {loop};
  loop.grain = kFine;
  loop.counts[0] = 1;
  loop.src_unit_stride = loop.dst_unit_stride = kTokenNbytes;
  program.loops.push_back(loop);
  return program;
}

}  // namespace block_programs
