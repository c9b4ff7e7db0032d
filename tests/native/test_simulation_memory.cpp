// An agent that runs out of memory while it serves two peers: the session that needed the memory may end, the
// process goes on, and the other peer's transfers end untouched.
#include "memory_failure.h"

#include <set>
#include <tuple>
#include <vector>

#include "simulated_pair.h"

namespace simulation {
namespace {

// Allocations of one engine that fail; the first is counted from when this is armed; 0: none.
struct Failing {
  const Node* node = nullptr;
  std::uint64_t countdown = 0, in_a_row = 1;
  std::size_t beyond_nbytes = SIZE_MAX;  // larger allocations fail
  std::uint64_t num_failed = 0;

  bool fails(std::size_t nbytes) noexcept {
    if (node == nullptr || running != node) return false;
    const bool now = nbytes > beyond_nbytes || countdown == 1;
    if (countdown > 1)
      --countdown;
    else if (countdown == 1 && --in_a_row == 0)
      countdown = 0;
    num_failed += now ? 1 : 0;
    return now;
  }
};
Failing failing;

// A decode that works with one peer (`pair.src`) in all ways while memory fails, and a third agent.
struct Scene {
  explicit Scene(const std::vector<RailPlan>& rails, std::uint64_t seed)
      : pair(rails, seed), third(pair.world.add("third")) {
    third_region = third.add_region(pair.src_layout);
    for (std::uint32_t block = 0; block < pair.src_layout.num_blocks; ++block)
      third.memory(third_region).fill(block, 5000 + block);
    pair.world.connect(third, pair.dst, rails);
    REQUIRE(records.resize(64).ok());
    pair.dst.engine().watch_records(&records);
    to_victim = third.session_with("decode");
    to_third = pair.dst.session_with("third");
    const auto installed =
        third.engine().install_program(third.now(), to_victim, true, third_region, pair.dst_region,
                                       program_between(pair.src_layout, pair.dst_layout));
    REQUIRE_OK(installed);
    program = installed.value();
    pair.grant(pair.dst, to_third, pair.dst_region, wire::LeaseMode::kWrite, kTheirs, 60 * kSecond, true);
    pair.world.run_for(50 * kMillisecond);
    pair.dst.before_host = [] {
      if (failing.fails(64)) throw std::bad_alloc();
    };
    memory_failure::fails = [](std::size_t nbytes) noexcept { return failing.fails(nbytes); };
  }
  ~Scene() {
    failing = {};
    memory_failure::fails = nullptr;
  }

  std::shared_ptr<Handle> third_writes() {
    TransferRequest request;
    request.peer = to_victim;
    request.program = program;
    request.num_layers = request.layers_ready = pair.src_layout.num_layers;
    request.src_ids = request.dst_ids = kTheirs;
    request.notify = Pair::bytes("theirs");
    request.timeout_ns = Pair::kTimeout;
    return Pair::post(third, std::move(request));
  }
  bool third_is_whole() {
    for (std::uint32_t layer = 0; layer < pair.src_layout.num_layers; ++layer)
      for (const std::uint32_t block : kTheirs)
        if (third.memory(third_region).read(layer, block) != pair.destination().read(layer, block))
          return false;
    return true;
  }

  // An end that was handled again left no second record.
  void check_records() {
    std::vector<Record> taken(64);
    taken.resize(records.take(taken));
    std::set<std::tuple<RecordRole, SessionKey, TransferId>> ends;
    for (const Record& record : taken)
      CHECK(ends.emplace(record.role, record.session, record.transfer).second);
    CHECK(!ends.empty());
  }

  static inline const Blocks kTheirs = {13, 14};
  RecordRing records;  // the victim's
  Pair pair;
  Node& third;
  RegionId third_region = 0;
  SessionKey to_victim = 0, to_third = 0;
  std::uint32_t program = 0;
};

// Runs writes, reads and expectations of one peer from beginning to end. The n-th allocation of the victim's
// engine fails, and those after it. Returns whether there was an n-th one.
bool fail_the_nth(const std::vector<RailPlan>& rails, std::uint64_t n, std::uint64_t in_a_row) {
  Scene scene(rails, check::seed());
  Pair& pair = scene.pair;
  pair.grant_write({0, 1, 4, 5});
  const auto expected = pair.expect("tag", {6, 9, 11});
  pair.grant_read({1, 2});
  pair.world.run_for(10 * kMillisecond);
  failing = {.node = &pair.dst, .countdown = n, .in_a_row = in_a_row};
  const auto theirs = scene.third_writes();
  TransferRequest checked = pair.request(true, {1, 2}, {4, 5}, "note");
  checked.integrity = true;
  std::vector<std::shared_ptr<Handle>> handles = {Pair::post(pair.src, std::move(checked)),
                                                  pair.write({5, 6, 7}, {6, 9, 11}, "tag"),
                                                  pair.read({1, 2}, {0, 1}), expected};
  for (const auto& handle : handles) CHECK(pair.ends(handle));
  CHECK(pair.ends(theirs));
  const bool met = failing.num_failed != 0;
  failing = {};
  // At most one of the two sessions ended. The other peer still has its first session, and misses nothing.
  const bool kept_theirs = pair.dst.session_with("third") == scene.to_third;
  const bool kept_its = pair.dst.session_with("prefill") == pair.to_src;
  CHECK(kept_theirs || kept_its || in_a_row > 1);
  if (kept_theirs) {
    CHECK_EQ(theirs->outcome(), Outcome::kDone);
    CHECK(scene.third_is_whole());
    CHECK(pair.notified(pair.dst, "theirs"));
    const auto again = scene.third_writes();  // the victim goes on serving
    REQUIRE(pair.ends(again));
    CHECK_EQ(again->outcome(), Outcome::kDone);
  }
  if (kept_its)
    for (const auto& handle : handles) CHECK_EQ(handle->outcome(), Outcome::kDone);
  pair.world.run_for(10 * kSecond);
  for (Node* node : {&pair.src, &pair.dst, &scene.third}) Pair::check_nothing_left(*node);
  scene.check_records();
  if (check::state().num_failures != 0)
    std::printf("  with allocation %llu\n", static_cast<unsigned long long>(n));
  return met;
}

TEST(whichever_allocation_fails_one_session_ends_at_most_and_the_other_loses_nothing) {
  for (const auto& rails : rail_sets()) {
    std::uint64_t n = 1;
    while (fail_the_nth(rails, n, 1) && check::state().num_failures == 0) ++n;
    CHECK(n > 100);  // enough allocations were tried
  }
}

// The end of the session runs out of memory as well.
TEST(where_several_fail_in_a_row_the_process_lives_and_nothing_is_left) {
  for (const auto& rails : rail_sets()) {
    for (const std::uint64_t in_a_row : {2, 5, 30}) {
      std::uint64_t n = 1;
      while (fail_the_nth(rails, n, in_a_row) && check::state().num_failures == 0) n += 3;
      CHECK(n > 100);
    }
  }
}

}  // namespace
}  // namespace simulation
