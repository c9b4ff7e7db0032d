// The threads of one agent that copy beside the driving thread. Each copy is cut into slices, which the
// threads take one after the other; they may work on one copy or on several.
//
// A copy lands once: when none of it is left or it was stopped, and no thread is in the middle of a slice of
// it. The driving thread made the copy, finds that it has landed, and only then lets go of what the copy
// reads and writes: the landing is the fence of its work. Threads sleep while no slice is left.
//
// The threads also run tasks, several short ones that may run at the same time. The driving thread runs
// some of them and waits until all have ended.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "core/copy/sliced_copy.h"
#include "core/system/fork_guard.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// A piece that several threads copy.
class SharedCopy {
 public:
  // The move must outlive it.
  SharedCopy(const Move& move, std::uint32_t piece) noexcept : left_(move, piece) {}
  SharedCopy(const SharedCopy&) = delete;
  SharedCopy& operator=(const SharedCopy&) = delete;
  virtual ~SharedCopy() = default;

  // True once no thread touches the copy, or the memory of its work, any more. The caller then sees their
  // stores.
  bool landed() const noexcept { return landed_.load(std::memory_order_acquire); }
  // Once it has landed: the first error; and whether memory was lacking for it.
  const Status& status() const noexcept { return status_; }
  bool starved() const noexcept { return starved_; }

 protected:
  // Copies one more slice, fenced at its end, and returns its cost. Other threads may run other slices of
  // the same copy meanwhile. `thread` is a number below CopyWorkers::num_threads() that no other thread
  // uses at that time.
  virtual Result<std::uint64_t> advance(SlicedCopy& slice, std::size_t thread) = 0;

 private:
  friend class CopyWorkers;

  // Guarded by the workers' lock until it has landed.
  SlicedCopy left_;  // that no thread has taken yet
  // Each of one pair that is more than a slice; has room for those of all threads.
  std::vector<SlicedCopy> begun_;
  std::size_t num_inside_ = 0;  // threads that copy a slice of it
  std::uint64_t turn_cost_ = 0;  // since it came to the queue's front
  bool queued_ = false;
  bool stopped_ = false;
  bool starved_ = false;
  Status status_;
  std::atomic<bool> landed_{false};
};

// A short task. One thread runs it, while other threads run others.
class Task {
 public:
  virtual void run() noexcept = 0;

 protected:
  ~Task() = default;
};

class CopyWorkers {
 public:
  // Costs are counted as in SlicedCopy.
  struct Options {
    // Includes the driving thread, so 2 and more. The other threads start with the first copy.
    std::size_t num_threads = 2;
    // What a thread takes of a copy at a time: some 20 us. Handing it over costs a hundredth of that,
    // and the end of a transfer waits for no more than that.
    std::uint64_t taken_cost = 256 * 1024;
    // The least backlog of a peer for which its works are shared: waking a sleeping thread costs as much
    // as copying half of it. And the least cost of a single shared work.
    std::uint64_t least_backlog_cost = 512 * 1024, least_work_cost = 64 * 1024;
  };

  CopyWorkers(Reactor& reactor, const Options& options);
  // No added copy may be left. Waits for the threads' end.
  ~CopyWorkers();
  CopyWorkers(const CopyWorkers&) = delete;
  CopyWorkers& operator=(const CopyWorkers&) = delete;

  std::size_t num_threads() const noexcept { return options_.num_threads; }
  // Is a work worth sharing, if its peer has `num_works` posted that wait and cost about the same?
  bool is_worth(std::uint64_t work_cost, std::size_t num_works) const noexcept {
    return work_cost >= options_.least_work_cost && work_cost >= options_.least_backlog_cost / num_works;
  }

  // The calls below come from the driving thread, so from one thread at a time.

  // True if fewer copies wait than keep all threads busy while the driving thread does other things.
  bool has_room() const noexcept { return num_queued_.load(std::memory_order_relaxed) < most_queued_; }
  // Call it only if has_room(). Has the threads copy it. The copy must stay until it has landed.
  void add(SharedCopy& copy);
  // True if slices wait to be taken.
  bool has_slices() const noexcept { return num_queued_.load(std::memory_order_relaxed) != 0; }
  // Copies a slice on this thread, as number 0. Returns its cost; 0 if no slice was left.
  std::uint64_t copy_slice_here() noexcept;
  // Begins no more slices of it. It lands when the last thread has left it, perhaps at once.
  void stop(SharedCopy& copy) noexcept;
  // Sleeps until a stopped copy has landed.
  void await(const SharedCopy& copy) noexcept;
  // Runs all tasks, on this thread and on threads that are free. Returns when the last one has ended.
  void run_all(std::span<Task* const> tasks) noexcept;
  // From now on the next landing makes a descriptor readable that the reactor watches. Earlier landings
  // are not announced.
  void announce_next() noexcept;

 private:
  struct Bell final : Reactor::Handler {
    GuardedFd fd;
    void on_ready(std::uint32_t events) override;
  };

  using Clock = std::chrono::steady_clock;

  void start() noexcept;
  void run(std::size_t thread) noexcept;
  void run_task(std::unique_lock<std::mutex>& lock) noexcept;
  // Spins, without the lock, until is_so() or the time is up.
  template <class IsSo>
  void await_awake(std::unique_lock<std::mutex>& lock, Clock::time_point until, IsSo&& is_so) noexcept;
  // Copies a slice of the first copy in the queue; releases the lock meanwhile.
  std::uint64_t copy_slice(std::unique_lock<std::mutex>& lock, std::size_t thread) noexcept;
  void call_one() noexcept;  // wakes a sleeping thread
  void enqueue(SharedCopy& copy) noexcept;
  void dequeue(SharedCopy& copy) noexcept;
  void land_if_over(SharedCopy& copy) noexcept;

  Reactor& reactor_;
  const Options options_;
  const std::size_t most_queued_;
  Bell bell_;
  std::mutex mutex_;
  std::condition_variable called_, landed_;
  // Copies with slices left; has room for most_queued_, and for those that come back.
  std::vector<SharedCopy*> queue_;
  std::atomic<std::size_t> num_queued_{0};
  std::span<Task* const> tasks_;  // not begun yet
  std::atomic<std::size_t> num_tasks_{0}, num_running_{0};  // not begun yet; begun and not ended
  std::size_t num_idle_ = 0, num_called_ = 0;  // sleeping threads, and how many of them were woken
  bool announces_ = false, ends_ = false;
  bool started_ = false;  // used by the driving thread alone
  std::vector<std::thread> threads_;
};

}  // namespace kvxfer
