// A verbs rail whose allocations fail, one after the other: each accepted work ends once, at most one peer's
// rail is lost, and later works succeed.
#include "memory_failure.h"

#include <sys/socket.h>

#include <atomic>
#include <map>
#include <thread>
#include <vector>

#include "check.h"
#include "verbs_ends.h"

namespace verbs_ends::verbs_memory_test {
namespace {

std::uint64_t countdown = 0;  // the allocation that fails; 0: none
bool is_asked = false;  // a function of the transport runs
bool has_failed = false;
const std::thread::id the_test = std::this_thread::get_id();
std::atomic<bool> threads_fail{false};  // all allocations of the transport's own threads fail

bool fails(std::size_t) noexcept {
  if (std::this_thread::get_id() != the_test) return threads_fail && !counting_device::Fabric::is_inside();
  if (!is_asked || countdown == 0 || counting_device::Fabric::is_inside()) return false;
  if (--countdown != 0) return false;
  return has_failed = true;
}

// Calls the transport; allocations may fail meanwhile. False: it threw.
template <class Ask>
bool ask(Ask&& body) {
  is_asked = true;
  bool ended = true;
  try {
    body();
  } catch (const std::bad_alloc&) {
    ended = false;
  }
  is_asked = false;
  return ended;
}

struct Scene {
  Rails rails{128};
  std::map<WorkId, int> ends;  // how often the end of each accepted work was reported

  void poll() {
    rails.src.step();
    rails.other.step();
    rails.dst.reactor.run_once(0);
    Completion out[8];
    std::size_t num = 0;
    REQUIRE(ask([&] { num = rails.dst.transport->poll(out); }));  // poll is noexcept
    for (std::size_t i = 0; i < num; ++i) {
      if (out[i].kind == CompletionKind::kWork) ++ends.at(out[i].work);
      rails.dst.completions.push_back(std::move(out[i]));
    }
  }
  void post(PeerId peer, const std::vector<Work>& works) {
    testing::Posted posted;
    REQUIRE(ask([&] { posted = testing::post_all(*rails.dst.transport, peer, works); }));
    for (std::size_t i = 0; i < posted.accepted; ++i) ends[works[i].id] = 0;
  }
  bool all_ended() const {
    return std::all_of(ends.begin(), ends.end(), [](const auto& each) { return each.second != 0; });
  }
};

TEST(whichever_allocation_fails_what_was_accepted_ends_once) {
  memory_failure::fails = &fails;
  std::uint64_t num_met = 0, num_lost = 0;
  for (std::uint64_t n = 1;; ++n) {
    Scene scene;
    Rails& rails = scene.rails;
    has_failed = false;
    countdown = n;
    const std::size_t num_pairs = rails.fabric.num_pairs();
    auto [left, right] = kvxfer::testing::socket_pair();
    const bool connects = ask(
        [&, &left = left] { REQUIRE_OK(rails.dst.transport->connect(std::move(left), {true, 1, "src"})); });
    if (!connects) CHECK_EQ(rails.fabric.num_pairs(), num_pairs);
    const bool attaches =
        ask([&] { REQUIRE_OK(rails.dst.transport->attach(rails.peer, rails.from.remote())); });
    if (attaches) {
      const std::vector<Work> works = rails.some_works(96, 8);
      scene.post(rails.peer, works);
      scene.post(rails.other_peer, rails.some_works(32, 8, 2));
      for (int i = 0; i < 3; ++i) scene.poll();
      if (scene.ends.contains(works[5].id))
        REQUIRE(ask([&] { rails.dst.transport->cancel(std::span(&works[5].id, 1)); }));
    }
    for (int i = 0; i < 10'000 && !scene.all_ended(); ++i) scene.poll();
    const bool met = has_failed;
    countdown = 0;
    for (const auto& [work, num] : scene.ends) CHECK_EQ(num, 1);
    CHECK(!rails.is_down(rails.peer) || !rails.is_down(rails.other_peer));
    num_lost += rails.is_down(rails.peer) || rails.is_down(rails.other_peer) ? 1 : 0;
    // A rail that is dialled again works as usual.
    const auto [again, back] = connect_both(rails.dst, rails.src);
    REQUIRE_OK(rails.dst.transport->attach(again, rails.from.remote()));
    rails.finish(rails.some_works(64, 16), again);
    if (!met) break;
    ++num_met;
    REQUIRE(n < 5'000);
  }
  memory_failure::fails = nullptr;
  std::printf("  %llu allocations failed, of which %llu cost a rail\n",
              static_cast<unsigned long long>(num_met), static_cast<unsigned long long>(num_lost));
  CHECK(num_met > 20);
}

TEST(queue_pairs_for_whose_connection_there_is_no_memory_cost_that_peer_alone) {
  memory_failure::fails = &fails;
  std::uint64_t num_met = 0, num_lost = 0;
  for (std::uint64_t n = 0;; ++n) {  // 0: an allocation of a thread
    counting_device::Fabric fabric;
    Liar liar;
    End& victim = liar.victim;
    liar.say(liar.hello);
    has_failed = false;
    countdown = n;
    threads_fail = n == 0;
    const auto step = [&] {
      Completion out[4];
      std::size_t num = 0;
      REQUIRE(ask([&] {
        victim.reactor.run_once(0);
        num = victim.transport->poll(out);
      }));
      for (std::size_t i = 0; i < num; ++i) victim.completions.push_back(std::move(out[i]));
    };
    verbs::Message ready;
    const auto is_ready = [&] {
      return ::recv(liar.socket.get(), &ready, sizeof ready, MSG_DONTWAIT | MSG_PEEK) == sizeof ready &&
             ready.kind == verbs::MessageKind::kReady && ready.is_of_this_version();
    };
    const auto is_down = [&] { return victim.event(CompletionKind::kRailDown) != nullptr; };
    while (!is_down() && !is_ready()) {
      step();
      std::this_thread::yield();
    }
    const bool met = has_failed || n == 0;
    countdown = 0;
    threads_fail = false;
    num_lost += is_down() ? 1 : 0;
    CHECK(met || !is_down());
    if (n == 0) CHECK(is_down());
    victim.transport->disconnect(liar.peer);
    End other(on("nic0"));
    connect_both(victim, other);
    if (!met) break;
    ++num_met;
    REQUIRE(n < 1'000);
  }
  memory_failure::fails = nullptr;
  std::printf("  %llu allocations failed, of which %llu cost a rail\n",
              static_cast<unsigned long long>(num_met), static_cast<unsigned long long>(num_lost));
  CHECK(num_met > 5);
}

}  // namespace
}  // namespace verbs_ends::verbs_memory_test
