// Where the bytes of simulated regions lie, the programs between two of them, and the bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/transport.h"

namespace simulation {

using namespace kvxfer;
using Blocks = std::vector<std::uint32_t>;

// A block of one layer is two chunks (keys and values), token by token, in each token head by head.
struct Layout {
  std::uint32_t num_layers = 4, num_blocks = 16, chunk_nbytes = 64;
  bool block_major = false;
  std::uint32_t gap_nbytes = 32;  // after each chunk: belongs to no block
  std::uint32_t block_tokens = 1, num_heads = 1;
  std::uint32_t first_head = 0;   // in the model's numbers: a rank may hold some heads only

  std::uint64_t token_nbytes() const { return chunk_nbytes / block_tokens; }
  std::uint64_t head_nbytes() const { return token_nbytes() / num_heads; }
  std::uint64_t chunk_stride() const { return chunk_nbytes + gap_nbytes; }
  std::uint64_t layer_stride() const { return 2 * chunk_stride() * (block_major ? 1 : num_blocks); }
  std::uint64_t block_stride() const { return 2 * chunk_stride() * (block_major ? num_layers : 1); }
  std::uint64_t nbytes() const { return 2 * chunk_stride() * num_layers * num_blocks; }
  std::uint64_t offset(std::uint32_t layer, std::uint32_t block) const {
    return kFrontNbytes + layer * layer_stride() + block * block_stride();
  }
  struct Place {
    std::uint32_t layer, block, token, head;  // token within the block, head in the model's numbers
  };
  // To which place a byte belongs, if to any.
  std::optional<Place> place_of(std::uint64_t at) const {
    if (at < kFrontNbytes || at - kFrontNbytes >= nbytes()) return {};
    const std::uint64_t within = (at - kFrontNbytes) % chunk_stride();
    if (within >= chunk_nbytes) return {};
    const auto index = static_cast<std::uint32_t>((at - kFrontNbytes) / chunk_stride() / 2);
    const auto token = static_cast<std::uint32_t>(within / token_nbytes());
    const auto head = first_head + static_cast<std::uint32_t>(within % token_nbytes() / head_nbytes());
    if (block_major) return Place{index % num_layers, index / num_layers, token, head};
    return Place{index / num_blocks, index % num_blocks, token, head};
  }
  // Room before the first block and behind the last, so that stray offsets hit memory that is checked.
  static constexpr std::uint64_t kFrontNbytes = 4096;
};

inline std::uint32_t unit_tokens(const Layout& src, const Layout& dst) {
  return std::gcd(src.block_tokens, dst.block_tokens);
}

// Heads in the model's numbers.
struct Heads { std::uint32_t first = 0, num = UINT32_MAX; };

// Copies the wanted heads that both sides hold. `fine`: with loops of single tokens.
inline CopyProgram program_between(const Layout& src, const Layout& dst, bool fine = false,
                                   Heads wanted = {}) {
  const auto end = [](const Layout& of) { return of.first_head + of.num_heads; };
  const std::uint32_t first = std::max({src.first_head, dst.first_head, wanted.first});
  const std::uint32_t last =
      std::min({end(src), end(dst), wanted.num == UINT32_MAX ? UINT32_MAX : wanted.first + wanted.num});
  const bool whole_tokens = last - first == src.num_heads && last - first == dst.num_heads;
  const std::uint32_t unit = unit_tokens(src, dst);
  CopyProgram program;
  program.num_layers = src.num_layers;
  program.units[kCoarse] = {src.block_tokens / unit, dst.block_tokens / unit};
  if (fine) program.units[kFine] = {src.block_tokens, dst.block_tokens};
  program.dst_heads = {first - dst.first_head, last - first, dst.num_heads};
  for (const std::uint32_t tokens : {unit, 1u}) {
    CopyLoop loop{};
    loop.num_layers = src.num_layers;
    loop.src_offset = src.offset(0, 0) + (first - src.first_head) * src.head_nbytes();
    loop.dst_offset = dst.offset(0, 0) + (first - dst.first_head) * dst.head_nbytes();
    loop.src_layer_stride = src.layer_stride();
    loop.dst_layer_stride = dst.layer_stride();
    loop.src_block_stride = src.block_stride();
    loop.dst_block_stride = dst.block_stride();
    loop.src_unit_stride = tokens * src.token_nbytes();
    loop.dst_unit_stride = tokens * dst.token_nbytes();
    loop.counts[0] = 2;
    loop.counts[1] = whole_tokens ? 1 : tokens;
    loop.src_strides[0] = src.chunk_stride();
    loop.dst_strides[0] = dst.chunk_stride();
    loop.src_strides[1] = src.token_nbytes();
    loop.dst_strides[1] = dst.token_nbytes();
    loop.nbytes = whole_tokens ? tokens * src.token_nbytes() : (last - first) * src.head_nbytes();
    loop.grain = program.loops.empty() ? kCoarse : kFine;
    program.loops.push_back(loop);
    if (!fine) break;
  }
  return program;
}

struct Ids {
  Blocks src, dst;
  std::uint32_t num_fine = 0;
};

// Ids that move tokens [first, last) of a sequence that lies in these blocks: whole units, and the rest as
// single tokens.
inline Ids ids_between(const Layout& src, const Layout& dst, const Blocks& src_blocks,
                       const Blocks& dst_blocks, std::uint32_t first, std::uint32_t last) {
  Ids ids;
  const std::uint32_t unit = unit_tokens(src, dst);
  const auto id = [](const Layout& of, const Blocks& blocks, std::uint32_t token, std::uint32_t each) {
    return (blocks.at(token / of.block_tokens) * of.block_tokens + token % of.block_tokens) / each;
  };
  const auto add = [&](std::uint32_t token, std::uint32_t each) {
    ids.src.push_back(id(src, src_blocks, token, each));
    ids.dst.push_back(id(dst, dst_blocks, token, each));
  };
  const std::uint32_t first_unit = (first + unit - 1) / unit, last_unit = last / unit;
  for (std::uint32_t i = first_unit; i < last_unit; ++i) add(i * unit, unit);
  const std::size_t num_coarse = ids.src.size();
  for (std::uint32_t token = first; token < last; ++token)
    if (num_coarse == 0 || token < first_unit * unit || token >= last_unit * unit) add(token, 1);
  ids.num_fine = static_cast<std::uint32_t>(ids.src.size() - num_coarse);
  return ids;
}

// A region's bytes. They outlive the agent while a peer has them mapped, as a memfd does.
struct Memory {
  Layout layout;
  std::vector<std::byte> bytes;
  bool registered = true;
  std::set<std::uint32_t> reused;  // blocks whose pages the agent has given to something else

  explicit Memory(const Layout& of) : layout(of), bytes(2 * Layout::kFrontNbytes + of.nbytes()) {}
  std::byte* chunk(std::uint32_t layer, std::uint32_t block, std::uint32_t half) {
    return bytes.data() + layout.offset(layer, block) + half * layout.chunk_stride();
  }
  void fill(std::uint32_t block, std::uint64_t seed) {
    check::Random random(seed);
    for (std::uint32_t layer = 0; layer < layout.num_layers; ++layer)
      for (std::uint32_t half = 0; half < 2; ++half)
        random.fill(chunk(layer, block, half), layout.chunk_nbytes);
  }
  // One block's bytes in one layer.
  std::vector<std::byte> read(std::uint32_t layer, std::uint32_t block) {
    std::vector<std::byte> out;
    for (std::uint32_t half = 0; half < 2; ++half)
      out.insert(out.end(), chunk(layer, block, half), chunk(layer, block, half) + layout.chunk_nbytes);
    return out;
  }
  // One head's keys and values of one token of a sequence that lies in `blocks`.
  std::byte* cell(std::uint32_t layer, const Blocks& blocks, std::uint32_t token, std::uint32_t head,
                  std::uint32_t half) {
    return chunk(layer, blocks.at(token / layout.block_tokens), half) +
           token % layout.block_tokens * layout.token_nbytes() +
           (head - layout.first_head) * layout.head_nbytes();
  }
  std::vector<std::byte> read(std::uint32_t layer, const Blocks& blocks, std::uint32_t token,
                              std::uint32_t head) {
    std::vector<std::byte> out;
    for (std::uint32_t half = 0; half < 2; ++half) {
      const std::byte* const at = cell(layer, blocks, token, head, half);
      out.insert(out.end(), at, at + layout.head_nbytes());
    }
    return out;
  }
  void write(std::uint32_t layer, const Blocks& blocks, std::uint32_t token, std::uint32_t head,
             const std::vector<std::byte>& value) {
    for (std::uint32_t half = 0; half < 2; ++half)
      std::copy_n(value.begin() + static_cast<std::ptrdiff_t>(half * layout.head_nbytes()),
                  layout.head_nbytes(), cell(layer, blocks, token, head, half));
  }
};
using Memories = std::map<RegionId, std::shared_ptr<Memory>>;

}  // namespace simulation
