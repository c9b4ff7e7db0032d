// Pieces that are copied in slices of any size land like pieces that are copied whole, and no slice exceeds
// its limit, for any program.
#include "core/copy/sliced_copy.h"

#include <cstring>
#include <vector>

#include "block_programs.h"
#include "check.h"
#include "core/region.h"
#include "program_samples.h"

namespace {

using namespace program_samples;
using Bytes = std::vector<std::byte>;

// Counts its calls; bytes come through a buffer, as from another process.
class CountingSource final : public CopySource {
 public:
  explicit CountingSource(const Bytes& bytes) : bytes_(bytes), mapped_(bytes.data()) {}
  Status copy(const Move& move, const Piece& pairs) override {
    num_pairs += pairs.num_pairs;
    return mapped_.copy(move, pairs);
  }
  Result<const std::byte*> read(std::uint64_t offset, std::size_t nbytes) override {
    REQUIRE(offset + nbytes <= bytes_.size() && nbytes <= SlicedCopy::kChunkNbytes);
    ++num_reads;
    buffer_.assign(bytes_.begin() + static_cast<std::ptrdiff_t>(offset),
                   bytes_.begin() + static_cast<std::ptrdiff_t>(offset + nbytes));
    return buffer_.data();
  }

  std::uint64_t num_pairs = 0, num_reads = 0;

 private:
  const Bytes& bytes_;
  MappedSource mapped_;
  Bytes buffer_;
};

TEST(slices_of_any_length_do_what_the_program_says) {
  check::Random random(check::seed());
  std::uint64_t num_whole = 0, num_parts = 0;
  for (int round = 0; round < 600 && check::state().num_failures == 0; ++round) {
    Sample sample(random, any_wish(random));
    REQUIRE_OK(check_program(*sample.move.program));
    Bytes src(sample.src.end), dst(sample.dst.end);
    sample.fill_source(src.data());
    random.fill(dst.data(), dst.size());
    Bytes expected = dst;
    Move move = sample.move;
    move.local = unregistered(dst.data());
    CountingSource source(src);
    for (std::uint32_t piece = 0; piece < move.grid.num_pieces(); ++piece) {
      apply(sample.move, piece, src.data(), expected.data());
      SlicedCopy copy(move, piece, 512 + random.below(random.chance(50) ? 512 : 65536));
      while (!copy.done()) REQUIRE_OK(copy.advance(source));
    }
    CHECK(dst == expected);
    num_whole += source.num_pairs;
    num_parts += source.num_reads;
  }
  CHECK(num_whole > 0);
  CHECK(num_parts > 0);
}

struct Shape {
  const char* what;
  std::uint64_t nbytes;
  std::uint32_t counts[2];
  std::uint32_t num_pairs;
  bool is_one_slice = false;
};

TEST(no_slice_is_longer_than_ours_whatever_the_piece_is_made_of) {
  constexpr Shape kShapes[] = {{"one run", 64 << 20, {1, 1}, 1},
                               {"runs of a byte", 1, {1024, 1024}, 2},
                               {"runs over each other", 1 << 20, {8, 8}, 1},
                               {"pairs", 4096, {1, 1}, 16384},
                               {"a piece as the engine makes them", 4096, {1, 1}, 256, true}};
  for (const Shape& shape : kShapes) {
    Move move = block_programs::heap_of(shape.counts[0], shape.counts[1], shape.nbytes, shape.num_pairs);
    Bytes src(shape.nbytes, std::byte{7}), dst(shape.nbytes);
    move.local = unregistered(dst.data());
    MappedSource source(src.data());
    SlicedCopy copy(move, 0);
    std::uint64_t num_slices = 0;
    for (; !copy.done(); ++num_slices) {
      const Result<std::uint64_t> cost = copy.advance(source);
      REQUIRE_OK(cost);
      if (cost.value() > SlicedCopy::kSliceCost + SlicedCopy::kChunkNbytes + 128) FAIL(shape.what);
    }
    if (shape.is_one_slice ? num_slices != 1 : num_slices <= 8) FAIL(shape.what);
    CHECK(dst == src);
  }
}

}  // namespace
