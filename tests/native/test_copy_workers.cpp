// Threads that copy together: each slice once, a landing that waits for all threads inside, sleep and
// wake-ups.
#include "core/copy/copy_workers.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "block_programs.h"
#include "check.h"
#include "test_reactor.h"
#include "thread_gate.h"

namespace {

using namespace kvxfer;
using namespace kvxfer::testing;

constexpr std::uint64_t kBlockNbytes = 4096;

// One layer of whole blocks, as one piece.
std::shared_ptr<const Move> whole_move(std::byte* dst, std::uint32_t num_blocks,
                                       std::uint64_t block_nbytes = kBlockNbytes) {
  auto move = std::make_shared<Move>();
  move->program = std::make_shared<CopyProgram>(block_programs::pages_of(block_nbytes));
  move->grid = {0, 1, num_blocks, num_blocks};
  for (std::uint32_t i = 0; i < num_blocks; ++i) {
    move->src_ids.push_back(i);
    move->dst_ids.push_back(num_blocks - 1 - i);
  }
  move->local = unregistered(dst);
  return move;
}

// Copies, and counts how many threads are inside, and which were.
class Counted : public SharedCopy {
 public:
  Counted(std::shared_ptr<const Move> move, const std::byte* src)
      : SharedCopy(*move, 0), move_(std::move(move)), src_(src) {}

  std::atomic<int> num_inside{0}, num_slices{0};
  std::atomic<std::uint64_t> threads{0};  // one bit for each

 protected:
  Result<std::uint64_t> advance(SlicedCopy& slice, std::size_t thread) override {
    ++num_inside;
    ++num_slices;
    threads |= std::uint64_t{1} << thread;
    MappedSource source(src_);
    Result<std::uint64_t> cost = slice.advance(source);
    --num_inside;
    return cost;
  }

 private:
  const std::shared_ptr<const Move> move_;
  const std::byte* const src_;
};

// A copy of which every slice but the driver's waits in a gate before it is copied.
class Held final : public Counted {
 public:
  using Counted::Counted;
  ThreadGate gate;

 private:
  Result<std::uint64_t> advance(SlicedCopy& slice, std::size_t thread) override {
    if (thread != 0) gate.stand();
    return Counted::advance(slice, thread);
  }
};

struct Buffers {
  explicit Buffers(std::uint64_t nbytes, std::uint64_t salt = 0) : src(nbytes), dst(nbytes, std::byte{0xee}) {
    check::Random random(check::seed() + salt);
    random.fill(src.data(), src.size());
  }
  bool arrived(std::uint64_t block_nbytes = kBlockNbytes) const {
    const std::uint64_t num = src.size() / block_nbytes;
    for (std::uint64_t i = 0; i < num; ++i)
      if (std::memcmp(&src[i * block_nbytes], &dst[(num - 1 - i) * block_nbytes], block_nbytes) != 0)
        return false;
    return true;
  }
  std::vector<std::byte> src, dst;
};

template <class Done>
void copy_until(CopyWorkers& workers, Done&& done) {
  while (!done())
    if (workers.copy_slice_here() == 0) std::this_thread::yield();
}

TEST(every_block_of_many_copies_arrives_once) {
  TestReactor reactor;
  for (const std::size_t num_threads : {2u, 3u, 5u}) {
    CopyWorkers workers(reactor, {.num_threads = num_threads, .taken_cost = 3 * kBlockNbytes});
    check::Random random(check::seed() + num_threads);
    std::vector<Buffers> buffers;
    for (std::uint64_t i = 0; i < 40; ++i) buffers.emplace_back(kBlockNbytes * random.between(1, 60), i);
    std::vector<std::unique_ptr<Counted>> copies;
    for (Buffers& each : buffers) {
      copy_until(workers, [&] { return workers.has_room(); });
      const auto num_blocks = static_cast<std::uint32_t>(each.src.size() / kBlockNbytes);
      copies.push_back(std::make_unique<Counted>(whole_move(each.dst.data(), num_blocks), each.src.data()));
      workers.add(*copies.back());
    }
    copy_until(workers, [&] {
      return std::all_of(copies.begin(), copies.end(), [](const auto& copy) { return copy->landed(); });
    });
    for (std::size_t i = 0; i < copies.size(); ++i) {
      CHECK(copies[i]->status().ok());
      CHECK_EQ(copies[i]->num_inside.load(), 0);
      CHECK(buffers[i].arrived());
    }
    CHECK(!workers.has_slices());
  }
}

// A pair of several slices is copied by one thread, slice after slice.
TEST(a_pair_of_many_slices_arrives) {
  constexpr std::uint64_t kPairNbytes = 2 * SlicedCopy::kSliceCost + 4096;
  TestReactor reactor;
  CopyWorkers workers(reactor, {.num_threads = 3});
  Buffers buffers(3 * kPairNbytes);
  Counted copy(whole_move(buffers.dst.data(), 3, kPairNbytes), buffers.src.data());
  workers.add(copy);
  copy_until(workers, [&] { return copy.landed(); });
  CHECK(buffers.arrived(kPairNbytes));
  CHECK(copy.num_slices >= 9);
}

// ---- tasks ------------------------------------------------------------------------------------

TEST(tasks_are_done_at_the_same_time) {
  // No task ends before all have begun.
  struct Meeting final : Task {
    explicit Meeting(std::barrier<>& at) : all(at) {}
    void run() noexcept override {
      all.arrive_and_wait();
      ++num_done;
    }
    std::barrier<>& all;
    int num_done = 0;
  };
  constexpr int kNum = 3, kNumRounds = 200;
  TestReactor reactor;
  CopyWorkers workers(reactor, {.num_threads = kNum});
  std::barrier<> all(kNum);
  Meeting first(all), second(all), third(all);
  Task* const tasks[] = {&first, &second, &third};
  for (int round = 0; round < kNumRounds; ++round) workers.run_all(tasks);
  for (const Meeting* each : {&first, &second, &third}) CHECK_EQ(each->num_done, kNumRounds);
}

TEST(tasks_and_copies_do_not_wait_for_each_other) {
  struct Counting final : Task {
    void run() noexcept override { ++num_done; }
    int num_done = 0;
  };
  TestReactor reactor;
  CopyWorkers workers(reactor, {.num_threads = 2});
  Buffers buffers(64 * kBlockNbytes);
  Held copy(whole_move(buffers.dst.data(), 64), buffers.src.data());
  workers.add(copy);
  copy.gate.await_standing(1);  // the other thread is held, so this one does all tasks alone
  std::vector<Counting> counting(20);
  std::vector<Task*> tasks;
  for (Counting& each : counting) tasks.push_back(&each);
  workers.run_all(tasks);
  workers.run_all({});
  copy.gate.let_on(1000);
  copy_until(workers, [&] { return copy.landed(); });
  workers.run_all(tasks);
  for (const Counting& each : counting) CHECK_EQ(each.num_done, 2);
  CHECK(buffers.arrived());
}

// A long copy yields after each turn, so no other copy waits for its end.
TEST(a_long_copy_lets_others_have_their_turns) {
  TestReactor reactor;
  CopyWorkers workers(reactor, {.num_threads = 2});
  Buffers large(16 * SlicedCopy::kSliceCost), small(kBlockNbytes);
  Held first(whole_move(large.dst.data(), static_cast<std::uint32_t>(large.src.size() / kBlockNbytes)),
             large.src.data());
  Held second(whole_move(small.dst.data(), 1), small.src.data());
  workers.add(first);
  first.gate.await_standing(1);  // the other thread is held, so this one copies everything else alone
  workers.add(second);
  std::uint64_t cost = 0;
  while (!second.landed()) {
    const std::uint64_t copied = workers.copy_slice_here();
    REQUIRE(copied != 0);
    cost += copied;
  }
  CHECK(cost <= SlicedCopy::kSliceCost + 1024 * 1024);
  first.gate.let_on(1000);
  copy_until(workers, [&] { return first.landed(); });
  CHECK(large.arrived());
}

TEST(a_stopped_copy_lands_when_the_last_thread_has_left_it) {
  TestReactor reactor;
  CopyWorkers workers(reactor, {.num_threads = 3, .taken_cost = 1});
  Buffers buffers(kBlockNbytes * 100);
  Held copy(whole_move(buffers.dst.data(), 100), buffers.src.data());
  workers.add(copy);
  copy.gate.await_standing(2);
  workers.stop(copy);
  CHECK(!workers.has_slices());
  CHECK_EQ(workers.copy_slice_here(), 0u);
  CHECK(!copy.landed());
  copy.gate.let_on();
  copy.gate.await_standing(1);
  CHECK(!copy.landed());
  workers.announce_next();
  copy.gate.let_on();
  workers.await(copy);
  CHECK(copy.landed());
  CHECK_EQ(copy.num_inside.load(), 0);
  CHECK_EQ(copy.num_slices.load(), 2);
  // From here on its memory may serve others.
  const std::vector<std::byte> at_landing = buffers.dst;
  while (reactor.run_once(0) == 0) {}
  CHECK(buffers.dst == at_landing);
}

TEST(a_stopped_copy_that_no_thread_is_inside_lands_at_once) {
  TestReactor reactor;
  CopyWorkers workers(reactor, {.num_threads = 2});
  Buffers first_buffers(kBlockNbytes), buffers(kBlockNbytes * 8);
  Held first(whole_move(first_buffers.dst.data(), 1), first_buffers.src.data());
  Held copy(whole_move(buffers.dst.data(), 8), buffers.src.data());
  workers.add(first);
  first.gate.await_standing(1);
  workers.add(copy);
  workers.stop(copy);
  CHECK(copy.landed());
  CHECK_EQ(copy.num_slices.load(), 0);
  CHECK(
      std::all_of(buffers.dst.begin(), buffers.dst.end(), [](std::byte b) { return b == std::byte{0xee}; }));
  CHECK(!first.landed());
  first.gate.let_on();
  workers.await(first);
  workers.stop(first);  // has no effect any more
  CHECK(first_buffers.arrived());
}

TEST(a_landing_wakes_who_sleeps_on_the_reactor_and_only_when_asked) {
  TestReactor reactor;
  CopyWorkers workers(reactor, {.num_threads = 2});
  Buffers buffers(kBlockNbytes);
  for (const bool asks : {true, false, true}) {
    Held copy(whole_move(buffers.dst.data(), 1), buffers.src.data());
    workers.add(copy);
    copy.gate.await_standing(1);
    if (asks) workers.announce_next();
    CHECK_EQ(reactor.run_once(0), 0);
    copy.gate.let_on();
    if (asks) {
      while (reactor.run_once(100) == 0) {}
      CHECK(copy.landed());
    } else {
      workers.await(copy);
    }
    CHECK_EQ(reactor.run_once(0), 0);
  }
}

class Failing final : public SharedCopy {
 public:
  Failing(std::shared_ptr<const Move> move, bool starves)
      : SharedCopy(*move, 0), move_(std::move(move)), starves_(starves) {}

 private:
  Result<std::uint64_t> advance(SlicedCopy&, std::size_t) override {
    if (starves_) throw std::bad_alloc();
    return Status(Code::kSystem, "it is torn");
  }
  const std::shared_ptr<const Move> move_;
  const bool starves_;
};

TEST(a_copy_that_fails_lands_with_its_words_and_takes_no_more_slices) {
  TestReactor reactor;
  CopyWorkers workers(reactor, {.num_threads = 2, .taken_cost = 1});
  Buffers buffers(kBlockNbytes * 50);
  for (const bool starves : {false, true}) {
    Failing copy(whole_move(buffers.dst.data(), 50), starves);
    workers.add(copy);
    copy_until(workers, [&] { return copy.landed(); });
    CHECK_EQ(copy.starved(), starves);
    CHECK_EQ(copy.status().code(), starves ? Code::kExhausted : Code::kSystem);
    if (!starves) CHECK_EQ(copy.status().message(), "it is torn");
    CHECK(!workers.has_slices());
  }
}

// The kernel's names of this process's threads.
std::vector<std::string> thread_names() {
  std::vector<std::string> names;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(task.path() / "comm") >> name;
    names.push_back(name);
  }
  return names;
}

TEST(threads_start_with_the_first_copy_and_end_with_their_owner) {
  TestReactor reactor;
  const auto count = [] {
    const std::vector<std::string> names = thread_names();
    return std::count_if(names.begin(), names.end(),
                         [](const std::string& name) { return name.starts_with("kvxfer-copy-"); });
  };
  {
    CopyWorkers workers(reactor, {.num_threads = 4});
    CHECK_EQ(count(), 0);
    Buffers buffers(kBlockNbytes);
    Counted copy(whole_move(buffers.dst.data(), 1), buffers.src.data());
    workers.add(copy);
    copy_until(workers, [&] { return copy.landed(); });
    CHECK_EQ(count(), 3);
    CHECK_EQ(reactor.num_handlers(), 1u);
  }
  CHECK_EQ(count(), 0);
  CHECK_EQ(reactor.num_handlers(), 0u);
}

// Which signals to the process its threads would accept.
class Masked final : public Counted {
 public:
  using Counted::Counted;
  std::atomic<bool> takes_term{true}, takes_bus{false};

 private:
  Result<std::uint64_t> advance(SlicedCopy& slice, std::size_t thread) override {
    if (thread != 0) {
      sigset_t mask;
      ::pthread_sigmask(SIG_BLOCK, nullptr, &mask);
      takes_term = ::sigismember(&mask, SIGTERM) == 0;
      takes_bus = ::sigismember(&mask, SIGBUS) == 0;
    }
    return Counted::advance(slice, thread);
  }
};

TEST(threads_take_no_signal_that_is_meant_for_the_process) {
  TestReactor reactor;
  CopyWorkers workers(reactor, {.num_threads = 2});
  Buffers buffers(kBlockNbytes);
  Masked copy(whole_move(buffers.dst.data(), 1), buffers.src.data());
  workers.add(copy);
  workers.await(copy);
  CHECK_EQ(copy.threads.load(), 2u);
  CHECK(!copy.takes_term);
  CHECK(copy.takes_bus);
  sigset_t mask;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  CHECK(::sigismember(&mask, SIGTERM) == 0);  // the thread that made them still accepts its signals
}

}  // namespace
