// The programs that every transport has to run: conformance.h asks program_samples.h for them.
#pragma once

#include <vector>

#include "program_samples.h"

namespace kvxfer::conformance {

using program_samples::Conversions;
using program_samples::Wish;

// Short runs, pages of unequal sizes, single tokens, conversions: streams and the kernel's copies have to
// gather, convert and scatter these.
inline std::vector<Wish> wishes() {
  using Place = ScalePlace;
  const auto wish = [](std::uint32_t num_layers, UnitsPerBlock units, std::uint32_t unit_tokens,
                       std::uint32_t num_coarse, std::uint32_t num_fine, std::uint32_t pairs_per_piece,
                       std::uint32_t num_heads, std::uint32_t run_elements) {
    Wish out;
    out.num_layers = num_layers;
    out.units = units;
    out.unit_tokens = unit_tokens;
    out.num_coarse = num_coarse;
    out.num_fine = num_fine;
    out.pairs_per_piece = pairs_per_piece;
    out.num_heads = num_heads;
    out.run_elements = run_elements;
    return out;
  };
  const auto converting = [&](Wish of, Dtype src, Dtype dst, Place src_scales, Place dst_scales) {
    of.conversions = Conversions{src, dst, src_scales, dst_scales, false};
    return of;
  };
  std::vector<Wish> all = {
      wish(2, {1, 1}, 16, 40, 0, 16, 2, 128),  // slices of heads
      wish(2, {1, 3}, 8, 30, 5, 7, 3, 64),
      wish(1, {4, 1}, 4, 64, 0, 9, 2, 512),
      wish(2, {2, 3}, 4, 30, 11, 6, 2, 256),
      wish(1, {1, 1}, 16, 80, 30, 110, 4, 200),  // a piece of two MiB, of no power of two
      wish(2, {2, 1}, 2, 16, 1, 4, 1, 4 * 1024),  // runs too long to be gathered
      wish(1, {1, 2}, 4, 0, 9, 4, 1, 300),  // tokens alone
      converting(wish(2, {1, 1}, 16, 20, 0, 6, 4, 128), Dtype::kBf16, Dtype::kE4m3, Place::kNone,
                 Place::kRegion),
      converting(wish(2, {3, 1}, 8, 20, 0, 6, 2, 64), Dtype::kF16, Dtype::kInt8, Place::kProgram,
                 Place::kRegion),
      converting(wish(2, {2, 3}, 4, 20, 7, 6, 2, 64), Dtype::kE4m3, Dtype::kBf16, Place::kRegion,
                 Place::kNone),
      converting(wish(1, {1, 2}, 4, 20, 7, 50, 2, 1000), Dtype::kInt8, Dtype::kF32, Place::kRegion,
                 Place::kProgram),
      converting(wish(1, {1, 1}, 16, 30, 0, 25, 2, 256), Dtype::kF32, Dtype::kF16, Place::kNone,
                 Place::kNone),
  };
  Wish sparse = wish(2, {1, 1}, 8, 30, 3, 8, 1, 96);  // one head of many: too far apart to be read in one
  sparse.more_heads = 30;
  all.push_back(sparse);
  return all;
}

// Pieces of 1.2 MB and more: no socket takes one at once.
inline std::vector<Wish> large_wishes() {
  std::vector<Wish> all(3);
  all[0] = {.num_layers = 1,
            .num_coarse = 60,
            .pairs_per_piece = 30,
            .num_heads = 16,
            .run_elements = 320,
            .conversions = {}};
  all[1] = all[0];
  all[1].units = {2, 3};
  all[1].num_fine = 9;
  all[1].pairs_per_piece = 34;
  all[2] = {.num_layers = 1,
            .num_coarse = 40,
            .pairs_per_piece = 20,
            .num_heads = 16,
            .run_elements = 256,
            .conversions = {}};
  all[2].conversions = Conversions{Dtype::kBf16, Dtype::kF32, ScalePlace::kNone, ScalePlace::kNone, false};
  // Scribbles where one piece was cancelled must not hit another piece.
  for (Wish& wish : all) wish.shared_sources = false;
  return all;
}

}  // namespace kvxfer::conformance
