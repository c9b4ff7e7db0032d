// Rights that end while a device has a copy under way: no thread blocks in the fence, other transfers go on,
// and no fence is reported complete before the copy has ended. An emulated driver holds the copy.
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/runtime.h"
#include "emulated_driver.h"
#include "gpu_ends.h"
#include "held_launches.h"

namespace kvxfer::gpu_fences_test {
namespace {

using namespace gpu_ends;
using emulated::launches;

// Which copy is held: one that fetches from the peer's GPU, one that scatters bytes from a stream, or one
// that gathers bytes for a stream.
enum class Copy { kFetch, kScatter, kGather };
constexpr Copy kCopies[] = {Copy::kFetch, Copy::kScatter, Copy::kGather};

After at_once() {
  static const std::shared_ptr<Trigger> fired = [] {
    auto trigger = Trigger::create();
    trigger->fire(1);
    return trigger;
  }();
  return {fired};
}
After never() { return {Trigger::create()}; }

// Two agents, of which one (the holder) has a copy on its GPU that does not end; and a third that it talks
// to.
class Scene {
 public:
  explicit Scene(Copy copy)
      : copy_(copy),
        both_(options(copy, copy != Copy::kScatter), options(copy, copy != Copy::kGather)),
        holder(copy == Copy::kGather ? both_.src : both_.dst),
        far(copy == Copy::kGather ? both_.dst : both_.src),
        peer(copy == Copy::kGather ? both_.there : both_.here),
        lease(copy == Copy::kGather ? both_.read_lease : both_.write_lease),
        third_("third", {.transports = {"tcp"}, .heartbeat_ns = kSecond / 5}),
        pages_(kNbytes) {
    const RegionId region = holder.add(pages_.data(), "host");
    third_.add();
    const auto [there, back] = meet(*holder.runtime, *third_.runtime, 1);
    third = there;
    third_lease_ = third_.grant(back, wire::LeaseMode::kRead);
    reads_ = holder.install(third, false, third_.region, region);
    launches().let(0);
  }
  ~Scene() {
    launches().let_all();
    third_.runtime->close(kBound);
    emulated::device().refuses_imports = false;
  }

  // Posted by the holder.
  std::shared_ptr<Handle> post_own(Time timeout_ns = 2 * kBound) {
    auto handle = both_.post(copy_ == Copy::kGather, at_once(), {}, timeout_ns);
    launches().await_held(1);
    return handle;
  }
  // Posted by the peer, under the holder's lease.
  std::shared_ptr<Handle> post_under_lease() {
    auto handle = both_.post(copy_ != Copy::kGather, at_once());
    launches().await_held(1);
    return handle;
  }

  // Bytes arrive from the third agent, a deadline passes, heartbeats are answered.
  void others_go_on() {
    std::memset(third_.memory.data(), 7, kNbytes);
    const auto done = read_third(at_once(), 2 * kBound);
    const auto late = read_third(never(), kSecond / 50);
    REQUIRE(ends(done));
    CHECK_EQ(done->outcome(), Outcome::kDone);
    CHECK_EQ(holder_byte(), std::byte{7});
    REQUIRE(ends(late));
    CHECK_EQ(late->status().code(), Code::kDeadline);
    const Time heard = last_heartbeat();
    CHECK(await([&] { return last_heartbeat() > heard; }));
  }
  // The holder's cache; after the fence, no copy may write to it or read from it.
  std::vector<std::byte> cache() const { return {holder.memory.data(), holder.memory.data() + kNbytes}; }
  template <class F>
  auto ask(F&& f) const {
    return holder.runtime->with_engine([&](Engine& engine, Time) { return f(engine); });
  }

 private:
  static Options options(Copy copy, bool on_gpu) {
    launches().reset();
    // Streams carry what GPUs cannot read from each other, or whose other end is not on a GPU.
    return {
        .transports = on_gpu ? std::vector<std::string>{"cuda_ipc", "tcp"} : std::vector<std::string>{"tcp"},
        .num_rails = copy == Copy::kFetch ? 2u : 1u,
        .gpu = emulated_gpu({{&emulated::held_copy, nullptr, &emulated::convert}}),
        .heartbeat_ns = kSecond / 5};
  }
  std::shared_ptr<Handle> read_third(After after, Time timeout_ns) {
    TransferRequest request = holder.request(third, reads_);
    request.timeout_ns = timeout_ns;
    request.lease = third_lease_;
    return holder.post(std::move(request), std::move(after));
  }
  std::byte holder_byte() {
    return ask([&](Engine&) { return pages_[0]; });
  }
  Time last_heartbeat() {
    return ask([&](Engine& engine) {
      const Session* session = engine.session(third);
      return session == nullptr ? 0 : session->last_heartbeat_at();
    });
  }

  const Copy copy_;
  Ends both_;

 public:
  End &holder, &far;
  const SessionKey peer;
  const LeaseId lease;
  SessionKey third = 0;

 private:
  End third_;
  std::vector<std::byte> pages_;
  LeaseId third_lease_ = 0;
  std::uint32_t reads_ = 0;
};

// A call that returns when a fence is complete, on its own thread.
class Caller {
 public:
  explicit Caller(std::function<void()> call)
      : thread_([this, call = std::move(call)] {
          call();
          returned_ = true;
        }) {}
  ~Caller() { thread_.join(); }
  bool returned() const { return returned_; }

 private:
  std::atomic<bool> returned_{false};
  std::thread thread_;
};

TEST(a_lease_that_is_revoked_is_told_to_have_ended_when_the_copy_under_it_has) {
  for (const Copy copy : kCopies) {
    Scene scene(copy);
    const auto handle = scene.post_under_lease();
    CHECK(!scene.holder.runtime->revoke(scene.lease, 0));  // without waiting for it
    const auto state = [&] {
      return scene.ask([&](Engine& engine) { return *engine.lease_state(scene.lease); });
    };
    std::vector<std::byte> at_fence;
    {
      const Caller caller([&] {
        CHECK(scene.holder.runtime->revoke(scene.lease));
        at_fence = scene.cache();
      });
      REQUIRE(ends(handle));  // the peer is told of the right's end at once
      CHECK_EQ(handle->status().code(), Code::kLeaseEnded);
      scene.others_go_on();
      CHECK(state() == LeaseState::kEnding);
      CHECK(!caller.returned());
      launches().let_all();
    }
    CHECK(state() == LeaseState::kRevoked);
    CHECK(at_fence == scene.cache());
    CHECK_EQ(scene.holder.num_transfers(), 0);
  }
}

TEST(a_transfer_that_is_cancelled_ends_when_its_copy_has) {
  for (const Copy copy : kCopies) {
    Scene scene(copy);
    const auto handle = scene.post_own();
    scene.holder.runtime->cancel(*handle);
    REQUIRE(await([&] { return scene.far.num_transfers() == 0; }));
    scene.others_go_on();
    CHECK_EQ(handle->outcome(), Outcome::kPending);
    launches().let_all();
    REQUIRE(ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kCancelled);
  }
}

TEST(a_transfer_whose_time_is_over_ends_when_its_copy_has) {
  for (const Copy copy : kCopies) {
    Scene scene(copy);
    const auto handle = scene.post_own(4 * kSecond);
    REQUIRE(await([&] { return scene.far.num_transfers() == 0; }));
    scene.others_go_on();
    CHECK_EQ(handle->outcome(), Outcome::kPending);
    launches().let_all();
    REQUIRE(ends(handle));
    CHECK_EQ(handle->status().code(), Code::kDeadline);
  }
}

TEST(a_region_is_its_owners_when_the_copy_there_has_ended) {
  for (const Copy copy : kCopies) {
    Scene scene(copy);
    const auto handle = scene.post_own();
    const RegionId region = scene.holder.region;
    CHECK_EQ(scene.holder.runtime->deregister_region(region, 0).code(), Code::kDeadline);
    std::vector<std::byte> at_fence;
    {
      const Caller caller([&] {
        CHECK_OK(scene.holder.runtime->deregister_region(region));
        at_fence = scene.cache();
      });
      REQUIRE(await([&] { return scene.far.num_transfers() == 0; }));
      scene.others_go_on();
      CHECK_EQ(handle->outcome(), Outcome::kPending);
      CHECK(!caller.returned());
      CHECK(scene.ask([&](Engine& engine) { return engine.is_leaving(region); }));
      launches().let_all();
    }
    REQUIRE(ends(handle));
    CHECK_EQ(handle->status().code(), Code::kRegionGone);
    CHECK(at_fence == scene.cache());
  }
}

TEST(a_peer_that_is_lost_ends_transfers_when_their_copies_have_ended) {
  for (const Copy copy : kCopies) {
    Scene scene(copy);
    const auto handle = scene.post_own();
    {
      // The agent releases its memory when the copy has ended.
      const Caller closer([&] { scene.far.runtime->close(kBound); });
      REQUIRE(await(
          [&] { return scene.ask([&](Engine& engine) { return engine.session(scene.peer) == nullptr; }); }));
      scene.others_go_on();
      CHECK_EQ(handle->outcome(), Outcome::kPending);
      CHECK(scene.ask([&](Engine& engine) { return *engine.lease_state(scene.lease); }) !=
            LeaseState::kActive);
      launches().let_all();
    }
    REQUIRE(ends(handle));
    CHECK_EQ(handle->status().code(), Code::kPeerLost);
  }
}

TEST(an_agent_is_closed_when_its_copies_have_ended) {
  for (const Copy copy : kCopies)
    for (const Time patience : {Time{0}, kBound}) {
      Scene scene(copy);
      const auto handle = scene.post_own();
      std::vector<std::byte> at_close;
      {
        const Caller closer([&] {
          scene.holder.runtime->close(patience);
          at_close = scene.cache();
        });
        REQUIRE(await([&] { return scene.holder.runtime->closed() && scene.far.num_transfers() == 0; }));
        // Callers that query meanwhile do not block either.
        CHECK_EQ(scene.holder.num_transfers(), 1);
        CHECK_EQ(handle->outcome(), Outcome::kPending);
        CHECK(!closer.returned());
        launches().let_all();
      }
      CHECK_EQ(handle->status().code(), Code::kClosed);
      CHECK(at_close == scene.cache());
    }
}

}  // namespace
}  // namespace kvxfer::gpu_fences_test
