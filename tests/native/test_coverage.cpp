// What has arrived of an expectation, held to a bitmap of single tokens.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "core/copy/coverage.h"

namespace {

using namespace kvxfer;

// A bit for each layer, block, head and token: what Coverage is to say, in the plainest way.
class Bitmap {
 public:
  Bitmap(std::uint32_t num_blocks, std::uint32_t num_layers, const Needed& needed)
      : num_blocks_(num_blocks),
        num_layers_(num_layers),
        needed_(needed),
        bits_(std::size_t{num_layers} * num_blocks * needed.num_heads * needed.block_tokens) {}

  void mark(std::uint32_t layer, std::uint32_t block, std::uint32_t unit, std::uint32_t units,
            const HeadSlice& heads) {
    const std::uint32_t tokens = needed_.block_tokens / units;
    for (std::uint32_t head = heads.first; head < heads.first + heads.num; ++head)
      for (std::uint32_t token = unit * tokens; token < (unit + 1) * tokens; ++token)
        bits_[place(layer, block, head, token)] = true;
  }
  bool has(std::uint32_t layer, std::uint32_t block) const {
    for (std::uint32_t head = 0; head < needed_.num_heads; ++head)
      for (std::uint32_t token = 0; token < needed_.block_tokens; ++token) {
        const std::uint64_t of_all = std::uint64_t{block} * needed_.block_tokens + token;
        if (of_all < needed_.first_token || of_all >= needed_.end_token) continue;
        if (!bits_[place(layer, block, head, token)]) return false;
      }
    return true;
  }
  bool has_layer(std::uint32_t layer) const {
    for (std::uint32_t block = 0; block < num_blocks_; ++block)
      if (!has(layer, block)) return false;
    return true;
  }
  bool has_block(std::uint32_t block) const {
    for (std::uint32_t layer = 0; layer < num_layers_; ++layer)
      if (!has(layer, block)) return false;
    return true;
  }
  bool has_all() const {
    for (std::uint32_t layer = 0; layer < num_layers_; ++layer)
      if (!has_layer(layer)) return false;
    return true;
  }

 private:
  std::size_t place(std::uint32_t layer, std::uint32_t block, std::uint32_t head, std::uint32_t token) const {
    return ((std::size_t{layer} * num_blocks_ + block) * needed_.num_heads + head) * needed_.block_tokens +
           token;
  }
  std::uint32_t num_blocks_, num_layers_;
  Needed needed_;
  std::vector<bool> bits_;
};

struct Both {
  Both(std::uint32_t blocks, std::uint32_t layers, const Needed& needed)
      : num_blocks(blocks),
        num_layers(layers),
        coverage(blocks, layers, needed),
        bitmap(blocks, layers, needed) {}

  void mark(std::uint32_t layer, std::uint32_t block, std::uint32_t unit, std::uint32_t units,
            const HeadSlice& heads) {
    const bool had_layer = bitmap.has_layer(layer);
    bitmap.mark(layer, block, unit, units, heads);
    CHECK_EQ(coverage.mark(layer, block, unit, units, heads), !had_layer && bitmap.has_layer(layer));
    CHECK_EQ(coverage.complete(block), bitmap.has_block(block));
  }
  void check() const {
    CHECK_EQ(coverage.complete(), bitmap.has_all());
    for (std::uint32_t block = 0; block < num_blocks; ++block)
      CHECK_EQ(coverage.complete(block), bitmap.has_block(block));
  }

  std::uint32_t num_blocks, num_layers;
  Coverage coverage;
  Bitmap bitmap;
};

struct Writer {
  HeadSlice heads;
  std::uint32_t units;
};

std::uint32_t any(check::Random& random, std::uint64_t low, std::uint64_t high) {
  return static_cast<std::uint32_t>(random.between(low, high));
}

Needed any_needed(check::Random& random, std::uint32_t num_blocks) {
  constexpr std::uint32_t kBlockTokens[] = {1, 2, 4, 6, 12, 16, 48};
  Needed needed;
  needed.block_tokens = kBlockTokens[random.below(std::size(kBlockTokens))];
  needed.num_heads = any(random, 1, 8);
  const std::uint64_t num_tokens = std::uint64_t{num_blocks} * needed.block_tokens;
  if (random.chance(50)) needed.first_token = random.below(num_tokens + 1);
  if (random.chance(50)) needed.end_token = random.between(needed.first_token, num_tokens + 3);
  return needed;
}

Writer any_writer(check::Random& random, const Needed& needed) {
  Writer writer;
  writer.heads.total = needed.num_heads;
  writer.heads.first = any(random, 0, needed.num_heads - 1);
  writer.heads.num = any(random, 1, needed.num_heads - writer.heads.first);
  if (random.chance(30)) writer.heads = {0, needed.num_heads, needed.num_heads};
  do {
    writer.units = any(random, 1, needed.block_tokens);
  } while (needed.block_tokens % writer.units != 0);
  return writer;
}

TEST(any_order_of_any_writers_covers_what_their_bits_cover) {
  check::Random random(check::seed());
  std::size_t num_complete = 0;
  for (int round = 0; round < 400; ++round) {
    const std::uint32_t num_blocks = any(random, 1, 5), num_layers = any(random, 1, 3);
    const Needed needed = any_needed(random, num_blocks);
    Both both(num_blocks, num_layers, needed);
    both.check();
    std::vector<Writer> writers;
    for (int i = 0; i < 400; ++i) {
      if (writers.empty() || random.chance(3)) {  // whoever comes, what arrived before has arrived
        writers.push_back(any_writer(random, needed));
        CHECK_OK(both.coverage.split(writers.back().heads, writers.back().units));
        both.check();
      }
      const Writer& writer = writers[random.below(writers.size())];
      const std::uint32_t layer = any(random, 0, num_layers - 1), block = any(random, 0, num_blocks - 1);
      if (random.chance(20))
        for (std::uint32_t unit = 0; unit < writer.units; ++unit)
          both.mark(layer, block, unit, writer.units, writer.heads);
      else
        both.mark(layer, block, any(random, 0, writer.units - 1), writer.units, writer.heads);
      if (i % 16 == 0) both.check();
      if (check::state().num_failures != 0) return;
    }
    // Two writers of all that is left, each of some heads, in all layers and blocks.
    const std::uint32_t cut = any(random, 0, needed.num_heads);
    for (const HeadSlice& heads :
         {HeadSlice{0, cut, needed.num_heads}, HeadSlice{cut, needed.num_heads - cut, needed.num_heads}}) {
      if (heads.num == 0) continue;
      CHECK_OK(both.coverage.split(heads, 1));
      for (std::uint32_t layer = 0; layer < num_layers; ++layer)
        for (std::uint32_t block = 0; block < num_blocks; ++block) both.mark(layer, block, 0, 1, heads);
      both.check();
    }
    num_complete += both.coverage.complete();
  }
  CHECK_EQ(num_complete, 400);
}

TEST(halves_of_the_heads_are_complete_together_alone) {
  for (const bool upper_first : {false, true}) {
    Coverage coverage(2, 2, {.num_heads = 8});
    const HeadSlice lower{0, 4, 8}, upper{4, 4, 8};
    const HeadSlice& first = upper_first ? upper : lower;
    const HeadSlice& second = upper_first ? lower : upper;
    CHECK_OK(coverage.split(first, 1));
    for (std::uint32_t layer = 0; layer < 2; ++layer)
      for (std::uint32_t block = 0; block < 2; ++block) CHECK(!coverage.mark(layer, block, 0, 1, first));
    CHECK(!coverage.complete() && !coverage.complete(0));
    CHECK_OK(coverage.split(second, 1));
    CHECK(!coverage.mark(0, 0, 0, 1, second));
    CHECK(coverage.mark(0, 1, 0, 1, second));
    CHECK(!coverage.mark(1, 1, 0, 1, second));
    CHECK(!coverage.complete(0));
    CHECK(coverage.complete(1));
    CHECK(coverage.mark(1, 0, 0, 1, second));
    CHECK(coverage.complete());
    CHECK(!coverage.mark(1, 0, 0, 1, second));  // again: nothing is new
  }
}

TEST(units_of_two_sizes_meet_in_the_finest_that_both_divide) {
  Coverage coverage(1, 1, {.block_tokens = 12});
  const HeadSlice all{0, 1, 1};
  CHECK_OK(coverage.split(all, 4));  // three tokens each
  CHECK(!coverage.mark(0, 0, 0, 4, all));  // tokens 0 to 2
  CHECK_OK(coverage.split(all, 6));  // two tokens each
  CHECK(!coverage.mark(0, 0, 2, 6, all));  // tokens 4 and 5
  CHECK(!coverage.mark(0, 0, 3, 6, all));
  CHECK(!coverage.mark(0, 0, 3, 4, all));  // tokens 9 to 11
  CHECK(!coverage.complete());
  CHECK_OK(coverage.split(all, 12));
  CHECK(!coverage.mark(0, 0, 8, 12, all));
  CHECK(coverage.mark(0, 0, 3, 12, all));
  CHECK(coverage.complete());
}

TEST(tokens_outside_of_the_range_are_not_waited_for) {
  // Blocks of 4 tokens; 5 to 9 are needed: the second block without its first, half of the third.
  Coverage coverage(3, 1, {.block_tokens = 4, .first_token = 5, .end_token = 10});
  const HeadSlice all{0, 1, 1};
  CHECK(coverage.complete(0));
  CHECK(!coverage.complete(1));
  CHECK_OK(coverage.split(all, 2));
  CHECK(!coverage.mark(0, 0, 0, 2, all));  // nobody asked
  CHECK(!coverage.mark(0, 1, 1, 2, all));
  CHECK_OK(coverage.split(all, 4));
  CHECK(!coverage.mark(0, 1, 1, 4, all));
  CHECK(coverage.complete(1));
  CHECK(coverage.mark(0, 2, 0, 2, all));
  CHECK(coverage.complete());
}

TEST(nothing_that_is_needed_is_complete_from_the_beginning) {
  CHECK(Coverage(0, 3, {}).complete());
  CHECK(Coverage(3, 3, {.block_tokens = 4, .first_token = 7, .end_token = 7}).complete());
  CHECK(Coverage(3, 3, {.block_tokens = 4, .first_token = 12}).complete());
  CHECK(!Coverage(3, 3, {.block_tokens = 4, .first_token = 11}).complete());
}

TEST(a_writer_of_another_layout_is_refused_and_changes_nothing) {
  Coverage coverage(1, 1, {.block_tokens = 16, .num_heads = 8});
  const HeadSlice all{0, 8, 8};
  const auto refusal = [&](const HeadSlice& heads, std::uint32_t units) {
    const Status status = coverage.split(heads, units);
    CHECK_EQ(status.code(), Code::kRefused);
    return status.message();
  };
  CHECK_EQ(refusal({0, 4, 4}, 1), "the writer's program knows 4 heads of the region, which has 8");
  CHECK_EQ(refusal({0, 8, 16}, 1), "the writer's program knows 16 heads of the region, which has 8");
  CHECK_EQ(refusal(all, 3), "the writer's program cuts blocks of 16 tokens into 3 units");
  CHECK_EQ(refusal(all, 32), "the writer's program cuts blocks of 16 tokens into 32 units");
  CHECK_EQ(refusal(all, 0), "the writer's program cuts blocks of 16 tokens into 0 units");
  CHECK_OK(coverage.split(all, 1));
  CHECK(coverage.mark(0, 0, 0, 1, all));
  CHECK(coverage.complete());
}

TEST(more_parts_than_can_be_followed_are_refused_and_change_nothing) {
  Coverage coverage(2048, 4096, {.block_tokens = 256, .num_heads = 256});
  const HeadSlice all{0, 256, 256};
  CHECK_OK(coverage.split(all, 1));
  CHECK_EQ(coverage.split(all, 256).code(), Code::kRefused);
  Status status;
  std::uint32_t head = 0;
  for (; head < 256 && status.ok(); ++head) status = coverage.split({head, 1, 256}, 1);
  CHECK_EQ(status.code(), Code::kRefused);
  CHECK(head > 8 && head < 256);
  for (std::uint32_t block = 0; block < 2048; ++block) {
    CHECK(!coverage.complete(block));
    CHECK_EQ(coverage.mark(7, block, 0, 1, all), block == 2047);
  }
  CHECK(!coverage.complete());
}

}  // namespace
