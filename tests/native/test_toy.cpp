// The toy transport (toy_transport/), registered by its line: the suite of all transports, and what seams it
// shows: keys for each instance, and registration that takes its time.
#include <condition_variable>
#include <mutex>
#include <thread>

#include "conformance.h"
#include "handovers.h"
#include "toy_transport/toy_transport.h"

namespace kvxfer {
namespace {

using namespace handovers;

conformance::Subject toy_rail() {
  return {"toy",
          [](Reactor& reactor, const FenceTable& fences) -> std::unique_ptr<Transport> {
            return std::make_unique<toy::ToyTransport>(reactor, fences, false);
          },
          conformance::unix_sockets,
          false,
          {}};
}
CONFORMANCE(toy_rail)

// Holds threads until it is opened.
class Latch {
 public:
  void wait() {
    std::unique_lock lock(mutex_);
    ++num_waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
  }
  void await_waiting() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_waiting_ != 0; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_waiting_ = 0;
  bool open_ = false;
};

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
    return names;
  });
}

TEST(each_instance_has_keys_of_its_own) {
  check::Random random(check::seed());
  Pair both({"toy"}, 3, {{"toy.rails", std::int64_t{3}}});
  // A key of another instance is no key of this one: every rail must have been given its peer's.
  for (int round = 0; round < 5; ++round) CHECK(both.hand_over(random));
  CHECK_EQ(keys_of(*both.src.runtime, both.src.region),
           (std::vector<std::string>{"toy 0", "toy 1", "toy 2"}));
}

TEST(a_registration_that_takes_long_stops_nobody) {
  check::Random random(check::seed());
  Latch latch;
  Pair both({"toy", "loopback"}, 1);  // loopback is nearer: it alone has a rail
  std::vector<std::byte> large(kBlocks * kBlockNbytes);
  Result<RegionId> id = Status(Code::kInternal, "not yet");
  const PinHook hook([&](const LocalRegion& region) {
    if (region.base == large.data()) latch.wait();
    return Status();
  });
  std::thread caller([&] { id = both.src.add(large, "large"); });
  latch.await_waiting();
  // It is announced over what is ready, transfers complete, and heartbeats go on for longer than patience.
  REQUIRE(await([&] {
    const auto regions =
        both.dst.runtime->with_engine([&](Engine& engine, Time) { return engine.peer_regions(both.here); });
    return regions.ok() && std::any_of(regions.value().begin(), regions.value().end(), [](const auto& view) {
             return view.region.name == "large" && view.path == "loopback";
           });
  }));
  const Time until = Runtime::now() + 3 * kSecond;  // silent_ns is 2 s
  while (Runtime::now() < until) CHECK(both.hand_over(random));
  CHECK(both.src.runtime->with_engine([&](Engine& engine, Time) { return engine.peer(both.there)->state; }) ==
        "open");
  latch.open();
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

TEST(one_transport_that_cannot_register_fails_no_other) {
  check::Random random(check::seed());
  const PinHook hook([](const LocalRegion&) { return Status(Code::kExhausted, "ulimit -l is 64 KiB"); });
  Pair both({"toy", "loopback"}, 1);
  CHECK(both.hand_over(random));
  const auto notes = both.src.runtime->with_engine(
      [&](Engine& engine, Time) { return engine.region(both.src.region)->notes; });
  REQUIRE_EQ(notes.size(), 2);  // one an instance
  CHECK(notes.front().find("toy: ulimit -l") != std::string::npos);
  Agent alone("alone", {"toy"});
  const auto refused = alone.add(alone.memory);
  CHECK_EQ(refused.status().code(), Code::kExhausted);
  CHECK(refused.status().message().find("ulimit -l") != std::string::npos);
}

TEST(what_was_pinned_is_let_go_with_its_region) {
  Agent alone("alone", {"toy"});
  const std::size_t before = toy::num_pinned();
  const auto id = alone.add(alone.memory);
  REQUIRE_OK(id);
  CHECK_EQ(toy::num_pinned(), before + 2);
  REQUIRE_OK(alone.runtime->deregister_region(id.value()));
  CHECK_EQ(toy::num_pinned(), before);
  REQUIRE_OK(alone.add(alone.memory));
  alone.runtime->close(kBound);
  CHECK_EQ(toy::num_pinned(), before);
}

}  // namespace
}  // namespace kvxfer
