// The threads of one agent that copy beside whoever drives it. What is copied is cut into slices, which the threads
// take one after the other: of one copy, and of several.
//
// A copy lands once, when nothing of it is left or it was stopped, and no thread is in the middle of a slice of it.
// Whoever drives made it, finds that it has landed, and only then lets go of what it reads and writes: a landing is
// the fence of its work. Threads sleep while no slice is left.
//
// The threads also run errands: several short tasks that may run at the same time. The driving thread runs
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

  // No thread touches it, or the memory of its work, any more; their stores are seen by whoever was told so.
  bool landed() const noexcept { return landed_.load(std::memory_order_acquire); }
  // Of one that has landed: what went wrong first; and whether there was no memory for it.
  const Status& status() const noexcept { return status_; }
  bool starved() const noexcept { return starved_; }

 protected:
  // Copies on for a slice, fenced at its end, and returns its cost. Beside other threads, in other slices of it:
  // `thread` is a number below CopyWorkers::num_threads() that is this thread's alone meanwhile.
  virtual Result<std::uint64_t> advance(SlicedCopy& slice, std::size_t thread) = 0;

 private:
  friend class CopyWorkers;

  // Under the workers' lock, until it has landed.
  SlicedCopy left_;  // that no thread has taken
  std::vector<SlicedCopy> begun_;  // of one pair each that is more than a slice; has room for all threads'
  std::size_t num_inside_ = 0;  // threads that copy a slice of it
  std::uint64_t turn_cost_ = 0;  // since it stands at the queue's front
  bool queued_ = false;
  bool stopped_ = false;
  bool starved_ = false;
  Status status_;
  std::atomic<bool> landed_{false};
};

// A short task. One thread runs it, while other threads run others.
class Errand {
 public:
  virtual void run() noexcept = 0;

 protected:
  ~Errand() = default;
};

class CopyWorkers {
 public:
  // Costs are SlicedCopy's.
  struct Options {
    // With whoever drives, so 2 and more. Those that are its own start with the first copy.
    std::size_t num_threads = 2;
    // What a thread takes of a copy at a time: some 20 us. Handing it over costs a hundredth of that, and the end of
    // a transfer waits for no more.
    std::uint64_t taken_cost = 256 * 1024;
    // What a peer must have waiting for its works to be shared: to wake a thread that sleeps costs as much as
    // copying half of it. And the least of a single work.
    std::uint64_t least_backlog_cost = 512 * 1024, least_work_cost = 64 * 1024;
  };

  CopyWorkers(Reactor& reactor, const Options& options);
  // Nothing that was added is left. Waits for the threads' end.
  ~CopyWorkers();
  CopyWorkers(const CopyWorkers&) = delete;
  CopyWorkers& operator=(const CopyWorkers&) = delete;

  std::size_t num_threads() const noexcept { return options_.num_threads; }
  // Is a work worth sharing of which a peer has posted so many that wait, each about alike?
  bool is_worth(std::uint64_t work_cost, std::size_t num_works) const noexcept {
    return work_cost >= options_.least_work_cost && work_cost >= options_.least_backlog_cost / num_works;
  }

  // What follows is called by whoever drives, so by one thread at a time.

  // Fewer copies wait for threads than keep them all busy while whoever drives looks at other things.
  bool has_room() const noexcept { return num_queued_.load(std::memory_order_relaxed) < most_queued_; }
  // Where there is room: has it copied. It must stay until it has landed.
  void add(SharedCopy& copy);
  // Slices wait to be taken.
  bool has_slices() const noexcept { return num_queued_.load(std::memory_order_relaxed) != 0; }
  // Copies a slice on this thread, as number 0. Returns its cost; 0 where none was left.
  std::uint64_t help() noexcept;
  // No slice of it begins any more. It lands when the last thread has left it, which may be at once.
  void stop(SharedCopy& copy) noexcept;
  // Sleeps until it has landed: of one that was stopped.
  void await(const SharedCopy& copy) noexcept;
  // Runs all errands, on this thread and on threads that are free. Returns when the last one has ended.
  void run_all(std::span<Errand* const> errands) noexcept;
  // The next landing makes a descriptor readable that the reactor watches. One that was before is not announced.
  void announce_next() noexcept;

 private:
  struct Bell final : Reactor::Handler {
    GuardedFd fd;
    void on_ready(std::uint32_t events) override;
  };

  using Clock = std::chrono::steady_clock;

  void start() noexcept;
  void run(std::size_t thread) noexcept;
  void run_errand(std::unique_lock<std::mutex>& lock) noexcept;
  // Spins, without the lock, until is_so() or the time is over.
  template <class IsSo>
  void await_awake(std::unique_lock<std::mutex>& lock, Clock::time_point until, IsSo&& is_so) noexcept;
  // Copies a slice of the first in the queue, without the lock meanwhile.
  std::uint64_t copy_slice(std::unique_lock<std::mutex>& lock, std::size_t thread) noexcept;
  void call_one() noexcept;  // who sleeps
  void enqueue(SharedCopy& copy) noexcept;
  void dequeue(SharedCopy& copy) noexcept;
  void land_if_over(SharedCopy& copy) noexcept;

  Reactor& reactor_;
  const Options options_;
  const std::size_t most_queued_;
  Bell bell_;
  std::mutex mutex_;
  std::condition_variable called_, landed_;
  std::vector<SharedCopy*>
      queue_;  // with slices left; has room for most_queued_, and for those that come back
  std::atomic<std::size_t> num_queued_{0};
  std::span<Errand* const> errands_;  // not begun yet
  std::atomic<std::size_t> num_errands_{0}, num_running_{0};  // not begun yet; begun and not ended
  std::size_t num_idle_ = 0, num_called_ = 0;  // threads that sleep, and those of them that were woken
  bool announces_ = false, ends_ = false;
  bool started_ = false;  // whoever drives alone asks
  std::vector<std::thread> threads_;
};

}  // namespace kvxfer
