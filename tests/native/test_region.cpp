// What protects our memory from a peer's tables: checks of ids.
#include <atomic>
#include <string>
#include <string_view>
#include <vector>

#include "block_programs.h"
#include "check.h"
#include "core/region.h"
#include "memory_failure.h"
#include "program_samples.h"

namespace {

using namespace block_programs;
using namespace program_samples;

// ---- ids ----

TEST(ids_of_units_and_tokens_are_held_against_their_blocks) {
  const CopyProgram program = units_and_tokens();  // 2 units, 16 tokens a block
  using Ids = std::vector<std::uint32_t>;
  const auto code = [&](const Ids& ids, std::uint32_t num_fine, Side side = Side::kDst) {
    return check_ids(ids, num_fine, program, side, 4, "kv").code();
  };
  for (const Side side : {Side::kSrc, Side::kDst}) {
    CHECK_EQ(code({0, 7, 3}, 0, side), Code::kOk);
    CHECK_EQ(code({0, 8, 3}, 0, side), Code::kOutOfRange);
    CHECK_EQ(code({UINT32_MAX}, 0, side), Code::kOutOfRange);
    CHECK_EQ(code({0, 63}, 1, side), Code::kOk);
    CHECK_EQ(code({0, 64}, 1, side), Code::kOutOfRange);
    CHECK_EQ(code({0, UINT32_MAX}, 1, side), Code::kOutOfRange);
    CHECK_EQ(code({8, 16}, 1, side), Code::kOutOfRange);  // a unit that only token ids reach
    CHECK_EQ(code({20, 21, 22}, 3, side), Code::kOk);     // tokens only
    CHECK_EQ(code({}, 0, side), Code::kOk);
  }
  CHECK_EQ(code({1, 2, 1}, 0), Code::kDuplicateBlock);
  CHECK_EQ(code({1, 2, 1}, 0, Side::kSrc), Code::kOk);
  CHECK_EQ(code({0, 20, 20}, 2), Code::kDuplicateBlock);
  CHECK_EQ(code({0, 20, 20}, 2, Side::kSrc), Code::kOk);
  // Unit 1 is the second half of block 0: tokens 8 to 15.
  for (std::uint32_t token = 0; token < 32; ++token) {
    CHECK_EQ(code({1, token}, 1), token >= 8 && token < 16 ? Code::kDuplicateBlock : Code::kOk);
    CHECK_EQ(code({1, token}, 1, Side::kSrc), Code::kOk);
  }
  const auto words = [&](const Ids& ids, std::uint32_t num_fine) {
    return check_ids(ids, num_fine, program, Side::kDst, 4, "kv").message();
  };
  CHECK_EQ(words({9}, 0), "dst_blocks: block 4 is not one of the 4 blocks of region 'kv'");
  CHECK_EQ(words({5, 5}, 0), "dst_blocks: block 2, unit 1, is named twice in region 'kv'");
  CHECK_EQ(words({1, 9}, 1), "dst_blocks: block 0, token 9, is named twice in region 'kv'");
}

TEST(tokens_for_a_program_that_has_none_are_refused) {
  CopyProgram program = units_and_tokens();
  program.units[kFine] = {0, 0};
  program.loops.resize(1);
  const std::vector<std::uint32_t> ids = {0, 20};
  for (const Side side : {Side::kSrc, Side::kDst}) {
    const Status status = check_ids(ids, 1, program, side, 4, "kv");
    CHECK_REFUSED(status, Code::kInvalidArgument, "its copy program moves whole units");
    CHECK_OK(check_ids(std::vector<std::uint32_t>{0, 7}, 0, program, side, 4, "kv"));
    const CopyProgram blocks = whole_blocks();  // one unit a block, no tokens
    CHECK_EQ(check_ids(ids, 2, blocks, side, 40, "kv").code(), Code::kInvalidArgument);
  }
}

TEST(what_a_peer_claims_of_its_blocks_costs_no_memory) {
  CopyProgram program = units_and_tokens();
  program.units[kCoarse] = {kHuge / 2, kHuge / 2};
  program.units[kFine] = {kHuge, kHuge};
  const std::vector<std::uint32_t> ids = {0, UINT32_MAX, 5, 2, 3, UINT32_MAX};
  CHECK_OK(check_ids(ids, 3, program, Side::kDst, UINT32_MAX, "kv"));
  CHECK_EQ(check_ids(std::vector<std::uint32_t>{1, 2}, 1, program, Side::kDst, UINT32_MAX, "kv").code(),
           Code::kDuplicateBlock);  // token 2 is the first of unit 1
  CHECK_EQ(check_ids(std::vector<std::uint32_t>{7, 7}, 0, program, Side::kDst, UINT32_MAX, "kv").code(),
           Code::kDuplicateBlock);
}

TEST(checks_of_ids_take_memory_for_each_id_that_was_sent) {
  constexpr std::uint32_t kIds = 256 * 1024;
  static std::atomic<std::size_t> num_bytes;
  CopyProgram program = units_and_tokens();
  program.units[kCoarse] = {1, 1};
  program.units[kFine] = {1, 2};
  // So many blocks are a peer's claim; its ids are spread over all of them.
  for (const std::uint32_t num_blocks : {kIds, 1u << 24, 1u << 30}) {
    std::vector<std::uint32_t> ids(kIds);
    for (std::uint32_t i = 0; i < kIds; ++i) ids[i] = num_blocks / kIds * i;
    for (const std::uint32_t num_fine : {0u, kIds / 2}) {
      num_bytes = 0;
      memory_failure::fails = [](std::size_t nbytes) noexcept { return num_bytes += nbytes, false; };
      const Status status = check_ids(ids, num_fine, program, Side::kDst, num_blocks, "kv");
      memory_failure::fails = nullptr;
      CHECK(status.ok() || num_fine != 0);
      CHECK(num_bytes <= 32 * kIds);
    }
  }
}

TEST(random_ids_are_judged_as_a_table_of_tokens_judges_them) {
  check::Random random(check::seed());
  std::size_t num_ok = 0, num_twice = 0;
  for (int round = 0; round < 3000; ++round) {
    // Few ids are compared with each other, many by bits or in order.
    const std::uint32_t most = random.chance(50) ? 4 : 40;
    const std::uint32_t units = any(random, 1, 4), unit_tokens = any(random, 1, 4),
                        num_blocks = any(random, 1, most * most * 3);
    CopyProgram program;
    program.units[kCoarse] = {1, units};
    program.units[kFine] = {unit_tokens, units * unit_tokens};
    std::vector<bool> seen(std::size_t{num_blocks} * units * unit_tokens);
    std::vector<std::uint32_t> ids;
    bool twice = false;
    const std::uint32_t num_coarse = any(random, 0, most), num_fine = any(random, 0, most);
    for (std::uint32_t i = 0; i < num_coarse; ++i) {
      const std::uint32_t id = any(random, 0, num_blocks * units - 1);
      for (std::uint32_t token = id * unit_tokens; token < (id + 1) * unit_tokens; ++token) {
        twice = twice || seen[token];
        seen[token] = true;
      }
      ids.push_back(id);
    }
    for (std::uint32_t i = 0; i < num_fine; ++i) {
      const std::uint32_t id = any(random, 0, seen.size() - 1);
      twice = twice || seen[id];
      seen[id] = true;
      ids.push_back(id);
    }
    const Code code = check_ids(ids, num_fine, program, Side::kDst, num_blocks, "kv").code();
    CHECK_EQ(code, twice ? Code::kDuplicateBlock : Code::kOk);
    (twice ? num_twice : num_ok) += 1;
  }
  CHECK(num_ok > 300 && num_twice > 300);
}

}  // namespace
