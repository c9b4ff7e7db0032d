// Works of a rail by their numbers: finding, withdrawing and forgetting some among others that do not move.
#include "transports/common/work_queue.h"

#include <map>
#include <vector>

#include "check.h"

namespace {

using namespace kvxfer;

TEST(an_index_of_works_says_what_a_map_says) {
  check::Random random(check::seed());
  WorkIndex index;
  std::map<WorkId, PeerId> expected;
  WorkId next = 1;
  for (int round = 0; round < 200'000; ++round) {
    const bool grows = expected.size() < (round < 100'000 ? 3000u : 8u);
    if (expected.empty() || random.below(100) < (grows ? 60u : 40u)) {
      // Mostly the next number; now and then one that comes late.
      const WorkId id = random.chance(95) ? next++ : next + random.below(1 << 20);
      if (expected.contains(id)) continue;
      const auto peer = static_cast<PeerId>(1 + random.below(40));
      expected[id] = peer;
      index.insert(id, peer);
    } else {
      auto chosen = expected.lower_bound(random.below(next));
      if (chosen == expected.end()) chosen = expected.begin();
      REQUIRE_EQ(index.find(chosen->first), chosen->second);
      index.erase(chosen->first);
      CHECK_EQ(index.find(chosen->first), 0u);
      expected.erase(chosen);
    }
    CHECK_EQ(index.size(), expected.size());
  }
  for (const auto& [id, peer] : expected) CHECK_EQ(index.find(id), peer);
  index.erase(UINT64_MAX);  // never existed
  CHECK_EQ(index.size(), expected.size());
}

TEST(a_queue_withdraws_what_was_posted_in_any_order) {
  WorkQueue queue;
  std::vector<Work> works(6);
  const WorkId ids[] = {5, 6, 7, 3, 9, 1};
  for (std::size_t i = 0; i < works.size(); ++i) works[i].id = ids[i];
  for (const Work& work : works) CHECK(queue.post(work));
  for (const WorkId id : {WorkId{3}, WorkId{6}, WorkId{1}}) {
    CHECK(queue.withdraw(id));
    CHECK(!queue.withdraw(id));
  }
  CHECK(!queue.withdraw(8));
  REQUIRE_EQ(queue.size(), 3u);
  const std::size_t last = queue.first([](const Work& work) { return work.id == 9; });
  CHECK_EQ(queue.take(last).id, 9u);
  CHECK_EQ(queue[0].id, 5u);
  CHECK_EQ(queue.first([](const Work&) { return false; }), queue.size());
}

}  // namespace
