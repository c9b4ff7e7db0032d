// What has arrived of an expectation, compared with a bitmap of single tokens.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "core/copy/coverage.h"

namespace {

using namespace kvxfer;

// What one transfer brings: some layers, some heads, and some units of some blocks.
struct Writer {
  std::uint32_t first_layer, num_layers;
  HeadSlice heads;
  std::vector<Stretch> stretches;
};

// A bit for each layer, block, head and token: the expected result in the simplest form.
class Bitmap {
 public:
  Bitmap(std::uint32_t num_blocks, std::uint32_t num_layers, const Needed& needed)
      : num_blocks_(num_blocks),
        num_layers_(num_layers),
        needed_(needed),
        bits_(std::size_t{num_layers} * num_blocks * needed.num_heads * needed.block_tokens) {}

  void mark(std::uint32_t layer, const Writer& writer) {
    for (const Stretch& stretch : writer.stretches)
      for (std::uint32_t head = writer.heads.first; head < writer.heads.first + writer.heads.num; ++head)
        for (std::uint32_t token = 0; token < stretch.num_tokens; ++token)
          bits_[place(layer, stretch.block, head, stretch.first_token + token)] = true;
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

Needed any_needed(check::Random& random, std::uint32_t num_blocks) {
  constexpr std::uint32_t kBlockTokens[] = {1, 2, 4, 6, 12, 16, 48};
  Needed needed;
  needed.block_tokens = kBlockTokens[random.below(std::size(kBlockTokens))];
  needed.num_heads = random.between32(1, 8);
  const std::uint64_t num_tokens = std::uint64_t{num_blocks} * needed.block_tokens;
  if (random.chance(50)) needed.first_token = random.below(num_tokens + 1);
  if (random.chance(50)) needed.end_token = random.between(needed.first_token, num_tokens + 3);
  return needed;
}

Writer any_writer(check::Random& random, std::uint32_t num_blocks, std::uint32_t num_layers,
                  const Needed& needed) {
  Writer writer;
  writer.first_layer = random.between32(0, num_layers - 1);
  writer.num_layers = random.between32(1, num_layers - writer.first_layer);
  writer.heads.total = needed.num_heads;
  writer.heads.first = random.between32(0, needed.num_heads - 1);
  writer.heads.num = random.between32(1, needed.num_heads - writer.heads.first);
  std::uint32_t units;
  do {
    units = random.chance(40) ? 1 : random.between32(1, needed.block_tokens);
  } while (needed.block_tokens % units != 0);
  const std::uint32_t num_tokens = needed.block_tokens / units;
  for (std::uint32_t block = 0; block < num_blocks; ++block)
    for (std::uint32_t unit = 0; unit < units; ++unit)
      if (random.chance(50)) writer.stretches.push_back({block, unit * num_tokens, num_tokens});
  return writer;
}

// Writers claim parts, as those of an expectation do, until nothing is left; their layers arrive in any
// order.
TEST(any_order_of_any_writers_covers_what_their_bits_cover) {
  check::Random random(check::seed());
  std::size_t num_followed = 0, num_whole_blocks = 0;
  for (int round = 0; round < 300; ++round) {
    const std::uint32_t num_blocks = random.between32(1, 5), num_layers = random.between32(1, 3);
    const Needed needed = any_needed(random, num_blocks);
    Coverage coverage(num_blocks, num_layers, needed);
    Bitmap bitmap(num_blocks, num_layers, needed), of_whole_writers(num_blocks, num_layers, needed);
    Claims claims(num_blocks, needed.block_tokens);
    std::vector<Writer> writers;
    const auto follow = [&](Writer writer) {
      if (claims.claim(writer.first_layer, writer.num_layers, writer.heads, writer.stretches).ok())
        writers.push_back(std::move(writer));
    };
    for (int i = 0; i < 30; ++i) follow(any_writer(random, num_blocks, num_layers, needed));
    for (std::uint32_t layer = 0; layer < num_layers; ++layer)  // the rest, cell by cell
      for (std::uint32_t head = 0; head < needed.num_heads; ++head)
        for (std::uint32_t block = 0; block < num_blocks; ++block)
          for (std::uint32_t token = 0; token < needed.block_tokens; ++token)
            follow({layer, 1, {head, 1, needed.num_heads}, {{block, token, 1}}});
    num_followed += writers.size();
    std::vector<std::pair<std::size_t, std::uint32_t>> arrivals;  // writer and layer
    std::vector<std::uint32_t> num_left;
    for (std::size_t i = 0; i < writers.size(); ++i) {
      num_left.push_back(writers[i].num_layers);
      for (std::uint32_t layer = 0; layer < writers[i].num_layers; ++layer)
        arrivals.emplace_back(i, writers[i].first_layer + layer);
    }
    random.shuffle(arrivals);
    CHECK_EQ(coverage.complete(), bitmap.has_all());
    for (const auto& [i, layer] : arrivals) {
      const Writer& writer = writers[i];
      const bool had_layer = bitmap.has_layer(layer);
      bitmap.mark(layer, writer);
      CHECK_EQ(coverage.add(layer, coverage.num_cells(writer.heads, writer.stretches)),
               !had_layer && bitmap.has_layer(layer));
      CHECK_EQ(coverage.complete(), bitmap.has_all());
      if (--num_left[i] != 0) continue;
      coverage.add_writer(writer.num_layers, writer.heads, writer.stretches);
      for (std::uint32_t each = 0; each < writer.num_layers; ++each)
        of_whole_writers.mark(writer.first_layer + each, writer);
      for (std::uint32_t block = 0; block < num_blocks; ++block) {
        CHECK_EQ(coverage.complete(block), of_whole_writers.has_block(block) || bitmap.has_all());
        num_whole_blocks += coverage.complete(block) && !coverage.complete();
      }
      if (check::state().num_failures != 0) return;
    }
    CHECK(coverage.complete());
  }
  CHECK(num_followed > 1000 && num_whole_blocks > 1000);
}

TEST(nothing_that_is_needed_is_complete_from_the_beginning) {
  CHECK(Coverage(0, 3, {}).complete());
  CHECK(Coverage(3, 3, {.block_tokens = 4, .first_token = 7, .end_token = 7}).complete());
  CHECK(Coverage(3, 3, {.block_tokens = 4, .first_token = 12}).complete());
  CHECK(!Coverage(3, 3, {.block_tokens = 4, .first_token = 11}).complete());
}

TEST(a_writer_of_another_layout_is_refused) {
  const Coverage coverage(1, 1, {.block_tokens = 16, .num_heads = 8});
  const HeadSlice all{0, 8, 8};
  const auto refusal = [&](const HeadSlice& heads, std::uint32_t units) {
    const Status status = coverage.check(heads, units);
    CHECK_EQ(status.code(), Code::kRefused);
    return status.message();
  };
  CHECK_EQ(refusal({0, 4, 4}, 1), "the writer's program assumes 4 heads in the region, which has 8");
  CHECK_EQ(refusal({0, 8, 16}, 1), "the writer's program assumes 16 heads in the region, which has 8");
  CHECK_EQ(refusal(all, 3), "the writer's program cuts blocks of 16 tokens into 3 units");
  CHECK_EQ(refusal(all, 32), "the writer's program cuts blocks of 16 tokens into 32 units");
  CHECK_EQ(refusal(all, 0), "the writer's program cuts blocks of 16 tokens into 0 units");
  for (const std::uint32_t units : {1, 2, 16}) CHECK_OK(coverage.check(all, units));
}

}  // namespace
