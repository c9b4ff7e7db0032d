// Rails that are lost while their session goes on: they are dialled again, and come back.
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "simulated_pair.h"

namespace simulation {
namespace {

bool whole(Pair& pair, std::size_t num_rails) {
  return pair.src.rails_with(pair.to_dst).size() == num_rails &&
         pair.dst.rails_with(pair.to_src).size() == num_rails;
}

RailId rail_1(Pair& pair) {
  const auto alive = pair.src.rails_with(pair.to_dst);
  const auto found =
      std::find_if(alive.begin(), alive.end(), [&](RailId id) { return pair.src.link(id)->name.index == 1; });
  REQUIRE(found != alive.end());
  return *found;
}

// When the caller dialled rail 1, after the first time.
std::vector<Time> redials(Pair& pair) {
  std::vector<Time> times;
  for (const auto& [at, rail] : pair.src.dials)
    if (rail.index == 1 && rail.attempt != 0) times.push_back(at);
  return times;
}

std::string note_of_rail(Pair& pair, Node& node) {
  const auto view = node.engine().peer(&node == &pair.src ? pair.to_dst : pair.to_src);
  return view->notes.empty() ? "" : view->notes.back();
}

TEST(a_rail_that_was_lost_comes_back_and_is_used) {
  const RailSets sets = {{two_sided_rail(), two_sided_rail()}, {one_sided_rail(), one_sided_rail()}};
  in_mid_transfer(sets, 10, [](Pair& pair, bool write, std::shared_ptr<Handle> handle) {
    pair.src.cut_rail(pair.src.rails_with(pair.to_dst)[1], "cut");
    REQUIRE(pair.ends(handle));
    CHECK_OK(handle->status());
    CHECK(pair.equal(kFrom, kTo));
    REQUIRE(pair.world.until([&] { return pair.src.engine().stats().rails_lost == 1; }));
    REQUIRE(pair.world.until([&] { return whole(pair, 2); }, kSecond));
    for (Node* node : {&pair.src, &pair.dst}) {
      CHECK_EQ(node->engine().stats().rails_lost, 1);
      CHECK_EQ(node->engine().stats().rails_redialled, 1);
      CHECK_EQ(note_of_rail(pair, *node), std::string());
    }
    // The rail that came back carries everything alone.
    pair.world.run_for(kSecond);
    pair.src.cut_rail(pair.src.rails_with(pair.to_dst)[0], "cut");
    pair.src.takes_rails = pair.dst.takes_rails = false;
    REQUIRE(pair.world.until([&] { return whole(pair, 1); }, kSecond));
    for (const std::uint32_t block : kFrom) pair.source().fill(block, 5000 + block);
    handle = write ? pair.write(kFrom, kTo) : pair.read(kFrom, kTo);
    REQUIRE(pair.ends(handle));
    CHECK_OK(handle->status());
    CHECK(pair.equal(kFrom, kTo));
  });
}

// Both ends require "stream"; "mapped" could carry the pages without it.
TEST(a_session_goes_on_without_no_transport_that_is_required) {
  EngineConfig strict;
  strict.required_transports = {"stream"};
  for (const bool here : {true, false}) {  // which end requires it
    Pair pair({one_sided_rail(), two_sided_rail(), two_sided_rail()}, check::seed(),
              here ? strict : EngineConfig{}, here ? EngineConfig{} : strict);
    REQUIRE(pair.world.until([&] { return whole(pair, 3); }));
    pair.src.takes_rails = pair.dst.takes_rails = false;
    const auto cut = [&](std::uint16_t index) {
      for (const RailId id : pair.src.rails_with(pair.to_dst))
        if (pair.src.link(id)->name.index == index) pair.src.cut_rail(id, "cut");
    };
    cut(1);
    pair.world.run_for(kSecond);
    CHECK(whole(pair, 2));
    cut(2);
    REQUIRE(pair.world.until(
        [&] { return pair.src.engine().open_peers().empty() && pair.dst.engine().open_peers().empty(); }));
  }
}

TEST(rails_that_fall_at_random_are_all_back_when_they_fall_no_more) {
  std::uint64_t num_lost = 0, num_back = 0;
  for (std::uint64_t i = 0; i < 30; ++i) {
    const std::vector<RailPlan> rails(4, i % 2 == 0 ? two_sided_rail() : one_sided_rail());
    Pair pair(rails, check::seed() * 1000 + i);
    pair.grant_read({}, 300 * kSecond);
    pair.grant_write({}, 300 * kSecond);
    check::Random& random = pair.world.random();
    for (int fall = 0; fall < 20; ++fall) {
      const bool write = random.chance(50);
      auto handle = write ? pair.write(kFrom, kTo) : pair.read(kFrom, kTo);
      pair.world.run_for(static_cast<Time>(random.below(5'000)) * kMicrosecond);
      // The first rail carries on; without any rail the session would end. One end sees the loss, both see it
      // at different times, or neither does: the rail is silent.
      Node& node = random.chance(50) ? pair.src : pair.dst;
      const auto alive = node.rails_with(&node == &pair.src ? pair.to_dst : pair.to_src);
      for (const RailId id : alive)
        if (node.link(id)->name.index != 0 && random.chance(50)) {
          switch (random.below(3)) {
            case 0: node.cut_rail(id, "cut"); break;
            case 1: node.link(id)->muted = i % 2 == 0; break;  // mapped memory needs no message
            default: node.cut_rail_here(id, "cut here");
          }
        }
      pair.world.run_for(static_cast<Time>(random.below(300)) * kMillisecond);
      REQUIRE(pair.ends(handle));
      CHECK_OK(handle->status());
      CHECK(pair.equal(kFrom, kTo));
    }
    // A silent rail shows when pieces are due on it.
    REQUIRE(pair.world.until(
        [&] {
          auto handle = pair.read(kFrom, kTo);
          REQUIRE(pair.ends(handle));
          CHECK_OK(handle->status());
          pair.world.run_for(kSecond);
          const auto sound = [&](Node& node, SessionKey key) {
            const auto alive = node.rails_with(key);
            return std::none_of(alive.begin(), alive.end(), [&](RailId id) { return node.link(id)->muted; });
          };
          return whole(pair, 4) && sound(pair.src, pair.to_dst) && sound(pair.dst, pair.to_src);
        },
        300 * kSecond));
    num_lost += pair.src.engine().stats().rails_lost;
    num_back += pair.src.engine().stats().rails_redialled;
    CHECK_EQ(pair.src.engine().stats().rails_lost, pair.src.engine().stats().rails_redialled);
    CHECK_EQ(pair.src.engine().load().redials, 0);
    pair.check_quiet();
  }
  CHECK(num_lost > 300);
  CHECK_EQ(num_lost, num_back);
}

// The waits between dials double from the first to the longest, and each is up to a quarter longer.
TEST(a_peer_whose_listener_is_gone_is_dialled_at_growing_intervals) {
  Pair pair({two_sided_rail(), two_sided_rail()});
  pair.dst.takes_rails = false;
  Time before = pair.src.now();
  pair.src.cut_rail(rail_1(pair), "cut");
  pair.world.run_for(200 * kSecond);
  const std::vector<Time> times = redials(pair);
  REQUIRE(times.size() >= 10);
  Time wait = Redials::kFirstWait;
  for (const Time at : times) {
    CHECK(at - before >= wait);
    CHECK(at - before <= wait + wait / 4 + kMillisecond);
    before = at;
    wait = std::min(2 * wait, Redials::kLongestWait);
  }
  CHECK_EQ(wait, Redials::kLongestWait);
  CHECK(note_of_rail(pair, pair.src).find("it was refused; dialled again in 3") != std::string::npos);
  CHECK(note_of_rail(pair, pair.dst).find("; the peer dials it again") != std::string::npos);
  CHECK_EQ(pair.src.engine().peer(pair.to_dst)->notes.size(), 1);
  pair.dst.takes_rails = true;
  REQUIRE(pair.world.until([&] { return whole(pair, 2); }, 40 * kSecond));
  // It stays up, so after the next loss the first wait is short again.
  pair.world.run_for(Redials::kLongestWait);
  before = pair.src.now();
  pair.src.cut_rail(rail_1(pair), "cut");
  REQUIRE(pair.world.until([&] { return redials(pair).size() == times.size() + 2; }));
  CHECK(redials(pair).back() - before < 2 * Redials::kFirstWait);
  REQUIRE(pair.world.until([&] { return whole(pair, 2); }, kSecond));
  pair.check_quiet();
}

TEST(a_rail_that_falls_each_time_is_dialled_no_faster) {
  Pair pair({two_sided_rail(), two_sided_rail()});
  pair.world.after_step = [&] {
    for (const RailId id : pair.dst.rails_with(pair.to_src))
      if (pair.dst.link(id)->name.index == 1) pair.dst.cut_rail(id, "cut");
  };
  const Time began = pair.src.now();
  pair.world.run_for(100 * kSecond);
  // 0.1 + 0.2 + ... + 25.6 s are 51.2.
  const std::vector<Time> times = redials(pair);
  CHECK(times.size() >= 8);
  CHECK(times.size() <= 10);
  Time before = began, wait = Redials::kFirstWait;
  for (const Time at : times) {
    CHECK(at - before >= wait);
    before = at;
    wait = std::min(2 * wait, Redials::kLongestWait);
  }
  CHECK(pair.src.engine().peer(pair.to_dst)->notes.size() <= 1);
  pair.world.after_step = nullptr;
  REQUIRE(pair.world.until([&] { return whole(pair, 2); }, 40 * kSecond));
  pair.check_quiet();
}

TEST(a_rail_that_did_not_come_up_is_dialled_again) {
  Pair pair({two_sided_rail()});
  pair.src.end_session_with(pair.to_dst);
  REQUIRE(pair.world.until([&] { return pair.dst.engine().open_peers().empty(); }));
  pair.src.lost_rail_percent = 50;
  std::size_t num_tries = 0;
  for (int i = 0; i < 20; ++i) {
    pair.src.dials.clear();
    pair.src.call(pair.dst, std::vector<RailPlan>(4, two_sided_rail()));
    const auto up = [&] { return pair.src.session_with("decode") != 0; };
    if (!pair.world.until(up, kSecond)) continue;  // none of the first rails came up
    REQUIRE(pair.world.until(
        [&] { return !up() || pair.src.rails_with(pair.src.session_with("decode")).size() == 4; },
        600 * kSecond));
    CHECK(up());
    num_tries += pair.src.dials.size();
    pair.src.end_session_with(pair.src.session_with("decode"));
    REQUIRE(pair.world.until([&] { return pair.dst.engine().open_peers().empty(); }));
    CHECK_EQ(pair.src.engine().load().redials, 0);
  }
  CHECK(num_tries > 40);
}

// The caller notices the loss first. The other end still takes the old rail for up; the new one replaces it.
TEST(a_rail_dialled_anew_ends_the_one_that_its_peer_still_holds) {
  in_mid_transfer(kTwoStreams, 10, [](Pair& pair, bool, std::shared_ptr<Handle> handle) {
    const auto link = pair.src.link(pair.src.rails_with(pair.to_dst)[1]);
    link->muted = true;  // the far end hears nothing of it
    pair.src.cut_rail_here(link->ends[0].rail, "reset");
    REQUIRE(pair.ends(handle));
    CHECK_OK(handle->status());
    CHECK(pair.equal(kFrom, kTo));
    REQUIRE(pair.world.until([&] { return pair.dst.engine().stats().rails_redialled == 1; }, kSecond));
    CHECK_EQ(pair.dst.engine().stats().rails_lost, 1);
    CHECK_EQ(pair.dst.engine().peer(pair.to_src)->rails.size(), 2);
    REQUIRE(pair.world.until([&] { return whole(pair, 2); }, kSecond));
  });
}

// If one end gives up a silent rail, the other hears of it by RAIL_DOWN, whichever end called.
TEST(a_silent_rail_is_given_up_at_both_ends_and_comes_back) {
  in_mid_transfer(
      kTwoStreams, 1,
      [](Pair& pair, bool, std::shared_ptr<Handle> handle) {
        pair.src.link(pair.src.rails_with(pair.to_dst)[1])->muted = true;
        REQUIRE(pair.ends(handle));
        CHECK_OK(handle->status());
        REQUIRE(
            pair.world.until([&] { return pair.src.engine().stats().rails_redialled == 1; }, 5 * kSecond));
        REQUIRE(pair.world.until([&] { return whole(pair, 2); }, kSecond));
      },
      60 * kSecond);
}

// ---- two rails of which each moves one piece after the other --------------------------------------

struct TwoRails {
  static constexpr std::uint32_t kLayers = 8, kBlocks = 64;
  static constexpr double kPieces = kLayers * kBlocks;

  // Piece by piece, rail by rail.
  TwoRails(Time first_ns, Time second_ns) {
    pair.src.takes_rails = false;  // lost rails stay lost
    pair.src.work_ns = pair.dst.work_ns = kMicrosecond;
    const Layout layout{.num_layers = kLayers, .num_blocks = kBlocks};
    from = pair.src.add_region(layout);
    to = pair.dst.add_region(layout);
    for (std::uint32_t block = 0; block < kBlocks; ++block) pair.src.memory(from).fill(block, 1000 + block);
    pair.world.run_for(10 * kMillisecond);
    Pair::grant(pair.src, pair.to_dst, from, wire::LeaseMode::kRead, {}, 10 * kSecond, true);
    pair.world.run_for(10 * kMillisecond);
    for (const RailId id : pair.dst.rails_with(pair.to_src)) links.push_back(pair.dst.link(id));
    REQUIRE_EQ(links.size(), 2u);
    links[0]->fetch_ns = first_ns;
    links[1]->fetch_ns = second_ns;
    const auto program = pair.dst.engine().install_program(pair.dst.now(), pair.to_src, false, from, to,
                                                           program_between(layout, layout));
    REQUIRE_OK(program);
    TransferRequest request;
    request.peer = pair.to_src;
    request.program = program.value();
    request.num_layers = request.layers_ready = kLayers;
    for (std::uint32_t block = 0; block < kBlocks; ++block) request.src_ids.push_back(block);
    request.dst_ids = request.src_ids;
    request.timeout_ns = 5 * kSecond;
    began = pair.world.clock().now();
    handle = Pair::post(pair.dst, std::move(request));
  }
  // Microseconds from posting to the end.
  double took() {
    REQUIRE(pair.ends(handle));
    CHECK_OK(handle->status());
    for (std::uint32_t layer = 0; layer < kLayers; ++layer)
      for (std::uint32_t block = 0; block < kBlocks; ++block)
        CHECK(pair.dst.memory(to).read(layer, block) == pair.src.memory(from).read(layer, block));
    return static_cast<double>(pair.world.clock().now() - began) / kMicrosecond;
  }

  Pair pair{{one_sided_rail(), one_sided_rail()}};
  RegionId from = 0, to = 0;
  std::vector<std::shared_ptr<Link>> links;
  std::shared_ptr<Handle> handle;
  Time began = 0;
};

TEST(rails_bring_pieces_in_proportion_to_their_speed_to_the_end) {
  for (const unsigned ratio : {1u, 2u, 6u}) {
    TwoRails rails(100 * kMicrosecond, ratio * 100 * kMicrosecond);
    // The time with both rails at full rate, and one piece of the slow rail.
    const double ideal = 100 * TwoRails::kPieces * ratio / (1 + ratio), took = rails.took();
    std::printf("  1 to %u: %.0f us, ideal %.0f, pieces %zu and %zu\n", ratio, took, ideal,
                rails.links[0]->num_fetched, rails.links[1]->num_fetched);
    CHECK(took < ideal + 150 * ratio + 1000);
    const double shares =
        static_cast<double>(rails.links[0]->num_fetched) / static_cast<double>(rails.links[1]->num_fetched);
    CHECK(shares > 0.8 * ratio);
    CHECK(shares < 1.25 * ratio);
  }
}

TEST(of_two_rails_one_that_is_lost_costs_a_transfer_its_share_and_little_more) {
  TwoRails rails(100 * kMicrosecond, 100 * kMicrosecond);
  rails.pair.world.run_for(10 * kMillisecond);
  REQUIRE(rails.handle->outcome() == Outcome::kPending);
  const auto id = rails.pair.dst.rails_with(rails.pair.to_src)[1];
  rails.pair.dst.cut_rail(id, "cut");
  // Both rails for 10 ms, then one. Pieces under way on the lost rail are moved again.
  const double alone = 100 * (TwoRails::kPieces - 2 * 100);
  const double took = rails.took();
  std::printf("  %.0f us, of which one rail took %.0f\n", took, alone);
  CHECK(took - 10'000 - alone < 100'000);
}

}  // namespace
}  // namespace simulation
