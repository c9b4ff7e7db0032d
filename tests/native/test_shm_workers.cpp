// An shm rail whose pieces several threads copy: the suite of every transport, and works that end while
// threads copy them.
#include <sys/syscall.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "agent_pair.h"
#include "check.h"
#include "conformance.h"
#include "hand_over.h"
#include "held_memory.h"
#include "shm_ends.h"

namespace {

using namespace kvxfer;
using namespace kvxfer::testing;

// ---- what every transport promises --------------------------------------------------------------

// Shares every piece, a few pairs at a time.
std::unique_ptr<ShmTransport> shared_in_small_slices(Reactor& reactor, const FenceTable& fences) {
  CopyWorkers::Options options;
  options.num_threads = 3;
  options.taken_cost = 16 * 1024;
  options.least_backlog_cost = options.least_work_cost = 1;
  return std::make_unique<ShmTransport>(reactor, fences, std::make_shared<CopyWorkers>(reactor, options));
}

conformance::Subject pool() {
  return {"shm pool, shared", shared_in_small_slices, conformance::unix_sockets, true, {}};
}
conformance::Subject foreign() {
  return {"shm foreign, shared", shared_in_small_slices, conformance::unix_sockets, false, {}};
}
conformance::Subject faulty_pool() {
  return conformance::with_faults(pool(), "again=0.3,delay=0.3,reorder=0.5,fail=0.05");
}

CONFORMANCE(pool)
CONFORMANCE(foreign)
CONFORMANCE_PROMISE(faulty_pool, post_accepts_a_prefix_and_the_rest_later)
CONFORMANCE_PROMISE(faulty_pool, a_cancel_is_complete_with_its_completion)
CONFORMANCE_PROMISE(faulty_pool, a_disconnect_is_complete_with_its_completions)
CONFORMANCE_PROMISE(faulty_pool, the_end_of_the_peer_ends_every_work)

// ---- works that end while threads are in the middle of them ----------------------------------------

constexpr int kNumWorkers = 2;  // beside the driving thread
constexpr std::uint32_t kNumPairs = 2048;  // 8 MiB: the driving thread copies one slice, and leaves the rest

std::unique_ptr<ShmTransport> shared(Reactor& reactor, const FenceTable& fences) {
  return std::make_unique<ShmTransport>(
      reactor, fences,
      std::make_shared<CopyWorkers>(reactor, CopyWorkers::Options{.num_threads = kNumWorkers + 1}));
}

// Of all blocks of a source, again and again, as one piece.
std::shared_ptr<const Move> large_move(RegionId region, std::byte* to) {
  std::vector<std::uint32_t> src(kNumPairs), dst(kNumPairs);
  for (std::uint32_t i = 0; i < kNumPairs; ++i) {
    src[i] = i % shm_ends::kNumBlocks;
    dst[i] = i;
  }
  return block_move(region, to, shm_ends::kBlockNbytes, src, dst, kNumPairs);
}

bool is_whole(const HeldMemory& to) {
  for (std::uint32_t i = 0; i < kNumPairs; ++i)
    if (!shm_ends::holds_block(to.data(), i, i % shm_ends::kNumBlocks)) return false;
  return true;
}

// Work 1, in the middle of which all threads but the driving one are held.
struct Begun {
  Begun() {
    shm_ends::fill_pattern(pool->data(), shm_ends::kRegionNbytes);
    const RemoteRegion remote =
        shm_ends::register_at(*source, shm_ends::pool_region(7, pool->data(), shm_ends::kRegionNbytes));
    peer = connect_ends(destination, *source).first;
    REQUIRE_OK(destination.transport->attach(peer, remote));
    while (destination.transport->busy()) destination.step();
    begin(destination, peer, 7, to);
  }
  ~Begun() { to.let_on(); }
  static void begin(shm_ends::Shm& destination, PeerId peer, RegionId region, HeldMemory& to) {
    const Work work = fetch_work(1, large_move(region, to.data()), 0);
    REQUIRE_EQ(destination.transport->post(peer, work), Code::kOk);
    destination.step();
    to.await_held(kNumWorkers);
  }
  // The work is not reported while threads are in the middle of it.
  void check_held() {
    for (int i = 0; i < 100; ++i) destination.step();
    CHECK(destination.completion_of(1) == nullptr);
    CHECK_EQ(to.num_held(), std::size_t{kNumWorkers});
  }
  // After its end no thread touches its memory.
  void check_ends(Code code) {
    to.let_on();
    CHECK_EQ(destination.await(1).code, code);
    const std::vector<std::byte> at_end(to.data(), to.data() + to.nbytes());
    for (int i = 0; i < 100; ++i) destination.step();
    CHECK(std::memcmp(at_end.data(), to.data(), to.nbytes()) == 0);
    CHECK(!is_whole(to));
    CHECK(!destination.transport->wants_poll());
  }

  std::unique_ptr<shm_ends::Shm> source = std::make_unique<shm_ends::Shm>();
  std::shared_ptr<PoolMemory> pool = shm_ends::make_pool();
  HeldMemory to{kNumPairs * shm_ends::kBlockNbytes};  // outlives the threads that write to it
  shm_ends::Shm destination{shared};
  PeerId peer = 0;
};

// Lets the threads on when a test ends, so that no destructor waits for a held thread.
struct LetOn {
  HeldMemory& memory;
  ~LetOn() { memory.let_on(); }
};

using hand_over::skips;

TEST(what_several_threads_copy_is_whole_when_it_is_told) {
  if (skips()) return;
  Begun begun;
  begun.check_held();
  begun.to.let_on();
  CHECK_EQ(begun.destination.await(1).code, Code::kOk);
  CHECK(is_whole(begun.to));
}

TEST(a_work_that_ends_completes_when_the_last_thread_has_left) {
  if (skips()) return;
  const struct {
    const char* what;
    Code code;
    void (*end)(Begun&);
  } ways[] = {
      {"cancel", Code::kCancelled,
       [](Begun& begun) {
         begun.destination.cancel(1);
         begun.destination.cancel(1);
       }},
      {"disconnect", Code::kCancelled,
       [](Begun& begun) {
         begun.destination.transport->disconnect(begun.peer);
         // Only the threads still hold the mapping that they read.
         CHECK_EQ(begun.destination.transport->num_mappings(), 0u);
       }},
      {"the peer ends", Code::kRailFailed,
       [](Begun& begun) {
         begun.source.reset();
         begun.destination.await(CompletionKind::kRailDown);  // at once
         begun.check_held();
         begun.destination.transport->disconnect(begun.peer);
       }},
  };
  for (const auto& way : ways) {
    std::printf("  %s\n", way.what);
    Begun begun;
    way.end(begun);
    begun.check_held();
    begun.check_ends(way.code);
  }
}

TEST(a_pool_that_is_taken_back_is_read_on_by_the_threads_that_read_it) {
  if (skips()) return;
  Begun begun;
  begun.source->transport->deregister_memory(7);
  REQUIRE(begun.destination.reactor.run_until(
      [&] { begun.destination.step(); }, [&] { return begun.destination.transport->num_mappings() == 0; }));
  begun.destination.transport->detach(begun.peer, 7);
  begun.check_held();
  begun.to.let_on();
  CHECK_EQ(begun.destination.await(1).code, Code::kOk);
  CHECK(is_whole(begun.to));
}

TEST(a_rail_that_ends_waits_for_the_threads_in_its_works) {
  if (skips()) return;
  Begun begun;
  std::atomic<bool> ended{false};
  std::thread ending([&] {
    begun.destination.transport.reset();
    ended = true;
  });
  for (int i = 0; i < 100; ++i) std::this_thread::yield();
  CHECK(!ended);
  CHECK_EQ(begun.to.num_held(), std::size_t{kNumWorkers});
  begun.to.let_on();
  ending.join();
  CHECK(ended);
}

TEST(others_are_served_while_threads_stand_in_a_work) {
  if (skips()) return;
  Begun begun;
  std::vector<std::byte> page(shm_ends::kBlockNbytes);
  const Work small = fetch_work(2, block_move(7, page.data(), shm_ends::kBlockNbytes, {5}, {0}, 1), 0);
  REQUIRE_EQ(begun.destination.transport->post(begun.peer, small), Code::kOk);
  CHECK_EQ(begun.destination.await(2).code, Code::kOk);
  CHECK(shm_ends::holds_block(page.data(), 0, 5));
  begun.check_held();
}

TEST(a_process_that_is_killed_fails_what_threads_read_of_it) {
  if (skips()) return;
  HeldMemory to(kNumPairs * shm_ends::kBlockNbytes);
  shm_ends::ChildSource child(shared);
  const LetOn later{to};
  Begun::begin(child.destination, child.peer, 2, to);
  ::kill(child.pid, SIGKILL);
  siginfo_t info;
  REQUIRE(::waitid(P_PID, static_cast<id_t>(child.pid), &info, WEXITED | WNOWAIT) == 0);
  to.let_on();
  Completion out[4];  // without the reactor: the socket's end has not been noticed
  std::size_t count = 0;
  while (count == 0) count = child.destination.transport->poll(out);
  REQUIRE_EQ(count, 1u);
  CHECK_EQ(out[0].work, 1u);
  CHECK_EQ(out[0].code, Code::kRailFailed);
  CHECK_HAS(out[0].detail, "gone");
  child.destination.await(CompletionKind::kRailDown);
}

TEST(pages_of_a_killed_process_s_pool_stay_readable) {
  if (skips()) return;
  HeldMemory to(kNumPairs * shm_ends::kBlockNbytes);
  shm_ends::ChildSource child(shared);
  const LetOn later{to};
  Begun::begin(child.destination, child.peer, 1, to);
  ::kill(child.pid, SIGKILL);
  child.destination.await(CompletionKind::kRailDown);
  CHECK(child.destination.completion_of(1) == nullptr);
  to.let_on();
  CHECK_EQ(child.destination.await(1).code, Code::kRailFailed);
}

// ---- agents -----------------------------------------------------------------------------------------

using namespace agent_pair;
using hand_over::HandOver;

TEST(an_agent_hands_over_what_its_threads_copied) { hand_over::what_was_held_arrives("shm"); }

TEST(what_ends_a_right_waits_for_the_threads_in_a_piece) {
  hand_over::what_ends_a_right_waits_for_the_thread_in_a_piece("shm", true);
}

// Whether all progress threads of this process sleep on their reactors.
bool agents_sleep() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name, call;
    std::ifstream(task.path() / "comm") >> name;
    std::ifstream(task.path() / "syscall") >> call;
    if (name == "kvxfer" && call != std::to_string(SYS_ppoll)) return false;
  }
  return true;
}

TEST(an_agent_that_sleeps_is_woken_by_the_last_thread) {
  if (skips()) return;
  const auto over = HandOver::in_a_piece("shm");
  // The held thread waits at the first page of a slice; all other pages are copied by then.
  constexpr std::size_t kNumPages = HandOver::kNumBlocks * HandOver::kPageNbytes / 4096;
  constexpr std::size_t kSlicePages = CopyWorkers::Options().taken_cost / 4096;
  REQUIRE(await([&] { return over->to.num_given() >= kNumPages - kSlicePages; }));
  int looks = 0;
  REQUIRE(await([&] { return (looks = agents_sleep() ? looks + 1 : 0) >= 50; }));
  over->to.let_on();
  CHECK(is_done(over->handle));
}

}  // namespace
