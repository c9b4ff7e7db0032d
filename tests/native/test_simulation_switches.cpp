// Rails that are switched off and on while a session goes on. Others move their pieces again; they come back
// when they are switched on; a session always keeps a rail.
#include <algorithm>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "simulated_pair.h"

namespace simulation {
namespace {

const std::vector<RailPlan> kBoth = {one_sided_rail(), two_sided_rail()};

std::size_t num_rails(Pair& pair, Node& node, std::string_view transport) {
  const SessionKey session = &node == &pair.src ? pair.to_dst : pair.to_src;
  const std::vector<std::string> rails = node.engine().peer(session).value().rails;
  return static_cast<std::size_t>(std::count(rails.begin(), rails.end(), transport));
}
bool has(Pair& pair, std::string_view transport, std::size_t num) {
  return num_rails(pair, pair.src, transport) == num && num_rails(pair, pair.dst, transport) == num;
}
std::string notes(Pair& pair, Node& node) {
  const SessionKey session = &node == &pair.src ? pair.to_dst : pair.to_src;
  std::string all;
  for (const std::vector<std::string> notes = node.engine().peer(session).value().notes;
       const std::string& note : notes)
    all += note + "\n";
  return all;
}
Status turn(Node& node, const std::string& transport, bool on) {
  Status status = node.engine().switch_rails(node.now(), transport, on);
  node.settle();
  return status;
}
bool says(const std::string& all, const std::string& words) { return all.find(words) != std::string::npos; }

TEST(a_rail_that_is_switched_off_in_mid_transfer_is_replaced_and_comes_back) {
  in_mid_transfer({kBoth}, 20, [](Pair& pair, bool write, std::shared_ptr<Handle> handle) {
    const std::string name = pair.world.random().chance(50) ? "mapped" : "stream";
    Node& node = pair.world.random().chance(50) ? pair.src : pair.dst;
    CHECK_OK(turn(node, name, false));
    REQUIRE(pair.ends(handle));
    CHECK_OK(handle->status());
    CHECK(pair.equal(kFrom, kTo));
    REQUIRE(pair.world.until([&] { return has(pair, name, 0); }, kSecond));
    CHECK(says(notes(pair, node), "switched off here"));
    CHECK_EQ(node.engine().rails_off().size(), 1);
    // It stays off although the other end dials; the caller does not dial.
    pair.src.dials.clear();
    pair.world.run_for(20 * kSecond);
    CHECK(has(pair, name, 0));
    if (&node == &pair.src) CHECK(pair.src.dials.empty());
    CHECK(says(notes(pair, node), "switched off here"));
    const auto next = write ? pair.write(kFrom, kTo) : pair.read(kFrom, kTo);
    REQUIRE(pair.ends(next));
    CHECK(pair.equal(kFrom, kTo));
    CHECK_OK(turn(node, name, true));
    // At once if this end dials, otherwise with the peer's next dial.
    REQUIRE(pair.world.until([&] { return has(pair, name, 1); },
                             &node == &pair.src ? 50 * kMillisecond : 40 * kSecond));
    CHECK_EQ(notes(pair, node), std::string());
    CHECK(node.engine().rails_off().empty());
  });
}

TEST(what_would_end_a_session_is_refused_in_words) {
  Pair pair({two_sided_rail(), two_sided_rail()}, check::seed());
  for (Node* node : {&pair.src, &pair.dst}) {
    const Status status = turn(*node, "stream", false);
    CHECK_EQ(status.code(), Code::kUnsupported);
    CHECK(says(status.message(), node == &pair.src ? "'decode'" : "'prefill'"));
    CHECK(node->engine().rails_off().empty());
  }
  CHECK_OK(turn(pair.src, "mapped", false));  // it has no such rail
  CHECK(has(pair, "stream", 2));
  EngineConfig strict;
  strict.required_transports = {"stream"};
  Pair other(kBoth, check::seed(), strict, {});
  CHECK(says(turn(other.src, "stream", false).message(), "requires stream"));
  CHECK_OK(turn(other.src, "mapped", false));
  REQUIRE(other.world.until([&] { return has(other, "mapped", 0); }, kSecond));
  // Now it is the last rail.
  CHECK_EQ(turn(other.dst, "stream", false).code(), Code::kUnsupported);
}

TEST(a_session_that_comes_while_rails_are_off_does_without_and_has_them_later) {
  for (const bool here : {true, false})
    for (std::uint64_t i = 0; i < 10; ++i) {
      Pair pair({two_sided_rail()}, check::seed() * 1000 + i);
      Node& node = here ? pair.src : pair.dst;
      CHECK_OK(turn(node, "mapped", false));
      pair.src.end_session_with(pair.to_dst);
      REQUIRE(pair.world.until([&] { return pair.dst.engine().open_peers().empty(); }));
      pair.src.call(pair.dst, kBoth);
      REQUIRE(pair.world.until(
          [&] { return pair.src.session_with("decode") != 0 && pair.dst.session_with("prefill") != 0; }));
      pair.to_dst = pair.src.session_with("decode");
      pair.to_src = pair.dst.session_with("prefill");
      pair.world.run_for(kSecond);
      CHECK(has(pair, "mapped", 0));
      CHECK(has(pair, "stream", 1));
      CHECK(says(notes(pair, node), "switched off here"));
      CHECK_OK(turn(node, "mapped", true));
      REQUIRE(pair.world.until([&] { return has(pair, "mapped", 1); }, 40 * kSecond));
      pair.check_quiet();
    }
}

TEST(rails_that_are_switched_at_random_under_load_lose_no_byte) {
  for (std::uint64_t i = 0; i < 20; ++i) {
    Pair pair({one_sided_rail(), two_sided_rail(), two_sided_rail()}, check::seed() * 1000 + i);
    pair.grant_read({}, 600 * kSecond);
    pair.grant_write({}, 600 * kSecond);
    check::Random& random = pair.world.random();
    for (int round = 0; round < 30; ++round) {
      for (const std::uint32_t block : kFrom)
        pair.source().fill(block, static_cast<std::uint32_t>(10'000 * round) + block);
      const auto handle = random.chance(50) ? pair.write(kFrom, kTo) : pair.read(kFrom, kTo);
      for (int turns = 0; turns < 3; ++turns) {
        pair.world.run_for(static_cast<Time>(random.below(1'500)) * kMicrosecond);
        Node& node = random.chance(50) ? pair.src : pair.dst;
        // Refused if it would be the last rail. Both ends may switch at the same time; then a session may
        // end.
        if (random.chance(50)) std::ignore = turn(node, "mapped", random.chance(50));
      }
      REQUIRE(pair.ends(handle));
      CHECK_OK(handle->status());
      CHECK(pair.equal(kFrom, kTo));
    }
    for (Node* node : {&pair.src, &pair.dst}) CHECK_OK(turn(*node, "mapped", true));
    REQUIRE(pair.world.until([&] { return has(pair, "mapped", 1); }, 80 * kSecond));
    CHECK(has(pair, "stream", 2));
    pair.check_quiet();
  }
}

}  // namespace
}  // namespace simulation
