// Which writer brings what: each token of a head of a layer belongs to one writer, or to none.
#include <algorithm>
#include <set>
#include <tuple>
#include <vector>

#include "check.h"
#include "core/copy/claims.h"

namespace {

using namespace kvxfer;

using Cell = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;

TEST(claims_are_given_as_a_set_of_cells_gives_them) {
  check::Random random(check::seed());
  std::size_t num_given = 0, num_refused = 0;
  for (int round = 0; round < 300; ++round) {
    const std::uint32_t num_blocks = random.between32(1, 12), num_layers = random.between32(1, 4),
                        num_heads = random.between32(1, 4);
    constexpr std::uint32_t kBlockTokens[] = {1, 4, 12};
    const std::uint32_t block_tokens = kBlockTokens[random.below(3)];
    Claims claims(num_blocks, block_tokens);
    std::set<Cell> claimed;  // layer, head, block, token
    for (int i = 0; i < 30; ++i) {
      const std::uint32_t first_layer = random.between32(0, num_layers - 1),
                          layers = random.between32(1, num_layers - first_layer);
      HeadSlice heads{random.between32(0, num_heads - 1), 1, num_heads};
      heads.num = random.between32(1, num_heads - heads.first);
      std::vector<Stretch> stretches;
      std::set<Cell> wanted;
      // One transfer does not name a token twice.
      for (std::uint32_t block = random.between32(0, num_blocks - 1); block < num_blocks && random.chance(60);
           ++block) {
        const std::uint32_t units = random.chance(40)   ? 1
                                    : random.chance(50) ? block_tokens
                                                        : (block_tokens + 3) / 4;
        const std::uint32_t tokens = block_tokens / units;
        for (std::uint32_t unit = 0; unit < units; ++unit)
          if (units == 1 || random.chance(30)) stretches.push_back({block, unit * tokens, tokens});
      }
      random.shuffle(stretches);
      for (const Stretch& stretch : stretches)
        for (std::uint32_t layer = first_layer; layer < first_layer + layers; ++layer)
          for (std::uint32_t head = heads.first; head < heads.first + heads.num; ++head)
            for (std::uint32_t token = stretch.first_token; token < stretch.first_token + stretch.num_tokens;
                 ++token)
              wanted.insert({layer, head, stretch.block, token});
      const bool free = std::none_of(wanted.begin(), wanted.end(),
                                     [&](const Cell& cell) { return claimed.contains(cell); });
      const Status status = claims.claim(first_layer, layers, heads, stretches);
      REQUIRE_EQ(status.code(), free ? Code::kOk : Code::kRefused);
      if (free) claimed.merge(wanted);
      (free && !stretches.empty() ? num_given : num_refused) += 1;
    }
  }
  CHECK(num_given > 500 && num_refused > 500);
}

TEST(groups_of_writers_are_bounded) {
  Claims claims(4, 1);
  const std::vector<Stretch> nothing;
  const HeadSlice all{0, 1, 1};
  for (std::uint32_t layer = 0; layer < Claims::kMaxGroups; ++layer)
    CHECK_OK(claims.claim(layer, 1, all, nothing));
  CHECK_EQ(claims.claim(Claims::kMaxGroups, 1, all, nothing).code(), Code::kRefused);
  CHECK_OK(claims.claim(7, 1, all, std::vector<Stretch>{{2, 0, 1}}));
  CHECK_EQ(claims.claim(7, 1, all, std::vector<Stretch>{{2, 0, 1}}).code(), Code::kRefused);
}

}  // namespace
