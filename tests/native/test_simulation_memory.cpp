// An agent that runs out of memory while it serves two peers: the session that needed the memory may end, the
// process goes on, and the other peer's transfers end untouched.
#include "memory_failure.h"

#include <set>
#include <tuple>
#include <vector>

#include "core/commands/command_reader.h"
#include "kvxfer/command.h"
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
    handles.reserve(8);
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
  // Of calls that the victim's allocator fails in.
  std::vector<std::shared_ptr<Handle>> handles;
  std::function<std::shared_ptr<Handle>()> late_write;
  std::function<void()> check_at_end;
  bool keeps_session = true, concerns_third = false;
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

// ---- what callers of the victim ask for

// A call of the engine's, made ready. It may be made again where it threw.
using Act = std::function<void()>;
struct Call {
  const char* name;
  bool is_whole;  // one that threw has done nothing
  std::function<Act(Scene&)> make;
};

std::shared_ptr<Handle> post(Scene& scene, TransferRequest request) {
  Engine& engine = scene.pair.dst.engine();
  auto handle = engine.post(scene.pair.dst.now(), std::move(request));
  REQUIRE_OK(handle);
  return handle.value();
}

// A write of the victim's.
TransferRequest write_back(Scene& scene) {
  Pair& pair = scene.pair;
  const auto installed =
      pair.dst.engine().install_program(pair.dst.now(), pair.to_src, true, pair.dst_region, pair.src_region,
                                        program_between(pair.dst_layout, pair.src_layout));
  REQUIRE_OK(installed);
  Pair::grant(pair.src, pair.to_dst, pair.src_region, wire::LeaseMode::kWrite, {8, 9}, 60 * kSecond, true);
  pair.world.run_for(kMillisecond);
  TransferRequest request = pair.request(true, {8, 9}, {8, 9}, "back");
  request.peer = pair.to_src;
  request.program = installed.value();
  return request;
}

// A read of the victim's of which no layer is released.
std::shared_ptr<Handle> held_read(Scene& scene) {
  scene.pair.grant_read({1, 2});
  TransferRequest request = scene.pair.request(false, {1, 2}, {0, 1});
  request.layers_ready = 0;
  const auto handle = Pair::post(scene.pair.dst, std::move(request));
  scene.handles.push_back(handle);
  scene.pair.world.run_for(kMillisecond);
  return handle;
}

Act grant(Scene& scene, std::optional<SessionKey> to, wire::LeaseMode mode, Blocks blocks) {
  return [&scene, to, mode, blocks = std::move(blocks)] {
    Pair& pair = scene.pair;
    REQUIRE_OK(pair.dst.engine().grant(
        pair.dst.now(), {to, pair.dst_region, mode, blocks.empty(), blocks, 20 * kSecond, false}));
  };
}

Act expect(Scene& scene, const std::string& tag, Blocks blocks) {
  return [&scene, tag = Pair::bytes(tag), blocks = std::move(blocks)] {
    Pair& pair = scene.pair;
    const auto handle = pair.dst.engine().expect(pair.dst.now(), tag, pair.dst_region, blocks, 0,
                                                 pair.dst_layout.num_layers, {}, {}, Pair::kTimeout);
    REQUIRE_OK(handle);
    scene.handles.push_back(handle.value());
  };
}

const Call kCalls[] = {
    {"a write is posted", true,
     [](Scene& scene) -> Act {
       return [&scene, request = write_back(scene)] { scene.handles.push_back(post(scene, request)); };
     }},
    {"a read is posted", true,
     [](Scene& scene) -> Act {
       scene.pair.grant_read({1, 2});
       scene.pair.world.run_for(kMillisecond);
       return [&scene, request = scene.pair.request(false, {1, 2}, {0, 1}, "read", "context")] {
         scene.handles.push_back(post(scene, request));
       };
     }},
    {"layers are released", false,
     [](Scene& scene) -> Act {
       return [&scene, handle = held_read(scene)] {
         scene.pair.dst.engine().layers_ready(scene.pair.dst.now(), handle->id(), 4);
       };
     }},
    {"a tag is expected", true,
     [](Scene& scene) -> Act {
       const Act act = expect(scene, "a tag that is longer than a string's own room", {3, 6, 9});
       return [&scene, act] {
         act();
         scene.late_write = [&scene] {
           return scene.pair.write({5, 6, 7}, {3, 6, 9}, "a tag that is longer than a string's own room");
         };
       };
     }},
    {"a parked write is expected", false,
     [](Scene& scene) -> Act {
       scene.handles.push_back(scene.pair.write({5, 6, 7}, {3, 6, 9}, "parked"));
       scene.pair.world.run_for(kMillisecond);
       return expect(scene, "parked", {3, 6, 9});
     }},
    {"an expectation is cancelled", false,
     [](Scene& scene) -> Act {
       expect(scene, "cancelled", {3, 6, 9})();
       return [&scene] { scene.pair.dst.engine().cancel(scene.pair.dst.now(), scene.handles.back()->id()); };
     }},
    {"a read is cancelled", false,
     [](Scene& scene) -> Act {
       return [&scene, handle = held_read(scene)] {
         scene.pair.dst.engine().cancel(scene.pair.dst.now(), handle->id());
       };
     }},
    {"a lease to read is granted", true,
     [](Scene& scene) { return grant(scene, scene.pair.to_src, wire::LeaseMode::kRead, {1, 2, 3}); }},
    {"a lease on all blocks is granted", true,
     [](Scene& scene) { return grant(scene, scene.pair.to_src, wire::LeaseMode::kRead, {}); }},
    {"a lease to write is granted, and a parked write begins", false,
     [](Scene& scene) -> Act {
       scene.handles.push_back(scene.pair.write({5, 6}, {3, 6}, "parked"));
       scene.pair.world.run_for(kMillisecond);
       return grant(scene, scene.pair.to_src, wire::LeaseMode::kWrite, {3, 6});
     }},
    {"a bearer's lease is granted", true,
     [](Scene& scene) { return grant(scene, {}, wire::LeaseMode::kRead, {1, 2, 3}); }},
    {"a lease with a transfer under it is revoked", false,
     [](Scene& scene) -> Act {
       Pair& pair = scene.pair;
       const LeaseId lease = pair.grant_write({3, 6});
       pair.world.run_for(kMillisecond);
       TransferRequest request = pair.request(true, {5, 6}, {3, 6}, "held");
       request.layers_ready = 0;
       scene.handles.push_back(Pair::post(pair.src, std::move(request)));
       pair.world.run_for(kMillisecond);
       pair.dst.engine().await_acknowledged(pair.dst.now(), lease);
       return [&scene, lease] {
         scene.pair.dst.engine().revoke(scene.pair.dst.now(), lease);
         CHECK(scene.pair.dst.engine().lease_state(lease) != LeaseState::kActive);
       };
     }},
    {"a lease is awaited", false,
     [](Scene& scene) -> Act {
       return [&scene, lease = scene.pair.grant_write({3, 6})] {
         scene.pair.dst.engine().await_acknowledged(scene.pair.dst.now(), lease);
       };
     }},
    {"a message is sent", true,
     [](Scene& scene) -> Act {
       return [&scene, text = wire::Bytes(300)] {
         REQUIRE(scene.pair.dst.engine().send_message(scene.pair.dst.now(), scene.pair.to_src, text).ok());
       };
     }},
    {"a peer is limited", true,
     [](Scene& scene) -> Act {
       return [&scene] {
         REQUIRE(scene.pair.dst.engine()
                     .limit_peer(scene.pair.dst.now(), "prefill", {.max_bytes_per_s = 1'000'000})
                     .ok());
       };
     }},
    {"a region comes and goes", false,
     [](Scene& scene) -> Act {
       return [&scene, done = false, id = RegionId{0}]() mutable {
         Engine& engine = scene.pair.dst.engine();
         const Time now = scene.pair.dst.now();
         if (id == 0) {
           auto region = std::make_unique<Region>();
           region->name = "a name that is longer than a string's own room";
           region->num_blocks = 1;
           id = engine.register_region(now, std::move(region)).value();
           const Running host(nullptr);
           (*scene.pair.dst.memories())[id] = std::make_shared<Memory>(Layout());
         }
         if (!done) engine.add_keys(now, id, {"mapped", {}, 0});
         done = true;
         CHECK(engine.deregister_region(now, id).ok());
       };
     }},
    {"a region with a transfer and a lease is deregistered", false,
     [](Scene& scene) -> Act {
       held_read(scene);
       scene.pair.grant_write({3, 6});
       expect(scene, "gone", {9})();
       scene.concerns_third = true;
       return [&scene] {
         if (scene.pair.dst.engine().region(scene.pair.dst_region) != nullptr)
           CHECK(scene.pair.dst.engine().deregister_region(scene.pair.dst.now(), scene.pair.dst_region).ok());
       };
     }},
    {"rails are switched off and on", false,
     [](Scene& scene) -> Act {
       scene.concerns_third = true;
       return [&scene] {
         for (const bool on : {false, true})
           CHECK(scene.pair.dst.engine().switch_rails(scene.pair.dst.now(), "stream", on).ok());
       };
     }},
    {"commands of a ring are taken out", false,
     [](Scene& scene) -> Act {
       Node& victim = scene.pair.dst;
       const auto reader =
           std::make_shared<CommandReader>(1, CommandMemory::create(8).value(), [](std::uint64_t) {});
       const std::uint32_t number = reader->prepare({.request = write_back(scene)}).value();
       for (const std::uint32_t names : {number, number + 1, number})  // one is refused
         REQUIRE(reader->start(names, 0, kEveryLayer, 2).value());
       victim.on_event = [reader](Node&, const Event& event) {
         if (event.kind == EventKind::kEnded) reader->on_ended(event.handle);
       };
       scene.check_at_end = [reader] {
         CHECK_EQ(reader->counts().taken, 3);
         CHECK_EQ(reader->counts().ended, 3);
         CHECK(reader->idle());
       };
       return [&victim, reader] { reader->look(victim.engine(), victim.now()); };
     }},
    {"a session is ended", false,
     [](Scene& scene) -> Act {
       held_read(scene);
       scene.pair.grant_write({3, 6});
       scene.keeps_session = false;
       return [&scene] {
         scene.pair.dst.engine().end_session(scene.pair.dst.now(), scene.pair.to_src, Code::kClosed,
                                             "enough");
       };
     }},
};

// The n-th allocation of a call fails. Returns whether there was an n-th one.
bool fail_the_nth_of(const Call& call, std::uint64_t n) {
  Scene scene({one_sided_rail(), two_sided_rail()}, check::seed());
  Pair& pair = scene.pair;
  const Act act = call.make(scene);
  pair.dst.settle();
  const auto held = [&] {
    const EngineLoad load = pair.dst.engine().load();
    return std::tuple(pair.dst.engine().num_transfers(), load.fences, load.expectations, load.leases,
                      load.handles, load.timers);
  };
  const auto before = held();
  const std::size_t num_handles = scene.handles.size();
  bool threw = false;
  failing = {.node = &pair.dst, .countdown = n};
  {
    const Running in(&pair.dst);
    try {
      act();
    } catch (const std::bad_alloc&) {
      threw = true;
    }
  }
  const bool met = failing.num_failed != 0;
  failing = {};
  if (threw && call.is_whole) CHECK(held() == before);
  if (threw) CHECK_EQ(scene.handles.size(), num_handles);
  if (threw) act();  // now it works
  pair.dst.settle();
  if (scene.late_write) scene.handles.push_back(scene.late_write());
  for (const auto& handle : scene.handles) CHECK(pair.ends(handle));
  // No peer has seen a breach. At most the session that lacked memory is over.
  for (Node* node : {&pair.src, &pair.dst, &scene.third}) CHECK_EQ(node->engine().stats().frames_refused, 0);
  if (!met && scene.keeps_session) CHECK_EQ(pair.dst.session_with("prefill"), pair.to_src);
  if (!scene.concerns_third) {
    CHECK_EQ(pair.dst.session_with("third"), scene.to_third);
    const auto theirs = scene.third_writes();
    REQUIRE(pair.ends(theirs));
    CHECK_EQ(theirs->outcome(), Outcome::kDone);
  }
  pair.world.run_for(30 * kSecond);
  for (Node* node : {&pair.src, &pair.dst, &scene.third}) Pair::check_nothing_left(*node);
  if (scene.check_at_end) scene.check_at_end();
  if (check::state().num_failures != 0)
    std::printf("  %s, with allocation %llu\n", call.name, static_cast<unsigned long long>(n));
  return met;
}

TEST(whichever_allocation_of_a_call_fails_the_call_leaves_nothing_half_done) {
  for (const Call& call : kCalls)
    for (std::uint64_t n = 1; check::state().num_failures == 0 && fail_the_nth_of(call, n);) ++n;
}

}  // namespace
}  // namespace simulation
