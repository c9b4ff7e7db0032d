// A piece that is converted to the form in which it crosses a stream, and back, as a copy program: compared
// byte for byte with the processor's Packer, run by the processor and by kernels.
#include <cstring>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "check.h"
#include "core/copy/executor.h"
#include "core/copy/pack.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu/copy_stream.h"
#include "gpu_memory.h"
#include "program_samples.h"
#include "transports/stream/packed.h"

namespace {

using namespace gpu_memory;
using namespace program_samples;

constexpr std::byte kUntouched{0xa5};
constexpr std::uint64_t kBehind = 64;  // bytes behind a packed piece that must not change

struct PieceOf {
  const Move& move;
  std::uint32_t index;
  Piece piece = move.grid.piece(index);

  std::span<const std::uint32_t> src_ids() const {
    return std::span(move.src_ids).subspan(piece.first_pair, piece.num_pairs);
  }
  std::span<const std::uint32_t> dst_ids() const {
    return std::span(move.dst_ids).subspan(piece.first_pair, piece.num_pairs);
  }
};

// What copies a packed program: from ids and base to ids and base.
using Copy = void (*)(const PackedProgram&, std::span<const std::uint32_t> src_ids,
                      std::span<const std::uint32_t> dst_ids, const std::byte* src, std::byte* dst);

void by_processor(const PackedProgram& packed, std::span<const std::uint32_t> src_ids,
                  std::span<const std::uint32_t> dst_ids, const std::byte* src, std::byte* dst) {
  execute(packed.program, {packed.part.first_layer, 0, packed.part.num_pairs, packed.part.num_fine},
          src_ids.data(), dst_ids.data(), src, dst);
}

void by_kernels(const PackedProgram& packed, std::span<const std::uint32_t> src_ids,
                std::span<const std::uint32_t> dst_ids, const std::byte* src, std::byte* dst) {
  auto context = gpu::PrimaryContext::retain(emulated::driver(), 0);
  REQUIRE_OK(context);
  auto stream = gpu::CopyStream::create(emulated::driver(), context.value().get(), emulated::kernels(),
                                        {.num_ctas = 1});
  REQUIRE_OK(stream);
  const auto ticket = stream.value()->submit(packed.program, packed.part, src_ids, dst_ids,
                                             gpu::Placement(reinterpret_cast<gpu::Address>(src)),
                                             gpu::Placement(reinterpret_cast<gpu::Address>(dst)));
  REQUIRE_OK(ticket);
  REQUIRE_OK(stream.value()->synchronize());
  REQUIRE_EQ(stream.value()->done(), ticket.value());
}

// Packs and unpacks every piece, layer by layer and grain by grain.
void check_sample(check::Random& random, const Wish& wish, Copy copy) {
  Sample sample(random, wish);
  std::vector<std::byte> src(sample.src.end), before(sample.dst.end);
  sample.fill_source(src.data());
  random.fill(before.data(), before.size());
  sample.move.local = unregistered(src.data());
  for (std::uint32_t index = 0; index < sample.move.grid.num_pieces(); ++index) {
    const PieceOf of{sample.move, index};
    std::vector<std::byte> after = before;
    apply(sample.move, index, src.data(), after.data());
    const std::uint64_t nbytes = piece_nbytes(*sample.move.program, of.piece);
    std::vector<std::byte> expected(nbytes);
    REQUIRE_EQ(Packer(sample.move, index).pack(expected.data(), nbytes), nbytes);
    REQUIRE(expected == packed(sample.move, index, after.data()));

    const PackedProgram out = gathered(*sample.move.program, of.piece);
    std::vector<std::byte> slot(nbytes + kBehind, kUntouched);
    copy(out, of.src_ids(), out.pairs, src.data(), slot.data());
    REQUIRE(std::memcmp(slot.data(), expected.data(), nbytes) == 0);
    for (std::uint64_t at = nbytes; at < slot.size(); ++at) REQUIRE(slot[at] == kUntouched);

    const PackedProgram in = scattered(*sample.move.program, of.piece);
    std::vector<std::byte> landed = before;
    copy(in, in.pairs, of.dst_ids(), expected.data(), landed.data());
    REQUIRE(landed == after);
  }
}

TEST(a_piece_is_packed_as_the_processor_packs_it_and_lands_where_it_belongs) {
  check::Random random(check::seed());
  for (int round = 0; round < 400; ++round) check_sample(random, any_wish(random), by_processor);
}

TEST(scales_that_are_found_travel_behind_their_pairs_runs) {
  check::Random random(check::seed());
  for (int round = 0; round < 100; ++round) {
    Wish wish = any_wish(random);
    wish.units.dst = 1;
    wish.num_fine = 0;
    wish.num_coarse = std::max(wish.num_coarse, 2u);
    wish.conversions = Conversions{Dtype::kBf16, Dtype::kE4m3, ScalePlace::kNone, ScalePlace::kRegion, false};
    check_sample(random, wish, by_processor);
  }
}

TEST(kernels_pack_and_scatter_the_same) {
  check::Random random(check::seed());
  for (int round = 0; round < 24; ++round) {
    Wish wish = any_wish(random);
    wish.num_coarse = std::min(wish.num_coarse, 6u) + 1;
    wish.run_elements = std::min(wish.run_elements, 48u);
    check_sample(random, wish, by_kernels);
  }
}

}  // namespace
