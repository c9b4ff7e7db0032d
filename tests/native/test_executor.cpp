#include <cstring>
#include <memory>
#include <numeric>
#include <string_view>
#include <vector>

#include "check.h"
#include "core/copy/crc32c.h"
#include "core/copy/executor.h"
#include "core/copy/pack.h"

namespace {

using namespace kvxfer;

const std::byte* bytes_of(std::string_view text) { return reinterpret_cast<const std::byte*>(text.data()); }

std::uint32_t crc32c_by_bits(const std::vector<std::byte>& bytes) {
  std::uint32_t crc = ~0u;
  for (const std::byte byte : bytes) {
    crc ^= std::to_integer<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
  }
  return ~crc;
}

// Two layers, two heads of a block, tokens: three loops deep, different strides at both ends.
Move make_move(check::Random& random, std::uint32_t num_pairs, std::uint64_t nbytes) {
  CopyLoop loop{};
  loop.num_layers = 2;
  loop.counts[0] = 2;
  loop.counts[1] = 3;
  loop.nbytes = nbytes;
  loop.src_offset = 5;
  loop.dst_offset = 9;
  loop.src_strides[1] = nbytes + 7;
  loop.src_strides[0] = 3 * loop.src_strides[1] + 1;
  loop.src_block_stride = 2 * loop.src_strides[0];
  loop.src_layer_stride = loop.src_block_stride * num_pairs;
  loop.dst_strides[1] = nbytes;  // contiguous here, so runs do not merge on one side alone
  loop.dst_strides[0] = 3 * nbytes + 64;
  loop.dst_block_stride = 2 * loop.dst_strides[0];
  loop.dst_layer_stride = loop.dst_block_stride * num_pairs + 13;
  Move move;
  auto program = std::make_shared<CopyProgram>();
  program->loops = {loop};
  program->num_layers = 2;
  move.program = program;
  move.grid = {0, 2, num_pairs, 3};
  move.src_ids.resize(num_pairs);
  std::iota(move.src_ids.begin(), move.src_ids.end(), 0u);
  move.dst_ids = move.src_ids;
  random.shuffle(move.src_ids);
  random.shuffle(move.dst_ids);
  return move;
}

TEST(crc32c_gives_the_published_values) {
  CHECK_EQ(crc32c(0, bytes_of("123456789"), 9), 0xe3069283u);
  CHECK_EQ(crc32c(0, nullptr, 0), 0u);
  // RFC 3720, B.4
  std::vector<std::byte> bytes(32, std::byte{0});
  CHECK_EQ(crc32c(0, bytes.data(), 32), 0x8a9136aau);
  bytes.assign(32, std::byte{0xff});
  CHECK_EQ(crc32c(0, bytes.data(), 32), 0x62a8ab43u);
  for (std::size_t i = 0; i < 32; ++i) bytes[i] = static_cast<std::byte>(i);
  CHECK_EQ(crc32c(0, bytes.data(), 32), 0x46dd794eu);
}

TEST(crc32c_of_any_length_equals_the_definition_and_continues) {
  check::Random random(check::seed());
  for (const std::size_t nbytes : {1u, 7u, 8u, 63u, 511u, 1535u, 1536u, 1537u, 3072u, 5000u, 20001u}) {
    std::vector<std::byte> bytes(nbytes);
    random.fill(bytes.data(), nbytes);
    const std::uint32_t whole = crc32c(0, bytes.data(), nbytes);
    CHECK_EQ(whole, crc32c_by_bits(bytes));
    const std::size_t cut = random.below(nbytes + 1);
    CHECK_EQ(crc32c(crc32c(0, bytes.data(), cut), bytes.data() + cut, nbytes - cut), whole);
  }
}

TEST(copy_run_moves_exactly_its_bytes_at_any_alignment) {
  check::Random random(check::seed());
  std::vector<std::byte> src(40000), dst(40000), expected(40000);
  random.fill(src.data(), src.size());
  for (int round = 0; round < 3000; ++round) {
    const std::size_t nbytes = round % 3 == 0 ? random.below(30000) : random.below(2500);
    const std::size_t from = random.below(200), to = random.below(200);
    std::memset(dst.data(), 0x5a, to + nbytes + 300);
    std::memset(expected.data(), 0x5a, to + nbytes + 300);
    std::memcpy(expected.data() + to, src.data() + from, nbytes);
    copy_run(dst.data() + to, src.data() + from, nbytes);
    copy_fence();
    REQUIRE(std::memcmp(dst.data(), expected.data(), to + nbytes + 300) == 0);
  }
}

TEST(copy_piece_equals_the_loop_nest_and_sums_agree_at_both_ends) {
  check::Random random(check::seed());
  for (const std::uint64_t nbytes : {1u, 100u, 1024u, 4096u, 5003u}) {
    const Move move = make_move(random, 8, nbytes);
    const CopyLoop& loop = move.program->loops[0];
    std::vector<std::byte> src(loop.src_offset + 2 * loop.src_layer_stride + 64);
    std::vector<std::byte> dst(loop.dst_offset + 2 * loop.dst_layer_stride + 64), expected(dst.size());
    random.fill(src.data(), src.size());
    for (std::uint32_t layer = 0; layer < 2; ++layer)
      for (std::size_t p = 0; p < 8; ++p)
        for (std::uint64_t i = 0; i < 2; ++i)
          for (std::uint64_t j = 0; j < 3; ++j)
            std::memcpy(expected.data() + loop.dst_offset + layer * loop.dst_layer_stride +
                            move.dst_ids[p] * loop.dst_block_stride + i * loop.dst_strides[0] +
                            j * loop.dst_strides[1],
                        src.data() + loop.src_offset + layer * loop.src_layer_stride +
                            move.src_ids[p] * loop.src_block_stride + i * loop.src_strides[0] +
                            j * loop.src_strides[1],
                        nbytes);
    for (std::uint32_t piece = 0; piece < move.grid.num_pieces(); ++piece) {
      copy_piece(move, piece, src.data(), dst.data());
      CHECK_EQ(checksum_piece(move, piece, Side::kSrc, src.data()),
               checksum_piece(move, piece, Side::kDst, dst.data()));
    }
    CHECK(dst == expected);
  }
}

TEST(piece_end_is_the_last_byte_of_the_runs) {
  check::Random random(check::seed());
  const Move move = make_move(random, 8, 100);
  for (std::uint32_t piece = 0; piece < move.grid.num_pieces(); ++piece) {
    std::uint64_t src_end = 0, dst_end = 0;
    for_each_run(move.program->view(), move.grid.piece(piece), move.src_ids.data(), move.dst_ids.data(),
                 [&](std::uint64_t src, std::uint64_t dst, std::uint64_t nbytes) {
                   src_end = std::max(src_end, src + nbytes);
                   dst_end = std::max(dst_end, dst + nbytes);
                 });
    CHECK_EQ(piece_end(move, piece, Side::kSrc), src_end);
    CHECK_EQ(piece_end(move, piece, Side::kDst), dst_end);
  }
}

TEST(piece_end_saturates_where_offsets_overflow) {
  check::Random random(check::seed());
  Move move = make_move(random, 8, 100);
  auto program = std::make_shared<CopyProgram>(*move.program);
  program->loops[0].src_block_stride = UINT64_MAX / 2;  // wraps to something small
  move.program = program;
  move.src_ids.assign(8, 4);
  CHECK_EQ(piece_end(move, 0, Side::kSrc), UINT64_MAX);
}

TEST(a_kernel_is_chosen) { CHECK(!copy_kernel_name().empty()); }

}  // namespace
