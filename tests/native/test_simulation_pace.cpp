// A peer with a rate: its transfers move at that rate and no faster, end as usual while they wait, and cost
// other peers nothing.
#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <vector>

#include "simulated_pair.h"

namespace simulation {
namespace {

// All of kFrom is 4 KiB in pieces of 128 bytes.
constexpr std::uint64_t kAllNbytes = 4096, kPieceNbytes = 128;
constexpr std::uint64_t kRate = 8192;
constexpr std::uint64_t kBurstNbytes = kRate * static_cast<std::uint64_t>(Pace::kBurst) / kSecond + 1;

void limit(Node& node, const std::string& peer, std::uint64_t max_bytes_per_s) {
  REQUIRE_OK(node.engine().limit_peer(node.now(), peer, {.max_bytes_per_s = max_bytes_per_s}));
  node.settle();
}

// Checks that the bytes that have landed since it was made never exceed the rate.
struct Meter {
  Meter(Pair& its_pair, std::uint64_t rate)
      : pair(its_pair), from(pair.world.now()), before(pair.bytes_landed) {
    pair.world.after_step = [this, rate] {
      if (told) return;
      const auto most = static_cast<double>(rate) * static_cast<double>(pair.world.now() - from) / kSecond;
      told = static_cast<double>(nbytes()) > most + static_cast<double>(kBurstNbytes + kPieceNbytes);
      if (told) FAIL(std::to_string(nbytes()) + " bytes landed where " + std::to_string(most) + " may");
    };
  }
  ~Meter() { pair.world.after_step = nullptr; }
  std::uint64_t nbytes() const { return pair.bytes_landed - before; }
  Pair& pair;
  const Time from;
  const std::uint64_t before;
  bool told = false;
};

// Runs a scenario on every set of rails and from either side, while most of the transfer waits for its turn.
void in_mid_pace(const std::function<void(Pair&, std::shared_ptr<Handle>)>& scenario,
                 Time timeout_ns = Pair::kTimeout, std::uint64_t num_seeds = 5) {
  for (const auto& rails : rail_sets())
    for (const bool write : {false, true})
      for (std::uint64_t i = 0; i < num_seeds; ++i) {
        Pair pair(rails, check::seed() * 1000 + i);
        pair.grant_read({}, 300 * kSecond);
        pair.grant_write({}, 300 * kSecond);
        limit(pair.dst, "prefill", kRate);
        TransferRequest request = pair.request(write, kFrom, kTo, "req");
        request.timeout_ns = timeout_ns;
        const auto handle = Pair::post(write ? pair.src : pair.dst, std::move(request));
        REQUIRE(pair.world.until([&] { return pair.bytes_landed >= kAllNbytes / 4; }));
        CHECK_EQ(handle->outcome(), Outcome::kPending);
        scenario(pair, handle);
        pair.check_quiet();
      }
}

TEST(a_limited_peer_moves_at_its_rate_and_no_faster) {
  for (const auto& rails : rail_sets())
    for (const bool write : {false, true})
      for (std::uint64_t i = 0; i < 5; ++i) {
        Pair pair(rails, check::seed() * 1000 + i);
        pair.grant_read();
        pair.grant_write();
        limit(pair.dst, "prefill", kRate);
        {
          const Meter meter(pair, kRate);
          std::vector<std::shared_ptr<Handle>> handles;
          for (int n = 0; n < 2; ++n)
            handles.push_back(write ? pair.write(kFrom, kTo) : pair.read(kFrom, kTo));
          for (const auto& handle : handles) {
            REQUIRE(pair.ends(handle));
            CHECK_OK(handle->status());
          }
          CHECK(pair.equal(kFrom, kTo));
          // The transfer gets the whole rate.
          CHECK(pair.world.now() - meter.from <
                static_cast<Time>(2 * kAllNbytes * kSecond / kRate) + 100 * kMillisecond);
        }
        pair.check_quiet();
      }
}

// At a rate of a hundred thousand pieces a second several go at one wake-up, and none of the rate is lost.
TEST(a_rate_of_many_pieces_a_wake_up_is_reached) {
  for (std::uint64_t i = 0; i < 5; ++i) {
    Pair pair({one_sided_rail()}, check::seed() * 1000 + i);
    pair.grant_read();
    constexpr std::uint64_t kFast = 1'000'000;
    limit(pair.dst, "prefill", kFast);
    const Time from = pair.world.now();
    std::vector<std::shared_ptr<Handle>> handles;
    for (int n = 0; n < 50; ++n) handles.push_back(pair.read(kFrom, kTo));
    for (const auto& handle : handles) REQUIRE(pair.ends(handle));
    const Time least = static_cast<Time>(50 * kAllNbytes * kSecond / kFast);
    CHECK(pair.world.now() - from > least - 2 * Pace::kBurst);
    CHECK(pair.world.now() - from < least * 5 / 4);
    pair.check_quiet();
  }
}

TEST(what_waits_for_its_turn_can_be_cancelled) {
  in_mid_pace([](Pair& pair, std::shared_ptr<Handle> handle) {
    for (Node* node : {&pair.src, &pair.dst}) node->cancel(handle);  // one of them posted it
    REQUIRE(pair.ends(handle, kSecond));
    CHECK_EQ(handle->status().code(), Code::kCancelled);
    // The next transfer begins at the rate's current state.
    const auto next = pair.read(kFrom, kTo);
    REQUIRE(pair.ends(next));
    CHECK_OK(next->status());
    CHECK(pair.equal(kFrom, kTo));
  });
}

TEST(a_right_that_ends_meanwhile_is_fenced_at_once) {
  in_mid_pace([](Pair& pair, std::shared_ptr<Handle> handle) {
    for (Node* node : {&pair.src, &pair.dst})
      for (LeaseId lease = 1; lease < 8; ++lease)
        if (node->engine().lease_state(lease)) node->revoke(lease);
    REQUIRE(pair.ends(handle, kSecond));
    CHECK_EQ(handle->status().code(), Code::kLeaseEnded);
    pair.world.run_for(kSecond / 10);  // until pieces under way have landed
    pair.freeze_destination();
    pair.world.run_for(2 * kSecond);
  });
}

TEST(a_peer_that_dies_meanwhile_is_lost_as_any) {
  in_mid_pace([](Pair& pair, std::shared_ptr<Handle>) {
    Node& dies = pair.world.random().chance(50) ? pair.src : pair.dst;
    Node& stays = &dies == &pair.src ? pair.dst : pair.src;
    dies.crash();
    REQUIRE(pair.world.until([&] { return stays.engine().num_transfers() == 0; }, 2 * kSecond));
    CHECK(stays.engine().open_peers().empty());
    if (&stays == &pair.dst) {
      // When it is back under its name it is limited as before; a session of another name is not.
      dies.start();
      CHECK_EQ(stays.engine().peer_limits().size(), 1);
    }
  });
}

TEST(a_deadline_that_the_rate_makes_it_miss_names_the_rate) {
  for (const bool expected : {false, true})
    for (std::uint64_t i = 0; i < 5; ++i) {
      Pair pair({one_sided_rail()}, check::seed() * 1000 + i);
      pair.grant_read();
      limit(pair.dst, "prefill", kRate);
      std::shared_ptr<Handle> handle;
      if (expected) {
        handle = pair.expect("req", kTo, kSecond / 4);
        pair.write(kFrom, kTo, "req");
      } else {
        TransferRequest request = pair.request(false, kFrom, kTo);
        request.timeout_ns = kSecond / 4;
        handle = Pair::post(pair.dst, std::move(request));
      }
      REQUIRE(pair.ends(handle, kSecond));
      CHECK_REFUSED(handle->status(), Code::kDeadline,
                    "8192 bytes per second, this agent's limit for 'prefill'");
      pair.check_quiet();
    }
}

TEST(a_limit_that_changes_holds_for_what_is_under_way) {
  in_mid_pace([](Pair& pair, std::shared_ptr<Handle> handle) {
    const bool lifts = pair.world.random().chance(50);
    limit(pair.dst, "prefill", lifts ? 0 : 100 * kRate);
    REQUIRE(pair.ends(handle, kSecond / 10));
    CHECK_OK(handle->status());
    CHECK(pair.equal(kFrom, kTo));
    CHECK_EQ(pair.dst.engine().peer_limits().size(), lifts ? 0 : 1);
  });
}

// One piece in two seconds, although silence of half a second ends a session and a rail.
TEST(waiting_is_no_silence) {
  EngineConfig hasty;
  hasty.session.heartbeat_ns = kSecond / 10;
  hasty.session.silent_ns = kSecond / 2;
  for (const auto& rails : rail_sets()) {
    Pair pair(rails, check::seed(), hasty);
    pair.grant_read({}, 300 * kSecond);
    limit(pair.dst, "prefill", kPieceNbytes / 2);
    TransferRequest request = pair.request(false, {1, 2, 3}, {4, 5, 6});
    request.timeout_ns = 100 * kSecond;
    const auto handle = Pair::post(pair.dst, std::move(request));
    REQUIRE(pair.ends(handle, 100 * kSecond));
    CHECK_OK(handle->status());
    CHECK(pair.equal({1, 2, 3}, {4, 5, 6}));
    CHECK_EQ(pair.dst.engine().stats().rails_lost, 0);
    CHECK_EQ(pair.dst.engine().open_peers().size(), 1);
    pair.check_quiet();
  }
}

// Layers that are released while it waits go at the rate, too.
TEST(layers_that_are_released_meanwhile_go_in_their_turn) {
  for (const auto& rails : rail_sets()) {
    Pair pair(rails, check::seed());
    pair.grant_write();
    limit(pair.dst, "prefill", kRate);
    TransferRequest request = pair.request(true, kFrom, kTo);
    request.layers_ready = 1;
    const auto handle = Pair::post(pair.src, std::move(request));
    const Meter meter(pair, kRate);
    for (std::uint32_t layers = 2; layers <= 4; ++layers) {
      pair.world.run_for(static_cast<Time>(pair.world.random().below(200)) * kMillisecond);
      pair.src.engine().layers_ready(pair.src.now(), handle->id(), layers);
      pair.src.settle();
    }
    REQUIRE(pair.ends(handle));
    CHECK_OK(handle->status());
    CHECK(pair.equal(kFrom, kTo));
  }
}

// Two prefills write to one decode, which limits one of them. The other's pages take as long as they take
// alone. While only limited pieces wait, a round has nothing to do.
TEST(other_peers_are_not_slowed) {
  const auto others_time = [](bool is_limited, std::uint64_t seed) {
    Pair pair({one_sided_rail()}, seed);
    Node& other = pair.world.add("other");
    const RegionId region = other.add_region(pair.src_layout);
    for (std::uint32_t block = 0; block < 16; ++block) other.memory(region).fill(block, 3000 + block);
    pair.world.connect(other, pair.dst);
    const SessionKey there = other.session_with("decode");
    const auto program = other.engine().install_program(other.now(), there, true, region, pair.dst_region,
                                                        program_between(pair.src_layout, pair.dst_layout));
    REQUIRE_OK(program);
    pair.grant_write();
    Pair::grant(pair.dst, pair.dst.session_with("other"), pair.dst_region, wire::LeaseMode::kWrite, {},
                10 * kSecond, true);
    limit(pair.dst, is_limited ? "prefill" : "somebody", kRate);
    std::vector<std::shared_ptr<Handle>> paced;
    if (is_limited)
      for (int n = 0; n < 8; ++n) paced.push_back(pair.write(kFrom, kTo));
    pair.world.run_for(100 * kMillisecond);
    TransferRequest request = pair.request(true, {1, 2, 3}, {2, 3, 8});
    request.peer = there;
    request.program = program.value();
    const Time from = pair.world.now();
    const auto handle = Pair::post(other, std::move(request));
    REQUIRE(pair.ends(handle, kSecond));
    CHECK_OK(handle->status());
    const Time took = pair.world.now() - from;
    if (is_limited) {
      CHECK_EQ(paced[0]->outcome(), Outcome::kPending);
      std::size_t num_idle = 0;
      for (int n = 0; n < 200; ++n) {
        pair.world.run_for(kMillisecond);
        num_idle += !pair.dst.engine().wants_pump();
      }
      CHECK_EQ(num_idle, 200);
      for (const auto& each : paced) pair.src.cancel(each);
    }
    pair.check_quiet();
    return took;
  };
  Time alone = 0, beside = 0;
  for (std::uint64_t i = 0; i < 20; ++i) {
    alone += others_time(false, check::seed() * 1000 + i);
    beside += others_time(true, check::seed() * 1000 + i);
  }
  CHECK(beside < alone * 5 / 4);
}

// Sessions of one name share one bucket.
TEST(a_peer_with_two_sessions_has_the_rate_once) {
  Pair pair({one_sided_rail()}, check::seed());
  const SessionKey first = pair.to_src;
  const std::uint32_t first_program = pair.read_program;
  pair.src.call(pair.dst, {one_sided_rail()});
  REQUIRE(pair.world.until([&] { return pair.dst.engine().open_peers().size() == 2; }));
  pair.world.run_for(10 * kMillisecond);
  const SessionKey second = pair.dst.engine().open_peers()[1];
  const auto program =
      pair.dst.engine().install_program(pair.dst.now(), second, false, pair.src_region, pair.dst_region,
                                        program_between(pair.src_layout, pair.dst_layout));
  REQUIRE_OK(program);
  for (const SessionKey peer : pair.src.engine().open_peers())
    Pair::grant(pair.src, peer, pair.src_region, wire::LeaseMode::kRead, {}, 10 * kSecond, true);
  pair.world.run_for(10 * kMillisecond);
  limit(pair.dst, "prefill", kRate);
  const Meter meter(pair, kRate);
  std::vector<std::shared_ptr<Handle>> handles;
  for (const bool is_first : {true, false}) {
    TransferRequest request = pair.request(false, is_first ? Blocks{1, 2, 3} : Blocks{5, 6, 7},
                                           is_first ? Blocks{1, 2, 3} : Blocks{5, 6, 7});
    request.peer = is_first ? first : second;
    request.program = is_first ? first_program : program.value();
    handles.push_back(Pair::post(pair.dst, std::move(request)));
  }
  for (const auto& handle : handles) {
    REQUIRE(pair.ends(handle));
    CHECK_OK(handle->status());
  }
}

// The bytes of a small write come with its OFFER, which no rate can delay; later transfers wait for them.
TEST(pages_that_come_unasked_are_counted) {
  EngineConfig eager;
  eager.session.features.eager_nbytes = 4096;
  Pair pair({two_sided_rail()}, check::seed(), eager);
  pair.grant_write();
  limit(pair.dst, "prefill", kRate);
  const Time from = pair.world.now();
  const auto small = pair.write(kFrom, kTo);
  REQUIRE(pair.ends(small));
  CHECK_OK(small->status());
  CHECK(pair.world.now() - from < 100 * kMillisecond);
  pair.grant_read();
  pair.world.run_for(10 * kMillisecond);
  const auto next = pair.read({1}, {2});
  REQUIRE(pair.ends(next));
  CHECK_OK(next->status());
  CHECK(pair.world.now() - from > static_cast<Time>(kAllNbytes * kSecond / kRate) - 2 * Pace::kBurst);
  pair.check_quiet();
}

// The priority of transfers that are posted while the limit is set, as both ends know it.
TEST(transfers_with_a_peer_go_no_earlier_than_its_least_priority) {
  Pair pair({one_sided_rail()}, check::seed());
  const auto priorities = [](Node& node) {
    std::vector<int> found;
    Engine::OpenPlace place;
    std::array<Record, 8> records{};
    const std::size_t num = node.engine().open_transfers(place, records);
    for (std::size_t i = 0; i < num; ++i) found.push_back(records[i].priority);
    std::sort(found.begin(), found.end());
    return found;
  };
  const auto post = [&](bool write, std::uint8_t priority) {
    TransferRequest request = pair.request(write, {1}, {2}, "tag");
    request.priority = priority;
    request.layers_ready = 0;
    return Pair::post(write ? pair.src : pair.dst, std::move(request));
  };
  pair.grant_read();
  pair.grant_write();
  post(true, 0);
  for (Node* node : {&pair.src, &pair.dst})
    REQUIRE_OK(node->engine().limit_peer(node->now(), node == &pair.src ? "decode" : "prefill",
                                         {.least_priority = 5}));
  post(true, 0);
  post(true, 9);
  post(false, 1);
  pair.world.run_for(10 * kMillisecond);
  for (Node* node : {&pair.src, &pair.dst}) CHECK(priorities(*node) == (std::vector<int>{0, 5, 5, 9}));
  REQUIRE_OK(pair.src.engine().limit_peer(pair.src.now(), "decode", {}));
  REQUIRE_OK(pair.src.engine().limit_peer(pair.src.now(), "another", {.least_priority = 7}));
  post(true, 3);
  pair.world.run_for(10 * kMillisecond);
  for (Node* node : {&pair.src, &pair.dst}) CHECK(priorities(*node) == (std::vector<int>{0, 3, 5, 5, 9}));
}

TEST(names_that_are_limited_have_a_bound) {
  Pair pair;
  Engine& engine = pair.dst.engine();
  for (std::size_t i = 0; i < PeerLimits::kMostNames; ++i)
    REQUIRE_OK(engine.limit_peer(pair.dst.now(), "peer" + std::to_string(i), {.max_bytes_per_s = 1}));
  CHECK_EQ(engine.limit_peer(pair.dst.now(), "one more", {.max_bytes_per_s = 1}).code(), Code::kExhausted);
  CHECK_OK(engine.limit_peer(pair.dst.now(), "peer7", {.max_bytes_per_s = 2}));
  CHECK_OK(engine.limit_peer(pair.dst.now(), "peer7", {}));
  CHECK_OK(engine.limit_peer(pair.dst.now(), "one more", {.max_bytes_per_s = 1}));
}

}  // namespace
}  // namespace simulation
