// The toy transport (toy_transport/), which its line registers: the suite of all transports, and the
// interfaces that it exercises: keys for each instance, registration that takes time, works of one side and
// of two, and completions that are announced only on request.
#include <atomic>
#include <thread>

#include "agent_pair.h"
#include "conformance.h"
#include "thread_gate.h"
#include "toy_transport/toy_transport.h"

namespace kvxfer {
namespace {

using namespace agent_pair;

using conformance::Subject;

// Options with the toy, and with others that are preferred to it.
Options toys(std::vector<std::string> others = {}) {
  others.emplace_back("toy");
  return {.transports = std::move(others)};
}

Subject toy_rail() {
  return {"toy",
          [](Reactor& reactor, const FenceTable& fences) -> std::unique_ptr<Transport> {
            return std::make_unique<toy::ToyTransport>(reactor, fences, false);
          },
          conformance::unix_sockets,
          false,
          {}};
}
CONFORMANCE(toy_rail)

Subject faulty_toy_rail() { return conformance::with_faults(toy_rail()); }
CONFORMANCE(faulty_toy_rail)

struct PinHook {
  explicit PinHook(std::function<Status(const LocalRegion&)> hook) { toy::before_pin() = std::move(hook); }
  ~PinHook() { toy::before_pin() = nullptr; }
};

std::vector<std::string> keys_of(Runtime& runtime, RegionId id) {
  return runtime.with_engine([&](Engine& engine, Time) {
    std::vector<std::string> names;
    if (const Region* region = engine.region(id))
      for (const wire::TransportKeys& keys : region->keys)
        names.push_back(keys.transport + " " + std::to_string(keys.instance));
    std::sort(names.begin(), names.end());  // devices become ready in any order
    return names;
  });
}

TEST(each_instance_has_keys_of_its_own) {
  check::Random random(check::seed());
  Options options = toys();
  options.transport_options = {{"toy.rails", std::int64_t{3}}};
  options.num_rails = 3;
  Pair both(options);
  // An instance accepts only its own keys, so every rail must have got its peer's.
  for (int round = 0; round < 5; ++round) CHECK(both.hand_over(random));
  CHECK_EQ(keys_of(*both.src.runtime, both.src.region),
           (std::vector<std::string>{"toy 0", "toy 1", "toy 2"}));
}

TEST(agents_fetch_and_send_pieces_of_one_transfer) {
  check::Random random(check::seed());
  Pair both(toys());
  CHECK(both.hand_over(random));
  // 64 pages, ten in a piece: six are sent, and the last, of four, is fetched.
  CHECK_EQ(both.dst.stats().pieces_in, 7);
  CHECK_EQ(both.src.stats().pieces_sent, 6);
}

// Heartbeats wake no agent here: a wake-up that is missed shows as a transfer that ends by its deadline.
TEST(nothing_sleeps_on_what_came_before_the_rail_was_armed) {
  check::Random random(check::seed());
  Options options = toys();
  options.transport_options = {{"toy.rails", std::int64_t{1}}};
  Pair both(options);
  const Time until = Runtime::now() + kBound;
  toy::before_arm() = [&](std::size_t num_receives) {
    while (num_receives != 0 && toy::num_held() == 0 && Runtime::now() < until) std::this_thread::yield();
  };
  toy::hold(true);
  CHECK(both.hand_over(random));
  toy::hold(false);
  both.src.runtime->close(kBound);
  both.dst.runtime->close(kBound);
  toy::before_arm() = nullptr;
}

TEST(a_rail_that_nobody_uses_is_not_polled) {
  check::Random random(check::seed());
  Agent alone("alone", toys());
  const std::size_t before = toy::num_polls();
  for (int i = 0; i < 100; ++i) alone.runtime->poll();
  CHECK_EQ(toy::num_polls(), before);
  Pair both(toys());
  CHECK(both.hand_over(random));
  CHECK(toy::num_polls() > before);
}

TEST(a_registration_that_takes_long_stops_nobody) {
  check::Random random(check::seed());
  ThreadGate gate;
  Options options = toys({"loopback"});  // loopback is nearer, so it alone has a rail
  options.num_rails = 1;
  options.heartbeat_ns = kSecond / 2;
  options.silent_ns = 2 * kSecond;
  Pair both(options);
  std::vector<std::byte> large(both.src.memory.size());
  Result<RegionId> id = Status(Code::kInternal, "not yet");
  const PinHook hook([&](const LocalRegion& region) {
    if (region.base == large.data()) gate.stand();
    return Status();
  });
  std::thread caller([&] { id = both.src.try_add(large.data(), "large"); });
  gate.await_standing(2);  // one for each device
  // It is announced over the rails that are ready, transfers complete, and heartbeats go on for longer than
  // the silent time.
  REQUIRE(await([&] {
    const auto regions =
        both.dst.runtime->with_engine([&](Engine& engine, Time) { return engine.peer_regions(both.here); });
    return regions.ok() && std::any_of(regions.value().begin(), regions.value().end(), [](const auto& view) {
             return view.region.name == "large" && view.path == "loopback";
           });
  }));
  const Time until = Runtime::now() + options.silent_ns + kSecond;
  while (Runtime::now() < until) CHECK(both.hand_over(random));
  CHECK(both.src.runtime->with_engine([&](Engine& engine, Time) { return engine.peer(both.there)->state; }) ==
        "open");
  gate.let_on(2);
  caller.join();
  REQUIRE_OK(id);
  CHECK_EQ(keys_of(*both.src.runtime, id.value()),
           (std::vector<std::string>{"loopback 0", "toy 0", "toy 1"}));
  // The peer learns of them by a REGION that repeats the number.
  REQUIRE(await([&] {
    const auto regions =
        both.dst.runtime->with_engine([&](Engine& engine, Time) { return engine.peer_regions(both.here); });
    return std::any_of(regions.value().begin(), regions.value().end(), [](const auto& view) {
      return view.region.name == "large" && view.region.keys.size() == 3;
    });
  }));
}

TEST(devices_pin_a_region_at_the_same_time) {
  Agent alone("alone", toys());
  std::atomic<int> num_inside{0};
  const PinHook hook([&](const LocalRegion&) {
    ++num_inside;
    return await([&] { return num_inside == 2; }) ? Status() : Status(Code::kDeadline, "one after the other");
  });
  const auto id = alone.try_add(alone.memory.data(), "kv");
  REQUIRE_OK(id);
  CHECK_EQ(keys_of(*alone.runtime, id.value()), (std::vector<std::string>{"toy 0", "toy 1"}));
}

TEST(one_transport_that_cannot_register_fails_no_other) {
  check::Random random(check::seed());
  const PinHook hook([](const LocalRegion&) { return Status(Code::kExhausted, "ulimit -l is 64 KiB"); });
  Pair both(toys({"loopback"}));
  CHECK(both.hand_over(random));
  const auto notes = both.src.runtime->with_engine(
      [&](Engine& engine, Time) { return engine.region(both.src.region)->notes; });
  REQUIRE_EQ(notes.size(), 2);  // one for each instance
  CHECK_HAS(notes.front(), "toy: ulimit -l");
  Agent alone("alone", toys());
  const auto refused = alone.try_add(alone.memory.data(), "kv");
  CHECK_REFUSED(refused.status(), Code::kExhausted, "ulimit -l");
}

TEST(what_was_pinned_is_let_go_with_its_region) {
  Agent alone("alone", toys());
  const std::size_t before = toy::num_pinned();
  const auto id = alone.try_add(alone.memory.data(), "kv");
  REQUIRE_OK(id);
  CHECK_EQ(toy::num_pinned(), before + 2);
  REQUIRE_OK(alone.runtime->deregister_region(id.value()));
  CHECK_EQ(toy::num_pinned(), before);
  REQUIRE_OK(alone.try_add(alone.memory.data(), "kv"));
  alone.runtime->close(kBound);
  CHECK_EQ(toy::num_pinned(), before);
}

}  // namespace
}  // namespace kvxfer
