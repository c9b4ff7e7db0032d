// Streams of a GPU that wait for transfers, over an emulated driver: kernels behind the wait see the bytes,
// and every end of a transfer lets the stream go on.
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/runtime.h"
#include "emulated_driver.h"
#include "gpu_ends.h"
#include "held_launches.h"

namespace kvxfer::gpu_stream_waits_test {
namespace {

using namespace gpu_ends;
using emulated::held_copy;
using emulated::launches;

constexpr unsigned char kPage = 7;

// Launches of the agents' copies begin when a test lets them; writes to streams' words are not held.
Options held() {
  launches().reset();
  return {.gpu = emulated_gpu({{&held_copy, nullptr, &emulated::convert}}, 0)};
}

// The value of a layer when a kernel behind the wait reads it; -1 before.
class Seen {
 public:
  void look_in(ModelStream& stream, const End& end, std::uint32_t layer) {
    stream.run([this, at = end.memory.data() + layer * kLayerNbytes] {
      const auto first = std::to_integer<int>(at[0]);
      bool all = true;
      for (std::uint64_t byte = 0; byte < kLayerNbytes; ++byte) all = all && at[byte] == at[0];
      value_.store(all ? first : 1000);
    });
  }
  int value() const { return value_; }

 private:
  std::atomic<int> value_{-1};
};

// A trigger that a test fires to release layers.
struct Held {
  std::shared_ptr<Trigger> trigger = Trigger::create();
  After all() const { return {trigger}; }
  After by_layer() const { return {trigger, 1, 1}; }
};

std::shared_ptr<StreamWait> waiting(Runtime& runtime, ModelStream& stream,
                                    const std::shared_ptr<Handle>& handle,
                                    std::optional<std::uint32_t> layer = std::nullopt) {
  auto made = runtime.wait_in(stream.get(), *handle, layer);
  REQUIRE_OK(made);
  return std::move(made).value();
}

bool goes_on(ModelStream& stream) {
  return await([&] { return stream.is_idle(); });
}

// It has to be the first, while this process has one thread, because it forks.
TEST(a_stream_goes_on_when_the_process_that_it_waits_for_dies) {
  const Options options{.transports = {"unix", "cuda_ipc"}, .gpu = emulated_gpu(emulated::fast_kernels(), 0)};
  Child<End> child(options);
  End dst("dst", options);
  dst.add();
  const auto called = dst.runtime->begin_connect(child.address(), kBound);
  REQUIRE_OK(called);
  REQUIRE(await([&] { return num_rails(*dst.runtime, called.value()) == 2; }));
  const std::uint32_t program = dst.install(called.value(), false, 1, dst.region);
  Held held;
  TransferRequest request = dst.request(called.value(), program, {0, 1});
  request.lease = child.lease();
  const auto handle = dst.post(std::move(request), held.by_layer());
  {
    ModelStream stream;
    const auto first = waiting(*dst.runtime, stream, handle, 0),
               whole = waiting(*dst.runtime, stream, handle);
    held.trigger->fire(1);
    REQUIRE(await([&] { return first->outcome() == Outcome::kDone; }));
    CHECK_EQ(whole->outcome(), Outcome::kPending);
    CHECK(!stream.is_idle());
    child.kill();
    REQUIRE(goes_on(stream));
    CHECK_EQ(whole->outcome(), Outcome::kFailed);
    CHECK_EQ(first->outcome(), Outcome::kDone);
    REQUIRE(await([&] { return handle->outcome() != Outcome::kPending; }));
    CHECK_EQ(handle->status().code(), Code::kPeerLost);
  }
  dst.runtime->close(5 * kSecond);
}

TEST(what_runs_behind_a_wait_sees_the_bytes_and_does_not_run_before_they_are_there) {
  for (const auto& [options, what] :
       {std::pair{Options{}, "over cuda_ipc"},
        std::pair{Options{.transports = {"loopback", "cuda_ipc"}, .num_rails = 2, .kind = MemoryKind::kHost},
                  "host memory of an agent with a GPU"}}) {
    ModelStream stream;
    Ends both(options);
    std::memset(both.src.memory.data(), kPage, kNbytes);
    Held held;
    const auto handle = both.read(held.all());
    const auto wait = waiting(*both.dst.runtime, stream, handle);
    Seen seen;
    seen.look_in(stream, both.dst, kLayers - 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (seen.value() != -1 || wait->outcome() != Outcome::kPending) FAIL(what);
    held.trigger->fire(1);
    REQUIRE(goes_on(stream));
    if (seen.value() != kPage) FAIL(what);
    CHECK_EQ(wait->outcome(), Outcome::kDone);
    CHECK_EQ(*wait->outcome_address(), 1u);
    // The host hears of the end no later than the stream.
    CHECK_EQ(handle->outcome(), Outcome::kDone);
  }
}

TEST(pages_that_come_staged_through_host_memory_are_waited_for_alike) {
  ModelStream stream;
  // The source's cache lies in host memory, so no rail of GPUs reaches both.
  Ends both({.transports = {"tcp"}}, {.transports = {"cuda_ipc", "tcp"}});
  std::memset(both.src.memory.data(), kPage, kNbytes);
  Held held;
  const auto handle = both.read(held.by_layer());
  Seen first, last;
  const auto wait = waiting(*both.dst.runtime, stream, handle, 0);
  first.look_in(stream, both.dst, 0);
  const auto end = waiting(*both.dst.runtime, stream, handle);
  last.look_in(stream, both.dst, kLayers - 1);
  held.trigger->fire(1);
  REQUIRE(await([&] { return first.value() != -1; }));
  CHECK_EQ(first.value(), kPage);
  CHECK_EQ(last.value(), -1);
  held.trigger->fire(kLayers);
  REQUIRE(goes_on(stream));
  CHECK_EQ(last.value(), kPage);
  CHECK_EQ(end->outcome(), Outcome::kDone);
  CHECK_EQ(handle->rails(), std::vector<std::string>{"tcp"});
}

TEST(a_stream_goes_on_layer_by_layer) {
  ModelStream stream;
  Ends both;
  std::memset(both.src.memory.data(), kPage, kNbytes);
  Held held;
  const auto handle = both.read(held.by_layer());
  Seen seen[kLayers];
  std::vector<std::shared_ptr<StreamWait>> waits;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    waits.push_back(waiting(*both.dst.runtime, stream, handle, layer));
    seen[layer].look_in(stream, both.dst, layer);
  }
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    CHECK_EQ(waits[layer]->outcome(), Outcome::kPending);
    held.trigger->fire(layer + 1);
    REQUIRE(await([&] { return seen[layer].value() != -1; }));
    CHECK_EQ(seen[layer].value(), kPage);
    CHECK_EQ(waits[layer]->outcome(), Outcome::kDone);
    for (std::uint32_t later = layer + 1; later < kLayers; ++later) CHECK_EQ(seen[later].value(), -1);
  }
  REQUIRE(ends(handle));
}

TEST(an_expectation_is_waited_for_as_well_and_so_is_the_end_of_a_write) {
  ModelStream stream, at_src;
  Ends both;
  std::memset(both.src.memory.data(), kPage, kNbytes);
  const auto expected = both.dst.runtime->with_engine([&](Engine& engine, Time now) {
    return engine.expect(now, {std::byte{9}}, both.dst.region, {0, 1, 2, 3}, 0, kLayers, {1, 0, 4, 1},
                         both.here, kBound);
  });
  REQUIRE_OK(expected);
  waiting(*both.dst.runtime, stream, expected.value(), 1);
  Seen seen;
  seen.look_in(stream, both.dst, 1);
  TransferRequest request = both.request(true);
  request.notify = {std::byte{9}};
  Held held;
  const auto written = both.src.post(std::move(request), held.all());
  // After the wait, its pages may be overwritten.
  const auto wait = waiting(*both.src.runtime, at_src, written);
  CHECK(!at_src.is_idle());
  held.trigger->fire(1);
  REQUIRE(goes_on(stream));
  CHECK_EQ(seen.value(), kPage);
  REQUIRE(goes_on(at_src));
  CHECK_EQ(wait->outcome(), Outcome::kDone);
  REQUIRE(ends(expected.value()));
}

TEST(what_has_ended_or_arrived_already_holds_up_nobody) {
  ModelStream stream;
  Ends both;
  Held held;
  const auto handle = both.read(held.by_layer());
  held.trigger->fire(1);
  REQUIRE(await([&] { return handle->layer_arrived(0); }));
  CHECK_EQ(waiting(*both.dst.runtime, stream, handle, 0)->outcome(), Outcome::kDone);
  both.dst.runtime->with_engine([&](Engine& engine, Time now) { engine.cancel(now, handle->id()); });
  REQUIRE(ends(handle));
  CHECK_EQ(waiting(*both.dst.runtime, stream, handle, 0)->outcome(), Outcome::kDone);
  CHECK_EQ(waiting(*both.dst.runtime, stream, handle, 1)->outcome(), Outcome::kCancelled);
  CHECK_EQ(waiting(*both.dst.runtime, stream, handle)->outcome(), Outcome::kCancelled);
  CHECK(goes_on(stream));
}

TEST(however_a_transfer_fails_the_stream_goes_on_and_sees_it) {
  struct Way {
    const char* name;
    Outcome outcome;
    Code code;
    Time timeout_ns;
    std::function<void(Ends&, const Handle&)> fail;
  };
  const std::vector<Way> ways = {
      {"cancelled", Outcome::kCancelled, Code::kCancelled, kBound,
       [](Ends& both, const Handle& handle) {
         both.dst.runtime->with_engine([&](Engine& engine, Time now) { engine.cancel(now, handle.id()); });
       }},
      {"its deadline", Outcome::kFailed, Code::kDeadline, kSecond / 20, [](Ends&, const Handle&) {}},
      {"its lease was revoked", Outcome::kFailed, Code::kLeaseEnded, kBound,
       [](Ends& both, const Handle&) {
         both.src.runtime->with_engine([&](Engine& engine, Time now) {
           engine.revoke(now, both.read_lease);
           return 0;
         });
       }},
      {"the region was deregistered", Outcome::kFailed, Code::kRegionGone, kBound,
       [](Ends& both, const Handle&) { CHECK_OK(both.dst.runtime->deregister_region(both.dst.region)); }},
      {"the peer closed", Outcome::kFailed, Code::kPeerLost, kBound,
       [](Ends& both, const Handle&) { both.src.runtime->close(kBound); }},
      {"the agent was closed", Outcome::kFailed, Code::kClosed, kBound,
       [](Ends& both, const Handle&) { both.dst.runtime->close(kBound); }},
  };
  for (const Way& way : ways) {
    ModelStream stream;
    Ends both;
    Held held;
    const auto handle = both.read(held.by_layer(), {0, 1, 2, 3}, way.timeout_ns);
    const auto first = waiting(*both.dst.runtime, stream, handle, 0);
    const auto last = waiting(*both.dst.runtime, stream, handle, kLayers - 1);
    const auto whole = waiting(*both.dst.runtime, stream, handle);
    held.trigger->fire(1);
    // With a deadline, the first transfer may already have failed.
    REQUIRE(await([&] { return first->outcome() != Outcome::kPending; }));
    way.fail(both, *handle);
    if (!goes_on(stream)) FAIL(way.name);
    if (last->outcome() != way.outcome || whole->outcome() != way.outcome) FAIL(way.name);
    REQUIRE(ends(handle));
    if (handle->outcome() != way.outcome || handle->status().code() != way.code)
      FAIL(std::string(way.name) + ": " + handle->status().message());
  }
}

// The driver may put two streams into one queue: the copy then begins only when the model's stream goes on.
TEST(a_fence_that_waits_for_a_kernel_behind_the_waiting_stream_does_not_hang) {
  for (const char* how : {"cancel", "peer", "close"}) {
    ModelStream stream;
    Ends both(held());
    launches().let(0);
    Held held;
    held.trigger->fire(1);
    const auto handle = both.read(held.all());
    const auto other = both.read(Held().all());
    const auto wait = waiting(*both.dst.runtime, stream, other),
               own = waiting(*both.dst.runtime, stream, handle);
    stream.run([] { launches().let_all(); });
    launches().await_held(1);
    if (how == std::string("cancel")) {
      // The other's end is its own; this one stands behind its word alone.
      both.dst.runtime->with_engine([&](Engine& engine, Time now) { engine.cancel(now, other->id()); });
      both.dst.runtime->with_engine([&](Engine& engine, Time now) { engine.cancel(now, handle->id()); });
      CHECK_EQ(own->outcome(), Outcome::kCancelled);
    } else if (how == std::string("peer")) {
      both.src.runtime->close(kBound);
    } else {
      both.dst.runtime->close(kBound);
    }
    if (!goes_on(stream)) FAIL(how);
    CHECK(wait->outcome() != Outcome::kPending && wait->outcome() != Outcome::kDone);
    REQUIRE(ends(handle));
    REQUIRE(ends(other));
    launches().let_all();
  }
}

TEST(a_transfer_that_waits_for_the_stream_that_waits_for_it_ends_by_its_deadline) {
  ModelStream stream;
  Ends both;
  Held held;
  const auto first = both.read(held.all(), {0}, kSecond / 20);
  const auto wait = waiting(*both.dst.runtime, stream, first);
  // The second read begins when the stream has run everything, including its wait for the first.
  auto behind = both.dst.runtime->after_stream(stream.get());
  REQUIRE_OK(behind);
  const auto second = both.read(std::move(behind).value(), {1});
  REQUIRE(goes_on(stream));
  CHECK_EQ(wait->outcome(), Outcome::kFailed);
  REQUIRE(ends(second));
  CHECK_EQ(second->outcome(), Outcome::kDone);
}

TEST(an_agent_that_closes_without_patience_leaves_neither_a_stream_nor_a_handle_behind) {
  ModelStream stream;
  // Every completion comes some polls late.
  Ends both(Options{.faults = "delay=1"});
  Held held;
  held.trigger->fire(1);
  const auto handle = both.read(held.by_layer());
  const auto wait = waiting(*both.dst.runtime, stream, handle);
  both.dst.runtime->close(0);
  REQUIRE(goes_on(stream));
  CHECK(handle->outcome() == Outcome::kFailed);
  CHECK_EQ(handle->status().code(), Code::kClosed);
  CHECK_EQ(wait->outcome(), Outcome::kFailed);
}

TEST(a_stream_may_come_to_its_wait_long_after_everything_is_gone) {
  gpu::EventHandle busy;
  ModelStream stream;
  stream.hold(busy);
  {
    Ends both;
    Held held;
    const auto handle = both.read(held.all());
    waiting(*both.dst.runtime, stream, handle);  // dropped at once
    both.dst.runtime->with_engine([&](Engine& engine, Time now) { engine.cancel(now, handle->id()); });
    REQUIRE(ends(handle));
  }
  // Its word has been reused by transfers that are pending now.
  ModelStream others;
  Ends both;
  Held held;
  const auto handle = both.read(held.all());
  std::vector<std::shared_ptr<StreamWait>> kept;
  for (int i = 0; i < 200; ++i) kept.push_back(waiting(*both.dst.runtime, others, handle));
  busy.fire();
  CHECK(goes_on(stream));
  CHECK(!others.is_idle());
  held.trigger->fire(1);
  CHECK(goes_on(others));
}

TEST(words_are_used_again) {
  ModelStream stream;
  Ends both;
  std::set<const std::uint32_t*> words;
  for (int round = 0; round < 300; ++round) {
    Held held;
    const auto handle = both.read(held.all(), {0});
    const auto wait = waiting(*both.dst.runtime, stream, handle);
    words.insert(wait->word());
    held.trigger->fire(1);
    REQUIRE(goes_on(stream));
    CHECK_EQ(wait->outcome(), Outcome::kDone);
  }
  CHECK(words.size() <= 5 * 64);  // a page, and those that earlier tests took
  CHECK(words.size() < 300);
}

TEST(what_cannot_be_waited_for_is_refused_in_words_and_nothing_is_enqueued) {
  ModelStream stream;
  Ends both;
  Held held;
  const auto handle = both.read(held.all());
  Runtime& agent = *both.dst.runtime;
  const auto tried = [&](std::optional<std::uint32_t> layer = std::nullopt) {
    return agent.wait_in(stream.get(), *handle, layer).status();
  };
  CHECK_REFUSED(tried(kLayers), Code::kOutOfRange, "does not arrive here");
  stream.get()->context = reinterpret_cast<gpu::Context>(&both);
  CHECK_REFUSED(tried(), Code::kInvalidArgument, "on GPU 1, but the agent's GPU is 0");
  stream.get()->context = emulated::own_context();
  stream.get()->capturing = true;
  CHECK_REFUSED(tried(), Code::kInvalidArgument, "is being captured into a graph");
  CHECK(stream.get()->captured.empty());
  stream.get()->capturing = false;
  emulated::device().refuses_waits = true;
  CHECK_REFUSED(tried(), Code::kUnsupported, "cannot wait for words of memory");
  emulated::device().refuses_waits = false;
  emulated::device().stream_error = emulated::kLaunchFailed;
  CHECK_REFUSED(tried(), Code::kSystem, "cuStream");
  emulated::device().stream_error = 0;
  CHECK(goes_on(stream));
  held.trigger->fire(1);
  REQUIRE(ends(handle));
  CHECK_EQ(handle->outcome(), Outcome::kDone);
  agent.close(kBound);
  CHECK_REFUSED(tried(), Code::kClosed, "is closed");

  Ends hosts({.transports = {"loopback"}});
  const auto on_host = hosts.read(held.all());
  CHECK_REFUSED(hosts.dst.runtime->wait_in(stream.get(), *on_host).status(), Code::kUnsupported,
                "has no GPU in whose streams it could wait");
}

TEST(where_a_device_flushes_remote_writes_a_wait_asks_for_it) {
  // The emulated driver refuses the flag if the device does not report the capability.
  for (const bool flushes : {false, true}) {
    emulated::device().flushes_remote_writes = flushes;
    ModelStream stream;
    Ends both;
    Held held;
    held.trigger->fire(1);
    const auto wait = waiting(*both.dst.runtime, stream, both.read(held.all()));
    REQUIRE(goes_on(stream));
    CHECK_EQ(wait->outcome(), Outcome::kDone);
  }
  emulated::device().flushes_remote_writes = false;
}

}  // namespace
}  // namespace kvxfer::gpu_stream_waits_test
