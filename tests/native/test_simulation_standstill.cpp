// What the engine promises when its own agent stands still: stopped, starved of the processor, or with its
// whole machine paused. It must not take that for silence of its peers, and must still notice real silence.
#include <functional>

#include "simulated_pair.h"

namespace simulation {
namespace {

constexpr Time kShort = kSecond / 2, kLong = 9 * kSecond;

EngineConfig hears_for(Time silent) {
  EngineConfig limits;
  limits.session.heartbeat_ns = silent / 5;
  limits.session.silent_ns = silent;
  return limits;
}

// One agent has a short silent time, the other a long one. On every set of rails, in either direction, in the
// middle of a transfer.
struct HastyPair {
  Pair& pair;
  Node &hasty, &other;
  std::shared_ptr<Handle> handle;  // the seed says which end posted it
};
void in_mid_transfer_of_hasty(const std::function<void(HastyPair)>& scenario) {
  for (const auto& rails : rail_sets())
    for (const bool hasty_source : {false, true})
      for (std::uint64_t i = 0; i < 10; ++i) {
        Pair pair(rails, check::seed() * 1000 + i, hears_for(hasty_source ? kShort : kLong),
                  hears_for(hasty_source ? kLong : kShort));
        pair.grant_read({}, 300 * kSecond);
        pair.grant_write({}, 300 * kSecond);
        const bool write = pair.world.random().chance(50);
        TransferRequest request = pair.request(write, kFrom, kTo);
        request.timeout_ns = 300 * kSecond;
        auto handle = Pair::post(write ? pair.src : pair.dst, request);
        REQUIRE(pair.until_midway(kFrom.size()));
        scenario({pair, hasty_source ? pair.src : pair.dst, hasty_source ? pair.dst : pair.src, handle});
        pair.check_quiet();
      }
}

Status reason_at(Node& node) { return node.engine().peer(1)->reason; }
bool has_lost(Node& node) { return node.engine().open_peers().empty(); }
Time between(Pair& pair, Time least, Time most) {
  return static_cast<Time>(
      pair.world.random().between(static_cast<std::uint64_t>(least), static_cast<std::uint64_t>(most)));
}

TEST(an_agent_that_stood_still_keeps_a_peer_that_did_not) {
  in_mid_transfer_of_hasty([](HastyPair scene) {
    auto& [pair, hasty, other, handle] = scene;
    for (int i = 0; i < 5; ++i) {
      hasty.pause();
      pair.world.run_for(between(pair, kShort / 10, kLong / 2));
      hasty.resume();
      pair.world.run_for(between(pair, 0, kShort));
      REQUIRE(!has_lost(hasty));
      REQUIRE(!has_lost(other));
    }
    REQUIRE(pair.ends(handle));
    CHECK_OK(handle->status());
    CHECK(pair.equal(kFrom, kTo));
  });
}

TEST(agents_whose_machine_was_paused_keep_each_other) {
  in_mid_transfer_of_hasty([](HastyPair scene) {
    auto& [pair, hasty, other, handle] = scene;
    hasty.pause();
    other.pause();
    pair.world.run_for(between(pair, kShort, kLong / 2));
    hasty.resume();
    pair.world.run_for(between(pair, 0, kShort / 3));  // one goes on a little later than the other
    other.resume();
    pair.world.run_for(2 * kShort);
    REQUIRE(!has_lost(hasty));
    REQUIRE(!has_lost(other));
    REQUIRE(pair.ends(handle));
    CHECK_OK(handle->status());
    CHECK(pair.equal(kFrom, kTo));
  });
}

TEST(a_peer_that_died_meanwhile_is_found_out_within_the_limit) {
  in_mid_transfer_of_hasty([](HastyPair scene) {
    auto& [pair, hasty, other, handle] = scene;
    hasty.pause();
    pair.world.run_for(between(pair, 0, 3 * kShort));
    other.crash(false);  // its peers do not see the end
    pair.world.run_for(between(pair, 0, 3 * kShort));
    hasty.resume();
    // The whole limit counts again if frames were still unread.
    REQUIRE(pair.world.until([&hasty = hasty] { return has_lost(hasty); }, kShort + kMillisecond));
    CHECK_EQ(reason_at(hasty).code(), Code::kPeerSilent);
    REQUIRE(pair.world.until([&hasty = hasty] { return hasty.engine().num_transfers() == 0; }, kSecond));
    CHECK_EQ(hasty.engine().load().leases, 0);
  });
}

TEST(standstills_cannot_keep_a_dead_peer_for_ever) {
  in_mid_transfer_of_hasty([](HastyPair scene) {
    auto& [pair, hasty, other, handle] = scene;
    other.crash(false);
    pair.world.run_for(kShort / 100);
    int num_standstills = 0;
    for (; !has_lost(hasty); ++num_standstills) {
      REQUIRE(num_standstills < 5);
      hasty.pause();
      pair.world.run_for(between(pair, kShort * 5 / 4, 5 * kShort));
      hasty.resume();
      if (!has_lost(hasty)) pair.world.run_for(between(pair, 0, kShort / 100));
    }
    CHECK_EQ(num_standstills, 4);  // the first three do not count as silence
    CHECK_REFUSED(reason_at(hasty), Code::kPeerSilent, "in which this agent itself stood still");
  });
}

TEST(an_agent_that_its_peers_gave_up_meanwhile_learns_why) {
  in_mid_transfer_of_hasty([](HastyPair scene) {
    auto& [pair, hasty, other, handle] = scene;
    other.pause();  // here the agent with the long silent time stands still
    REQUIRE(pair.world.until([&hasty = hasty] { return has_lost(hasty); }, 2 * kShort));
    CHECK_EQ(reason_at(hasty).code(), Code::kPeerSilent);
    pair.world.run_for(between(pair, kShort, 2 * kLong));
    other.resume();
    REQUIRE(pair.world.until([&other = other] { return has_lost(other); }, kSecond));
    CHECK_EQ(reason_at(other).code(), Code::kPeerLost);
    // Rails have their own connections here, whose end may overtake the goodbye.
    const std::string why = reason_at(other).message();
    CHECK(why.find("said goodbye (peer-silent): nothing heard for") != std::string::npos ||
          why.find("the last rail to") != std::string::npos);
    REQUIRE(pair.ends(handle));
  });
}

TEST(a_rail_is_not_given_up_for_a_standstill_of_our_own) {
  for (const bool write : {false, true})
    for (std::uint64_t i = 0; i < 20; ++i) {
      Pair pair({two_sided_rail(), two_sided_rail()}, check::seed() * 1000 + i, hears_for(kLong),
                hears_for(kShort));
      pair.grant_read({}, 300 * kSecond);
      pair.grant_write({}, 300 * kSecond);
      TransferRequest request = pair.request(write, kFrom, kTo);
      request.timeout_ns = 300 * kSecond;
      auto handle = Pair::post(write ? pair.src : pair.dst, request);
      REQUIRE(pair.until_midway(kFrom.size()));
      pair.dst.pause();  // it has to move pieces
      pair.world.run_for(between(pair, 2 * kShort, kLong / 2));
      pair.dst.resume();
      REQUIRE(pair.ends(handle));
      CHECK_OK(handle->status());
      CHECK_EQ(pair.dst.rails_with(pair.to_src).size(), 2);
      CHECK_EQ(pair.src.rails_with(pair.to_dst).size(), 2);
      pair.check_quiet();
    }
}

}  // namespace
}  // namespace simulation
