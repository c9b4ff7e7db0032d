// A victim that runs out of memory while a peer talks to it over real sockets: that peer may lose its
// session, but the process lives, and a third agent is still served.
#include "memory_failure.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <string>

#include "hostile_peer.h"

namespace hostile {
namespace {

// The thread that drives the victim, which is not always the victim's own.
std::atomic<long> victim_thread{0};
std::atomic<std::uint64_t> countdown{0};  // the allocation that fails; 0: none
std::atomic<std::size_t> most_nbytes{SIZE_MAX};  // larger allocations fail
std::atomic<std::uint64_t> num_failed{0};

bool fails(std::size_t nbytes) noexcept {
  static thread_local const long self = ::syscall(SYS_gettid);
  if (self != victim_thread.load(std::memory_order_relaxed)) return false;
  const bool now = nbytes > most_nbytes || (countdown != 0 && --countdown == 0);
  num_failed += now ? 1 : 0;
  return now;
}

// The threads of this process's agents, the oldest first.
std::vector<long> agent_threads() {
  std::vector<long> threads;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (name == "kvxfer") threads.push_back(std::stol(task.path().filename()));
  }
  std::sort(threads.begin(), threads.end());
  return threads;
}

RuntimeOptions quiet(const char* name) {
  RuntimeOptions options = options_of(name);
  options.heartbeat_ns = kNoHeartbeat;  // the friend sends nothing while an allocation has to fail
  options.transports = {"shm", "unix"};
  return options;
}

struct FailingScene {
  FailingScene() : scene(quiet("victim"), quiet("friend")) {
    const std::vector<long> threads = agent_threads();
    REQUIRE_EQ(threads.size(), 2u);
    victim_thread = threads.front();  // it was started first
    memory_failure::fails = &fails;
    REQUIRE(scene.friend_is_served());  // so all earlier messages have been read
  }
  ~FailingScene() {
    memory_failure::fails = nullptr;
    victim_thread = 0;
    countdown = 0;
    most_nbytes = SIZE_MAX;
  }
  Scene scene;
};

LeaseId lease_of_bearers = 0;

LeaseId grant_to_bearers(Scene& scene) {
  const auto lease = scene.victim.runtime->with_engine([&](Engine& engine, Time now) {
    return engine.grant(
        now, {std::nullopt, scene.victim.region, wire::LeaseMode::kRead, true, {}, 10 * kBound, false});
  });
  REQUIRE_OK(lease);
  return lease.value();
}

// Begins everything that a peer can begin, and goes on after failures. True if its pages were announced.
bool visit(Scene& scene, Time patience_ns) {
  Peer peer(scene.victim.runtime->address());
  if (!peer.shake_hands()) return false;
  const auto rail = peer.open_rail(0, "unix");
  peer.say(Reader::hers());
  peer.say(wire::Program{1, scene.victim.region, Reader::kRegion, pages_of(kBlockNbytes)});
  peer.say(wire::Program{2, Reader::kRegion, scene.victim.region, pages_of(kBlockNbytes)});
  wire::TransferSpec spec;
  spec.grid = {0, 1, 2, 1};
  spec.timeout_ns = static_cast<std::uint64_t>(kBound);
  spec.src_ids = spec.dst_ids = {1, 2};
  spec.transfer = 2;
  spec.program = 1;
  spec.flags = wire::kFlagIntegrity;
  spec.lease = lease_of_bearers;
  spec.flags |= wire::kFlagLease;
  peer.say(wire::Request{spec});
  peer.say(wire::Credit{2, {0}, 0, 2});
  spec.transfer = 4;
  spec.program = 2;
  spec.flags = 0;
  spec.lease = 0;
  spec.notify = wire::Bytes(8, std::byte{1});  // it waits for its tag
  peer.say(wire::Offer{spec, 1, 0, 0});
  wire::Lease lease;
  lease.id = 1;
  lease.region = Reader::kRegion;
  lease.all_blocks = true;
  lease.ttl_ns = 1'000'000'000;
  peer.say(lease);
  return peer.hear_until([&] { return peer.num_heard<wire::Checksums>() != 0; }, patience_ns);
}

TEST(whichever_allocation_fails_a_peer_loses_its_session_at_most) {
  FailingScene failing;
  Scene& scene = failing.scene;
  lease_of_bearers = grant_to_bearers(scene);
  std::uint64_t n = 1;
  for (bool met = true; met && n < 3000; n += 1 + n / 64) {
    const std::uint64_t before = num_failed;
    countdown = n;
    visit(scene, 20'000'000);
    countdown = 0;
    met = num_failed != before;
    const bool served = scene.friend_is_served();
    CHECK(served);
    if (served) continue;
    std::printf("  after allocation %llu\n", static_cast<unsigned long long>(n));
    break;
  }
  CHECK(visit(scene, kBound));  // the same without a failure
  CHECK(scene.friend_is_there());
  // All that belonged to its session is gone.
  CHECK(await([&] { return scene.victim.num_transfers() == 0; }));
}

TEST(a_peer_that_asks_for_more_than_there_is_ends_its_own_session) {
  FailingScene failing;
  Scene& scene = failing.scene;
  most_nbytes = 128 * 1024;
  Peer peer(scene.victim.runtime->address());
  REQUIRE(peer.shake_hands());
  wire::Lease large;
  large.id = 1;
  large.region = Reader::kRegion;
  large.ttl_ns = 1'000'000'000;
  large.blocks.resize(1 << 18);
  for (std::uint32_t i = 0; i < large.blocks.size(); ++i) large.blocks[i] = i;
  const std::uint64_t before = num_failed;
  CHECK(scene.friend_is_served());
  peer.say(large);
  CHECK(peer.hears_the_end());
  CHECK(num_failed != before);
  CHECK(scene.friend_is_served());
  CHECK(scene.friend_is_there());
}

}  // namespace
}  // namespace hostile
