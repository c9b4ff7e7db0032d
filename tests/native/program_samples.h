// Random copy programs with everything that programs can have: pages of unequal sizes, single tokens, slices
// of heads, conversions and their scales. And the meaning of such a program, element by element, without the
// walks of copy_program.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "check.h"
#include "core/copy/convert.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/half_loop.h"
#include "kvxfer/transport.h"

namespace program_samples {

using namespace kvxfer;

struct Conversions {
  Dtype src = Dtype::kBf16, dst = Dtype::kE4m3;
  ScalePlace src_scales = ScalePlace::kNone, dst_scales = ScalePlace::kNone;
  bool saturate = false;
};

// What a test wishes of a sample. Chance decides the rest: strides, gaps, the order of axes, which blocks.
struct Wish {
  std::uint32_t num_layers = 2;
  UnitsPerBlock units = {1, 1};
  std::uint32_t unit_tokens = 4;
  std::uint32_t num_coarse = 8, num_fine = 0;  // pairs
  std::uint32_t pairs_per_piece = 3;
  std::uint32_t num_heads = 2;      // that are copied
  std::uint32_t more_heads = 2;     // the most that a side holds beside these
  std::uint32_t run_elements = 32;  // of one token and head; bytes where nothing is converted
  std::uint32_t alignment = 1;      // of all offsets, if run_elements is a multiple of it, too
  bool shared_sources = true;       // two pairs may read one source
  std::optional<Conversions> conversions;
};

inline std::uint32_t any(check::Random& random, std::uint64_t low, std::uint64_t high) {
  return static_cast<std::uint32_t>(random.between(low, high));
}

inline Wish any_wish(check::Random& random) {
  constexpr UnitsPerBlock kUnits[] = {{1, 1}, {1, 1}, {1, 3}, {3, 1}, {2, 3}, {4, 1}};
  constexpr Dtype kNumbers[] = {Dtype::kBf16, Dtype::kF16,  Dtype::kF32,
                                Dtype::kE4m3, Dtype::kE5m2, Dtype::kInt8};
  constexpr Dtype kNarrow[] = {Dtype::kE4m3, Dtype::kE5m2, Dtype::kInt8};
  Wish wish;
  wish.num_layers = any(random, 1, 3);
  wish.units = kUnits[random.below(std::size(kUnits))];
  wish.unit_tokens = any(random, 1, 5);
  wish.num_coarse = any(random, 0, 14);
  wish.num_fine = random.chance(50) ? any(random, 1, 12) : 0;
  if (wish.num_coarse + wish.num_fine == 0) wish.num_coarse = 1;
  wish.pairs_per_piece = any(random, 1, 9);
  wish.num_heads = any(random, 1, 4);
  wish.more_heads = random.chance(20) ? 20 : 2;
  wish.run_elements = random.chance(20) ? any(random, 1, 5) : any(random, 1, 12) * 16;
  if (random.chance(40)) return wish;
  Conversions& conversions = wish.conversions.emplace();
  conversions.src = kNumbers[random.below(std::size(kNumbers))];
  conversions.dst = kNumbers[random.below(std::size(kNumbers))];
  conversions.src_scales = static_cast<ScalePlace>(random.below(3));
  conversions.dst_scales = static_cast<ScalePlace>(random.below(3));
  conversions.saturate = random.chance(30);
  if (conversions.dst_scales == ScalePlace::kRegion) {  // the copy finds them: possible for whole pages only
    wish.units.dst = 1;
    wish.num_fine = 0;
    wish.num_coarse = std::max(wish.num_coarse, 1u);
    if (random.chance(80)) conversions.dst = kNarrow[random.below(std::size(kNarrow))];
  }
  return wish;
}

// One side's memory: where (layer, kv, block, token, head) lies, and its scales behind.
struct Place {
  std::uint64_t offset = 0, layer_stride = 0, kv_stride = 0, block_stride = 0, token_stride = 0,
                head_stride = 0;
  std::uint64_t scales = 0, scales_layer_stride = 0, scales_kv_stride = 0, scales_block_stride = 0,
                scales_token_stride = 0, scales_head_stride = 0;
  std::uint32_t num_blocks = 0, num_scales = 0;
  std::uint64_t end = 0;
};

class Sample {
 public:
  Sample(check::Random& random, const Wish& of, std::uint64_t first_byte = 0) : wish(of), random_(random) {
    auto program = std::make_shared<CopyProgram>();
    program->num_layers = wish.num_layers;
    program->units[kCoarse] = wish.units;
    if (wish.num_fine != 0)
      program->units[kFine] = {wish.units.src * wish.unit_tokens, wish.units.dst * wish.unit_tokens};
    tokens_outer_ = random.chance(50);
    scales_by_head_ = random.chance(50);
    scales_by_token_ = wish.num_fine == 0 && random.chance(20);
    src = place(Side::kSrc, first_byte);
    dst = place(Side::kDst, first_byte);
    const std::uint32_t cut = random.chance(30) ? any(random, 0, wish.num_layers - 1) : 0;
    for (std::uint32_t grain = 0; grain < (wish.num_fine != 0 ? 2u : 1u); ++grain)
      for (std::uint32_t kv = 0; kv < 2; ++kv) {
        if (cut != 0) add_loop(*program, grain, kv, 0, cut);
        add_loop(*program, grain, kv, cut, wish.num_layers - cut);
      }
    if (random.chance(30)) random.shuffle(program->loops);
    move.program = program;
    move.grid = {0, wish.num_layers, wish.num_coarse + wish.num_fine, wish.pairs_per_piece, wish.num_fine};
    choose_ids();
  }

  // Random bytes, with scales of a reasonable size.
  void fill_source(std::byte* bytes) {
    for (std::uint64_t at = src.offset; at < src.end; ++at)
      bytes[at] = static_cast<std::byte>(random_.next());
    if (src.num_scales == 0) return;
    for_each_scale(src, [&](std::uint64_t at) { store(bytes + at, any_scale()); });
  }

  const Wish wish;
  Place src, dst;
  Move move;  // the test sets the bases

 private:
  std::uint64_t gap() { return random_.chance(50) ? 0 : random_.below(48) * wish.alignment; }
  float any_scale() {
    const float scale = std::ldexp(1 + static_cast<float>(random_.below(1024)) / 1024,
                                   static_cast<int>(random_.below(12)) - 8);
    return random_.chance(10) ? -scale : scale;
  }
  static void store(std::byte* at, float value) { std::memcpy(at, &value, sizeof value); }

  Dtype dtype(Side side) const {
    if (!wish.conversions) return Dtype::kBytes;
    return side == Side::kSrc ? wish.conversions->src : wish.conversions->dst;
  }
  std::uint32_t units(Side side) const { return side == Side::kSrc ? wish.units.src : wish.units.dst; }
  bool has_region_scales(Side side) const {
    return wish.conversions && (side == Side::kSrc ? wish.conversions->src_scales
                                                   : wish.conversions->dst_scales) == ScalePlace::kRegion;
  }

  Place place(Side side, std::uint64_t first_byte) {
    Place out;
    const std::uint64_t run = wish.run_elements * itemsize(dtype(side));
    const std::uint32_t tokens = units(side) * wish.unit_tokens,
                        heads = wish.num_heads + any(random_, 0, wish.more_heads);
    const std::uint32_t num_units =
        wish.num_coarse + (wish.num_fine + wish.unit_tokens - 1) / wish.unit_tokens;
    out.num_blocks = (num_units + units(side) - 1) / units(side) + any(random_, 0, 3);
    std::uint64_t chunk;  // the keys, or the values, of a block in a layer
    if (random_.chance(50)) {
      out.head_stride = run + gap();
      out.token_stride = out.head_stride * heads + gap();
      chunk = out.token_stride * tokens;
    } else {
      out.token_stride = run + gap();
      out.head_stride = out.token_stride * tokens + gap();
      chunk = out.head_stride * heads;
    }
    out.offset = first_byte + random_.below(64) * wish.alignment;
    const std::uint64_t end =
        lay_out(chunk, out.num_blocks, out.layer_stride, out.kv_stride, out.block_stride);
    out.end = out.offset + end;
    if (!has_region_scales(side)) {
      out.offset += (heads - wish.num_heads) / 2 * out.head_stride;  // a slice in the middle
      return out;
    }
    out.scales = out.end + random_.below(9);  // need not be aligned
    out.scales_head_stride = scales_by_head_ ? sizeof(float) + random_.below(2) * 4 : 0;
    const std::uint64_t of_token = scales_by_head_ ? out.scales_head_stride * wish.num_heads : sizeof(float);
    out.scales_token_stride = scales_by_token_ ? of_token : 0;
    const std::uint64_t of_block = scales_by_token_ ? of_token * wish.unit_tokens : of_token;
    out.end = out.scales + lay_out(of_block, out.num_blocks, out.scales_layer_stride, out.scales_kv_stride,
                                   out.scales_block_stride);
    out.num_scales = 1;
    out.offset += (heads - wish.num_heads) / 2 * out.head_stride;
    return out;
  }
  // Lays out layers, keys and values, and blocks in one of three orders. Returns the end of the memory.
  std::uint64_t lay_out(std::uint64_t chunk, std::uint32_t num_blocks, std::uint64_t& layer,
                        std::uint64_t& kv, std::uint64_t& block) {
    switch (random_.below(3)) {
      case 0:
        kv = chunk + gap();
        block = 2 * kv + gap();
        layer = block * num_blocks + gap();
        return layer * wish.num_layers;
      case 1:
        kv = chunk + gap();
        layer = 2 * kv + gap();
        block = layer * wish.num_layers + gap();
        return block * num_blocks;
      default:
        block = chunk + gap();
        kv = block * num_blocks + gap();
        layer = 2 * kv + gap();
        return layer * wish.num_layers;
    }
  }
  template <class Visit>
  void for_each_scale(const Place& of, Visit&& visit) const {
    for (std::uint32_t layer = 0; layer < wish.num_layers; ++layer)
      for (std::uint32_t kv = 0; kv < 2; ++kv)
        for (std::uint32_t block = 0; block < of.num_blocks; ++block)
          for (std::uint32_t token = 0; token < (scales_by_token_ ? wish.unit_tokens : 1); ++token)
            for (std::uint32_t head = 0; head < (scales_by_head_ ? wish.num_heads : 1); ++head)
              visit(of.scales + layer * of.scales_layer_stride + kv * of.scales_kv_stride +
                    block * of.scales_block_stride + token * of.scales_token_stride +
                    head * of.scales_head_stride);
  }

  void add_loop(CopyProgram& program, std::uint32_t grain, std::uint32_t kv, std::uint32_t first_layer,
                std::uint32_t num_layers) {
    CopyLoop loop{};
    loop.first_layer = first_layer;
    loop.num_layers = num_layers;
    loop.grain = grain;
    loop.nbytes = wish.run_elements * itemsize(dtype(Side::kSrc));
    const std::uint32_t tokens = grain == kCoarse ? wish.unit_tokens : 1;
    loop.counts[tokens_axis()] = tokens;
    loop.counts[heads_axis()] = wish.num_heads;
    const auto side = [&](const Place& from, std::uint64_t& offset, std::uint64_t& layer_stride,
                          std::uint64_t& block_stride, std::uint64_t& unit_stride,
                          std::uint64_t (&strides)[2]) {
      offset = from.offset + kv * from.kv_stride + first_layer * from.layer_stride;
      layer_stride = from.layer_stride;
      block_stride = from.block_stride;
      unit_stride = tokens * from.token_stride;
      strides[tokens_axis()] = from.token_stride;
      strides[heads_axis()] = from.head_stride;
    };
    side(src, loop.src_offset, loop.src_layer_stride, loop.src_block_stride, loop.src_unit_stride,
         loop.src_strides);
    side(dst, loop.dst_offset, loop.dst_layer_stride, loop.dst_block_stride, loop.dst_unit_stride,
         loop.dst_strides);
    if (wish.conversions) {
      program.conversions.push_back(conversion(program, kv, first_layer, num_layers));
      loop.conversion = static_cast<std::uint32_t>(program.conversions.size());
    }
    program.loops.push_back(loop);
  }
  Conversion conversion(CopyProgram& program, std::uint32_t kv, std::uint32_t first_layer,
                        std::uint32_t num_layers) {
    Conversion out{};
    const Conversions& wanted = *wish.conversions;
    out.src_dtype = wanted.src;
    out.dst_dtype = wanted.dst;
    out.src_scales = wanted.src_scales;
    out.dst_scales = wanted.dst_scales;
    out.saturate = wanted.saturate ? 1 : 0;
    const auto side = [&](ScalePlace where, const Place& of, std::uint64_t& offset,
                          std::uint64_t& layer_stride, std::uint64_t& block_stride,
                          std::uint64_t (&strides)[2]) {
      if (where == ScalePlace::kRegion) {
        offset = of.scales + kv * of.scales_kv_stride + first_layer * of.scales_layer_stride;
        layer_stride = of.scales_layer_stride;
        block_stride = of.scales_block_stride;
        strides[tokens_axis()] = of.scales_token_stride;
        strides[heads_axis()] = of.scales_head_stride;
      } else if (where == ScalePlace::kProgram) {
        const std::uint32_t per_layer = scales_by_head_ ? wish.num_heads : 1;
        offset = program.scales.size();
        layer_stride = random_.chance(70) ? per_layer : 0;
        strides[heads_axis()] = scales_by_head_ ? 1 : 0;
        for (std::uint32_t i = 0; i < per_layer * (layer_stride != 0 ? num_layers : 1); ++i)
          program.scales.push_back(any_scale());
      }
    };
    side(wanted.src_scales, src, out.src_offset, out.src_layer_stride, out.src_block_stride, out.src_strides);
    side(wanted.dst_scales, dst, out.dst_offset, out.dst_layer_stride, out.dst_block_stride, out.dst_strides);
    return out;
  }
  int tokens_axis() const { return tokens_outer_ ? 0 : 1; }
  int heads_axis() const { return tokens_outer_ ? 1 : 0; }

  // Chooses units for the coarse pairs, and tokens of other units for the fine ones; no destination occurs
  // twice.
  void choose_ids() {
    std::vector<std::uint32_t> of_src(src.num_blocks * wish.units.src),
        of_dst(dst.num_blocks * wish.units.dst);
    std::iota(of_src.begin(), of_src.end(), 0u);
    std::iota(of_dst.begin(), of_dst.end(), 0u);
    random_.shuffle(of_src);
    random_.shuffle(of_dst);
    move.src_ids.assign(of_src.begin(), of_src.begin() + wish.num_coarse);
    move.dst_ids.assign(of_dst.begin(), of_dst.begin() + wish.num_coarse);
    if (wish.shared_sources && random_.chance(30) && wish.num_coarse > 1)
      move.src_ids[0] = move.src_ids[1];  // one source twice
    const std::vector<std::uint32_t> src_tokens = tokens_behind(of_src), dst_tokens = tokens_behind(of_dst);
    for (std::uint32_t i = 0; i < wish.num_fine; ++i) {
      move.src_ids.push_back(wish.shared_sources ? any(random_, 0, of_src.size() * wish.unit_tokens - 1)
                                                 : src_tokens[i]);
      move.dst_ids.push_back(dst_tokens[i]);
    }
  }
  // The tokens of units that no coarse pair names, in any order.
  std::vector<std::uint32_t> tokens_behind(const std::vector<std::uint32_t>& units) {
    std::vector<std::uint32_t> tokens;
    for (std::size_t unit = wish.num_coarse; unit < units.size(); ++unit)
      for (std::uint32_t token = 0; token < wish.unit_tokens; ++token)
        tokens.push_back(units[unit] * wish.unit_tokens + token);
    random_.shuffle(tokens);
    return tokens;
  }

  check::Random& random_;
  bool tokens_outer_ = false;  // of a loop's two axes
  bool scales_by_head_ = false, scales_by_token_ = false;
};

// ---- meaning ----

struct Run {
  std::uint64_t src, dst, src_nbytes, dst_nbytes;
  const Conversion* conversion;
  std::uint64_t src_scale, dst_scale;  // offsets, if the conversion has scales
};

inline std::uint64_t scale_place(std::uint64_t offset, std::uint64_t layer_stride, std::uint64_t block_stride,
                                 const std::uint64_t (&strides)[2], std::uint64_t layer, std::uint64_t block,
                                 std::uint64_t i, std::uint64_t j) {
  return offset + layer * layer_stride + block * block_stride + i * strides[0] + j * strides[1];
}

// All runs of one loop and pair; i is the outer index, j the inner one.
inline std::vector<Run> runs_of(const CopyProgram& program, const CopyLoop& loop, std::uint32_t layer,
                                std::uint32_t src_id, std::uint32_t dst_id) {
  std::vector<Run> runs;
  const UnitsPerBlock units = program.units[loop.grain];
  const std::uint64_t l = layer - loop.first_layer, src_block = src_id / units.src,
                      dst_block = dst_id / units.dst;
  const Conversion* conversion = loop.conversion == 0 ? nullptr : &program.conversions[loop.conversion - 1];
  for (std::uint64_t i = 0; i < loop.counts[0]; ++i)
    for (std::uint64_t j = 0; j < loop.counts[1]; ++j) {
      Run run{};
      run.src = loop.src_offset + l * loop.src_layer_stride + src_block * loop.src_block_stride +
                src_id % units.src * loop.src_unit_stride + i * loop.src_strides[0] + j * loop.src_strides[1];
      run.dst = loop.dst_offset + l * loop.dst_layer_stride + dst_block * loop.dst_block_stride +
                dst_id % units.dst * loop.dst_unit_stride + i * loop.dst_strides[0] + j * loop.dst_strides[1];
      run.src_nbytes = run.dst_nbytes = loop.nbytes;
      if (conversion != nullptr) {
        run.conversion = conversion;
        run.dst_nbytes = loop.nbytes / itemsize(conversion->src_dtype) * itemsize(conversion->dst_dtype);
        run.src_scale =
            scale_place(conversion->src_offset, conversion->src_layer_stride, conversion->src_block_stride,
                        conversion->src_strides, l, src_block, i, j);
        run.dst_scale =
            scale_place(conversion->dst_offset, conversion->dst_layer_stride, conversion->dst_block_stride,
                        conversion->dst_strides, l, dst_block, i, j);
      }
      runs.push_back(run);
    }
  return runs;
}

// Calls visit(loop, runs) for every loop and pair of a piece, in the order of the program.
template <class Visit>
void for_each_pair(const Move& move, std::uint32_t piece, Visit&& visit) {
  const PieceGrid& grid = move.grid;
  const std::uint32_t per_layer = (grid.num_pairs + grid.pairs_per_piece - 1) / grid.pairs_per_piece;
  const std::uint32_t layer = grid.first_layer + piece / per_layer;
  const std::uint32_t first = piece % per_layer * grid.pairs_per_piece;
  const std::uint32_t last = std::min(first + grid.pairs_per_piece, grid.num_pairs);
  for (const CopyLoop& loop : move.program->loops) {
    if (layer < loop.first_layer || layer >= loop.first_layer + loop.num_layers) continue;
    for (std::uint32_t pair = first; pair < last; ++pair)
      if ((pair >= grid.num_pairs - grid.num_fine) == (loop.grain == kFine))
        visit(loop, runs_of(*move.program, loop, layer, move.src_ids[pair], move.dst_ids[pair]));
  }
}

// Where the copy stores the scales that it finds: after the runs, each once, in the order of the runs.
inline std::vector<std::uint64_t> found_scales(const std::vector<Run>& runs) {
  std::vector<std::uint64_t> places;
  for (const Run& run : runs)
    if (run.conversion != nullptr && run.conversion->dst_scales == ScalePlace::kRegion &&
        std::find(places.begin(), places.end(), run.dst_scale) == places.end())
      places.push_back(run.dst_scale);
  return places;
}

inline float scale_at(const CopyProgram& program, ScalePlace where, std::uint64_t place,
                      const std::byte* region) {
  float scale = 1;
  if (where == ScalePlace::kProgram) scale = program.scales.at(place);
  if (where == ScalePlace::kRegion) std::memcpy(&scale, region + place, sizeof scale);
  return scale;
}

// Never inlined: clang would turn a missing scale into a multiplication by 1, which changes a NaN's bits.
[[gnu::noinline]] inline float times(float x, float scale) { return x * scale; }
[[gnu::noinline]] inline float over(float x, float scale) { return x / scale; }

inline std::vector<float> values_of(const CopyProgram& program, const Run& run, const std::byte* src) {
  const Dtype dtype = run.conversion->src_dtype;
  const float scale = scale_at(program, run.conversion->src_scales, run.src_scale, src);
  std::vector<float> values;
  for (std::uint64_t at = 0; at < run.src_nbytes; at += itemsize(dtype)) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, src + run.src + at, itemsize(dtype));
    const float x = to_float(dtype, bits);
    values.push_back(run.conversion->src_scales == ScalePlace::kNone ? x : times(x, scale));
  }
  return values;
}

// Copies one piece as the contract of copy_program.h defines it.
inline void apply(const Move& move, std::uint32_t piece, const std::byte* src, std::byte* dst) {
  const CopyProgram& program = *move.program;
  for_each_pair(move, piece, [&](const CopyLoop&, const std::vector<Run>& runs) {
    std::map<std::uint64_t, float> largest_of;  // by the scale's place
    for (const Run& run : runs)
      if (run.conversion != nullptr && run.conversion->dst_scales == ScalePlace::kRegion)
        for (const float x : values_of(program, run, src)) {
          float& largest_yet = largest_of[run.dst_scale];
          if (std::isfinite(x)) largest_yet = std::max(largest_yet, std::fabs(x));
        }
    for (const Run& run : runs) {
      const Conversion* conversion = run.conversion;
      if (conversion == nullptr ||
          (conversion->src_dtype == conversion->dst_dtype && conversion->src_scales == ScalePlace::kNone &&
           conversion->dst_scales == ScalePlace::kNone && conversion->saturate == 0)) {
        std::memcpy(dst + run.dst, src + run.src, run.src_nbytes);
        continue;
      }
      float scale = scale_at(program, conversion->dst_scales, run.dst_scale, dst);
      if (conversion->dst_scales == ScalePlace::kRegion) {
        scale = scale_for(conversion->dst_dtype, largest_of.at(run.dst_scale));
        std::memcpy(dst + run.dst_scale, &scale, sizeof scale);
      }
      std::uint64_t at = run.dst;
      for (const float value : values_of(program, run, src)) {
        const float x = conversion->dst_scales == ScalePlace::kNone ? value : over(value, scale);
        const std::uint32_t bits = from_float(conversion->dst_dtype, x, conversion->saturate != 0);
        std::memcpy(dst + at, &bits, itemsize(conversion->dst_dtype));
        at += itemsize(conversion->dst_dtype);
      }
    }
  });
}

// The bytes of the piece as they cross a stream, read from where they landed.
inline std::vector<std::byte> packed(const Move& move, std::uint32_t piece, const std::byte* dst) {
  std::vector<std::byte> out;
  for_each_pair(move, piece, [&](const CopyLoop&, const std::vector<Run>& runs) {
    for (const Run& run : runs) out.insert(out.end(), dst + run.dst, dst + run.dst + run.dst_nbytes);
    for (const std::uint64_t place : found_scales(runs))
      out.insert(out.end(), dst + place, dst + place + sizeof(float));
  });
  return out;
}

// Calls visit(offset, nbytes) for all that a piece reads at the source, or writes at the destination.
template <class Visit>
void for_each_read(const Move& move, std::uint32_t piece, Visit&& visit) {
  for_each_pair(move, piece, [&](const CopyLoop&, const std::vector<Run>& runs) {
    for (const Run& run : runs) {
      visit(run.src, run.src_nbytes);
      if (run.conversion != nullptr && run.conversion->src_scales == ScalePlace::kRegion)
        visit(run.src_scale, std::uint64_t{sizeof(float)});
    }
  });
}
template <class Visit>
void for_each_written(const Move& move, std::uint32_t piece, Visit&& visit) {
  for_each_pair(move, piece, [&](const CopyLoop&, const std::vector<Run>& runs) {
    for (const Run& run : runs) visit(run.dst, run.dst_nbytes);
    for (const std::uint64_t place : found_scales(runs)) visit(place, std::uint64_t{sizeof(float)});
  });
}

}  // namespace program_samples
