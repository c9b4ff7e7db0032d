// Pieces on their way through a stream: gathered and converted at the source, and scattered at the
// destination, in parts of any size. The result equals the copy executor's in one go.
#include <sys/uio.h>

#include <cstring>
#include <string>
#include <vector>

#include "block_programs.h"
#include "check.h"
#include "core/copy/crc32c.h"
#include "core/copy/executor.h"
#include "core/copy/footprint.h"
#include "core/copy/pack.h"
#include "core/copy/run_cursor.h"
#include "core/copy/work.h"
#include "core/region.h"
#include "program_samples.h"

namespace {

using namespace program_samples;
using Bytes = std::vector<std::byte>;

// Both memories of a sample, and the destination's expected content.
struct Ends {
  Ends(check::Random& random, const Wish& wish)
      : sample(random, wish), src(sample.src.end), dst(sample.dst.end) {
    CHECK_OK(check_program(*sample.move.program));
    sample.fill_source(src.data());
    random.fill(dst.data(), dst.size());
    at_src = at_dst = sample.move;
    at_src.local = unregistered(src.data());
    at_dst.local = unregistered(dst.data());
    expected = dst;
    for (std::uint32_t piece = 0; piece < num_pieces(); ++piece)
      apply(sample.move, piece, src.data(), expected.data());
  }
  std::uint32_t num_pieces() const { return sample.move.grid.num_pieces(); }
  Bytes packed_piece(std::uint32_t piece) const { return packed(sample.move, piece, expected.data()); }
  bool landed() const {
    if (dst == expected) return true;
    const auto differs = std::mismatch(dst.begin(), dst.end(), expected.begin()).first;
    FAIL("byte " + std::to_string(differs - dst.begin()) + " of " + std::to_string(dst.size()) +
         " is not what it should be");
    return false;
  }

  Sample sample;
  Bytes src, dst, expected;
  Move at_src, at_dst;
};

// A buffer with guards at its ends: packing must stay within it.
Bytes pack_in_parts(check::Random& random, Packer& packer, std::uint64_t longest) {
  Bytes out;
  for (;;) {
    const std::size_t room = longest + random.below(random.chance(50) ? 16 : 4 * longest + 1);
    Bytes buffer(room + 64, std::byte{0x5a});
    const std::size_t nbytes = packer.pack(buffer.data(), room);
    REQUIRE(nbytes <= room);
    CHECK(std::all_of(buffer.end() - 64, buffer.end(), [](std::byte b) { return b == std::byte{0x5a}; }));
    if (nbytes == 0) return out;
    out.insert(out.end(), buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(nbytes));
  }
}

template <class Check>
void on_many_programs(Check&& check_ends) {
  check::Random random(check::seed());
  for (int round = 0; round < 600 && check::state().num_failures == 0; ++round) {
    Ends ends(random, any_wish(random));
    check_ends(random, ends);
    if (check::state().num_failures != 0)
      std::printf("  round %d: %u and %u units, %u coarse and %u fine pairs\n", round,
                  ends.sample.wish.units.src, ends.sample.wish.units.dst, ends.sample.wish.num_coarse,
                  ends.sample.wish.num_fine);
  }
}

TEST(execute_does_what_the_program_says_element_by_element) {
  on_many_programs([](check::Random&, Ends& ends) {
    for (std::uint32_t piece = 0; piece < ends.num_pieces(); ++piece)
      copy_piece(ends.at_dst, piece, ends.src.data(), ends.dst.data());
    CHECK(ends.landed());
  });
}

// Limits of slices: mostly some that cut every row and run of the samples.
std::uint64_t any_slice(check::Random& random) {
  return 1 + random.below(random.chance(60) ? 600 : random.chance(50) ? 5000 : 100000);
}

TEST(a_sum_in_slices_of_any_size_is_the_sum_of_what_lands) {
  std::uint64_t num_slices = 0;
  on_many_programs([&](check::Random& random, Ends& ends) {
    for (std::uint32_t piece = 0; piece < ends.num_pieces(); ++piece)
      copy_piece(ends.at_dst, piece, ends.src.data(), ends.dst.data());
    for (std::uint32_t piece = 0; piece < ends.num_pieces(); ++piece) {
      const Bytes packed = ends.packed_piece(piece);
      const std::uint32_t expected = crc32c(0, packed.data(), packed.size());
      for (const Side side : {Side::kSrc, Side::kDst}) {
        const bool src = side == Side::kSrc;
        PieceChecksum sum(src ? ends.at_src : ends.at_dst, piece, side,
                          src ? ends.src.data() : ends.dst.data());
        for (; !sum.done(); ++num_slices) CHECK(sum.advance(any_slice(random)) != 0 || sum.done());
        CHECK_EQ(sum.value(), expected);
      }
    }
  });
  CHECK(num_slices > 5000);
}

using block_programs::heap_of;

Move converted(Move move) {
  auto program = std::make_shared<CopyProgram>(*move.program);
  program->loops[0].conversion = 1;
  Conversion& conversion = program->conversions.emplace_back();
  conversion.src_dtype = Dtype::kBf16;
  conversion.dst_dtype = Dtype::kE4m3;
  move.program = program;
  return move;
}

TEST(a_slice_of_the_smallest_runs_is_bounded_by_their_number) {
  const Move move = heap_of(1 << 20, UINT32_MAX, 1);  // more than a thread could ever finish
  Bytes src(1);
  PieceChecksum sum(move, 0, Side::kSrc, src.data());
  for (int slice = 0; slice < 10; ++slice) CHECK_EQ(sum.advance(kSliceNbytes), kSliceNbytes);
  CHECK(!sum.done());
}

TEST(a_pair_of_gigabytes_is_packed_into_a_buffer_of_any_size) {
  check::Random random(check::seed());
  constexpr std::uint64_t kElements = 100'001;
  for (const bool converts : {false, true}) {
    const auto heap = [&](std::uint32_t rows) {
      const Move runs = heap_of(rows, rows, 2 * kElements);
      return converts ? converted(runs) : runs;
    };
    Move move = heap(1 << 10);  // 200 GB
    Bytes src(2 * kElements);
    random.fill(src.data(), src.size());
    move.local = unregistered(src.data());
    CHECK(Packer::least_room(*move.program) <= 8);
    Move once = heap(1);
    once.local = unregistered(src.data());
    Bytes run(piece_nbytes(*once.program, once.grid.piece(0)));
    CHECK_EQ(Packer(once, 0).pack(run.data(), run.size()), run.size());
    Packer packer(move, 0);
    packer.skip(run.size() * 1'000'000 + 3);  // costs steps, not bytes
    Bytes out;
    while (out.size() < 3 * run.size()) {
      Bytes part(8 + random.below(70'000));
      part.resize(packer.pack(part.data(), part.size()));
      REQUIRE(!part.empty());
      out.insert(out.end(), part.begin(), part.end());
    }
    for (std::size_t i = 0; i < out.size(); ++i)
      if (out[i] != run[(i + 3) % run.size()]) {
        FAIL("byte " + std::to_string(i));
        break;
      }
  }
}

TEST(a_piece_is_packed_in_the_order_and_form_in_which_it_lands_at_once_or_in_parts) {
  on_many_programs([](check::Random& random, Ends& ends) {
    const std::uint64_t longest = Packer::least_room(*ends.sample.move.program);
    for (std::uint32_t piece = 0; piece < ends.num_pieces(); ++piece) {
      const Bytes expected = ends.packed_piece(piece);
      CHECK_EQ(piece_nbytes(*ends.sample.move.program, ends.sample.move.grid.piece(piece)), expected.size());
      Packer packer(ends.at_src, piece);
      Bytes out(expected.size() + longest);
      CHECK_EQ(packer.pack(out.data(), out.size()), expected.size());
      CHECK_EQ(packer.pack(out.data() + expected.size(), longest), 0);
      out.resize(expected.size());
      CHECK(out == expected);
      Packer again(ends.at_src, piece);
      CHECK(pack_in_parts(random, again, longest) == expected);
    }
  });
}

TEST(a_transfer_has_the_bytes_of_its_pieces_however_they_are_counted) {
  on_many_programs([](check::Random&, Ends& ends) {
    const Move& move = ends.sample.move;
    std::uint64_t expected = 0;
    for (std::uint32_t piece = 0; piece < ends.num_pieces(); ++piece)
      expected += piece_nbytes(*move.program, move.grid.piece(piece));
    CHECK_EQ(nbytes_of_loops(*move.program, move.grid), expected);
    CopyProgram counted = *move.program;
    count(counted);
    CHECK_EQ(transfer_nbytes(counted, move.grid), expected);
    CHECK_EQ(gathers_src(counted), gathers_src(*move.program));
    CHECK_EQ(scatters_dst(counted), scatters_dst(*move.program));
    CHECK_EQ(Packer::least_room(counted), Packer::least_room(*move.program));
    for (std::uint32_t index = 0; index < ends.num_pieces(); ++index) {
      const Piece piece = move.grid.piece(index);
      CHECK_EQ(piece_nbytes(counted, piece), piece_nbytes(*move.program, piece));
      CHECK_EQ(pair_work(counted, piece), pair_work(*move.program, piece));
      const auto [first, end] = counted.loops_of(piece.layer);
      for (std::size_t k = 0; k < counted.loops.size(); ++k) {
        const bool has = piece.layer - counted.loops[k].first_layer < counted.loops[k].num_layers;
        CHECK(!has || (first <= k && k < end));
        CHECK(has || (k != first && k + 1 != end) || first == end);
      }
    }
  });
}

TEST(what_a_program_makes_us_pass_is_work) {
  // Runs of two bytes; nothing in the first layer, loops of the third around all those of the second.
  CopyProgram program;
  program.num_layers = 3;
  for (std::uint32_t k = 0; k < 8192; ++k) {
    CopyLoop& loop = program.loops.emplace_back();
    loop.first_layer = k == 0 || k == 8191 ? 2 : 1;
    loop.num_layers = loop.counts[0] = loop.counts[1] = 1;
    loop.nbytes = 2;
  }
  REQUIRE_OK(check_program(program));
  CopyProgram counted = program;
  count(counted);
  CHECK_EQ(piece_work(counted, Piece{0, 0, 1, 0}), 0u);
  CHECK_EQ(piece_work(counted, Piece{1, 0, 1, 0}), 8190 * (kRunWork + kCellWork + kLoopWork));
  CHECK_EQ(piece_work(counted, Piece{2, 0, 1, 0}), 2 * (kRunWork + kCellWork) + 8192 * kLoopWork);
  // A cursor counts the same, with or without counts.
  const std::uint32_t id = 0;
  for (const CopyProgram* each : {&program, &counted})
    for (std::uint32_t layer = 0; layer < 3; ++layer) {
      PieceCursor cursor(*each, Piece{layer, 0, 1, 0}, &id, &id);
      std::uint64_t work = 0, num_cells = 0;
      while (!cursor.done())
        work += cursor.advance(1024, SliceUnit::kWork, [&](const CellPart&) { ++num_cells; });
      const std::uint64_t cells = layer == 0 ? 0 : layer == 1 ? 8190 : 2;
      const auto [first, end] = each->loops_of(layer);
      CHECK_EQ(num_cells, cells);
      CHECK(work + 16 * 1024 >= cells * (kRunWork + kCellWork) + (end - first - cells) * kLoopWork);
    }
}

TEST(packing_after_a_skip_goes_on_behind_it) {
  on_many_programs([](check::Random& random, Ends& ends) {
    const std::uint64_t longest = Packer::least_room(*ends.sample.move.program);
    for (std::uint32_t piece = 0; piece < ends.num_pieces(); ++piece) {
      const Bytes expected = ends.packed_piece(piece);
      Packer packer(ends.at_src, piece);
      std::size_t at = 0;
      // Skips of any length, some in a row, with parts packed between them.
      while (at < expected.size()) {
        const std::size_t skipped = random.chance(30) ? 0 : random.below(expected.size() - at + 1);
        packer.skip(skipped);
        at += skipped;
        if (random.chance(30)) continue;
        Bytes buffer(longest + random.below(2 * longest + 1));
        const std::size_t nbytes = packer.pack(buffer.data(), buffer.size());
        REQUIRE(nbytes <= expected.size() - at);
        CHECK(std::equal(buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(nbytes),
                         expected.begin() + static_cast<std::ptrdiff_t>(at)));
        at += nbytes;
      }
      Bytes buffer(longest);
      CHECK_EQ(packer.pack(buffer.data(), buffer.size()), 0);
    }
  });
}

TEST(scattering_in_parts_lands_what_execute_lands) {
  on_many_programs([](check::Random& random, Ends& ends) {
    for (std::uint32_t piece = 0; piece < ends.num_pieces(); ++piece) {
      const Bytes bytes = ends.packed_piece(piece);
      RunCursor cursor(ends.at_dst, piece, Side::kDst);
      for (std::size_t at = 0; at < bytes.size();) {
        const std::size_t nbytes = random.between(
            1, random.chance(50) ? std::min<std::size_t>(7, bytes.size() - at) : bytes.size() - at);
        cursor.scatter(bytes.data() + at, nbytes);
        at += nbytes;
      }
      cursor.scatter(bytes.data(), 0);
    }
    CHECK(ends.landed());
  });
}

TEST(iovecs_of_a_cursor_name_the_same_bytes_in_any_parts) {
  on_many_programs([](check::Random& random, Ends& ends) {
    const bool converts = ends.sample.wish.conversions.has_value();
    for (std::uint32_t piece = 0; piece < ends.num_pieces(); ++piece) {
      const Bytes bytes = ends.packed_piece(piece);
      for (const Side end : {Side::kSrc, Side::kDst}) {
        if (end == Side::kSrc && converts) continue;  // the source's memory has no such bytes
        ends.dst = ends.expected;
        const Move& move = end == Side::kSrc ? ends.at_src : ends.at_dst;
        RunCursor cursor(move, piece, end);
        std::size_t at = 0;
        while (at < bytes.size()) {
          if (random.chance(20)) {
            at += random.below(bytes.size() - at + 1);
            cursor = RunCursor(move, piece, end);
            cursor.skip(at);
          }
          std::vector<iovec> window;
          const std::uint64_t named =
              cursor.append(window, random.between(1, 20), random.between(1, 2 * bytes.size()));
          REQUIRE(named != 0 || at == bytes.size());
          for (const iovec& part : window) {
            REQUIRE(part.iov_len <= bytes.size() - at);
            CHECK(std::memcmp(part.iov_base, bytes.data() + at, part.iov_len) == 0);
            at += part.iov_len;
          }
        }
        std::vector<iovec> window;
        CHECK_EQ(cursor.append(window, 8, 1000), 0);
      }
    }
  });
}

TEST(checksums_agree_at_both_ends_and_with_what_crossed) {
  on_many_programs([](check::Random& random, Ends& ends) {
    ends.dst = ends.expected;
    for (std::uint32_t piece = 0; piece < ends.num_pieces(); ++piece) {
      const Bytes bytes = ends.packed_piece(piece);
      const std::uint32_t sum = crc32c(0, bytes.data(), bytes.size());
      CHECK_EQ(checksum_piece(ends.at_src, piece, Side::kSrc, ends.src.data()), sum);
      CHECK_EQ(checksum_piece(ends.at_dst, piece, Side::kDst, ends.dst.data()), sum);
      // One bit of what landed, scales included.
      std::vector<std::pair<std::uint64_t, std::uint64_t>> written;
      for_each_written(ends.sample.move, piece,
                       [&](std::uint64_t at, std::uint64_t nbytes) { written.push_back({at, nbytes}); });
      const auto [at, nbytes] =
          written[random.chance(30) ? written.size() - 1 : random.below(written.size())];
      std::byte& byte = ends.dst[at + random.below(nbytes)];
      byte ^= std::byte{1};
      CHECK(checksum_piece(ends.at_dst, piece, Side::kDst, ends.dst.data()) != sum);
      byte ^= std::byte{1};
    }
  });
}

// The end of the last block that a piece names, for any of its units: the program may touch nothing beyond
// it.
std::uint64_t brute_end(const Move& move, std::uint32_t index, Side side) {
  const bool src = side == Side::kSrc;
  std::uint64_t end = 0;
  const std::uint32_t per_layer = move.grid.pieces_per_layer();
  const std::uint32_t layer = move.grid.first_layer + index / per_layer,
                      first = index % per_layer * move.grid.pairs_per_piece;
  for (std::uint32_t pair = first; pair < std::min(first + move.grid.pairs_per_piece, move.grid.num_pairs);
       ++pair)
    for (const CopyLoop& loop : move.program->loops) {
      if (layer < loop.first_layer || layer >= loop.first_layer + loop.num_layers) continue;
      if ((loop.grain == kFine) != (pair >= move.grid.num_pairs - move.grid.num_fine)) continue;
      const UnitsPerBlock units = move.program->units[loop.grain];
      for (std::uint32_t unit = 0; unit < (src ? units.src : units.dst); ++unit) {
        const std::uint32_t src_id =
            src ? move.src_ids[pair] / units.src * units.src + unit : move.src_ids[pair];
        const std::uint32_t dst_id =
            src ? move.dst_ids[pair] : move.dst_ids[pair] / units.dst * units.dst + unit;
        const std::vector<Run> runs = runs_of(*move.program, loop, layer, src_id, dst_id);
        for (const Run& run : runs) {
          end = std::max(end, src ? run.src + run.src_nbytes : run.dst + run.dst_nbytes);
          if (run.conversion == nullptr) continue;
          const ScalePlace place = src ? run.conversion->src_scales : run.conversion->dst_scales;
          if (place == ScalePlace::kRegion)
            end = std::max(end, (src ? run.src_scale : run.dst_scale) + sizeof(float));
        }
      }
    }
  return end;
}

TEST(piece_end_is_behind_all_of_the_blocks_that_a_piece_names) {
  on_many_programs([](check::Random&, Ends& ends) {
    for (std::uint32_t piece = 0; piece < ends.num_pieces(); ++piece) {
      for (const Side side : {Side::kSrc, Side::kDst})
        CHECK_EQ(piece_end(ends.sample.move, piece, side), brute_end(ends.sample.move, piece, side));
      std::uint64_t read = 0, written = 0;
      for_each_read(ends.sample.move, piece,
                    [&](std::uint64_t at, std::uint64_t nbytes) { read = std::max(read, at + nbytes); });
      for_each_written(ends.sample.move, piece, [&](std::uint64_t at, std::uint64_t nbytes) {
        written = std::max(written, at + nbytes);
      });
      CHECK(piece_end(ends.sample.move, piece, Side::kSrc) >= read);
      CHECK(piece_end(ends.sample.move, piece, Side::kDst) >= written);
    }
  });
}

TEST(piece_end_saturates_where_offsets_overflow) {
  Move move = heap_of(1, 1, 100);
  auto program = std::make_shared<CopyProgram>(*move.program);
  program->loops[0].src_block_stride = UINT64_MAX / 2;  // wraps to something small
  move.program = program;
  move.src_ids = {4};
  CHECK_EQ(piece_end(move, 0, Side::kSrc), UINT64_MAX);
}

TEST(short_runs_are_gathered_and_long_ones_are_not) {
  check::Random random(check::seed());
  // One run in a cell; several could lie side by side and count as one.
  Wish wish{.unit_tokens = 1, .num_heads = 1, .run_elements = 64, .conversions = {}};
  CHECK(gathers_src(*Sample(random, wish).move.program));
  CHECK(scatters_dst(*Sample(random, wish).move.program));
  wish.run_elements = kGatherBelowNbytes;
  CHECK(!gathers_src(*Sample(random, wish).move.program));
  CHECK(!scatters_dst(*Sample(random, wish).move.program));
  wish.conversions = Conversions{.src = Dtype::kBf16, .dst = Dtype::kE4m3};
  CHECK(gathers_src(*Sample(random, wish).move.program));  // only the source converts
  CHECK(!scatters_dst(*Sample(random, wish).move.program));
  wish.run_elements = kGatherBelowNbytes / 2;  // 2 KiB there, 1 KiB here
  CHECK(scatters_dst(*Sample(random, wish).move.program));
}

}  // namespace
