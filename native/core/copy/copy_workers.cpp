#include "core/copy/copy_workers.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "core/in_room.h"
#include "core/mistake.h"
#include "core/system/signals_blocked.h"

namespace kvxfer {
namespace {

// How much of one copy is done before the next has its turn: a piece that the engine makes is less, so it
// ends in its first turn.
constexpr std::uint64_t kTurnCost = SlicedCopy::kSliceCost;

// Rounds of tasks follow each other closely, and waking a thread takes up to this long. So the threads
// stay awake for this long after a task, and the driving thread spins for this long before it sleeps
// until the others have ended.
constexpr std::chrono::microseconds kAwake{50};

}  // namespace

void CopyWorkers::Bell::on_ready(std::uint32_t) {
  std::uint64_t count;
  (void)!::read(fd.get(), &count, sizeof count);
}

CopyWorkers::CopyWorkers(Reactor& reactor, const Options& options)
    : reactor_(reactor), options_(options), most_queued_(2 * options.num_threads) {
  queue_.reserve(most_queued_ + num_threads());  // all threads may bring one back
  threads_.reserve(num_threads() - 1);
  bell_.fd = GuardedFd(UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)));
  // Without a descriptor the driving thread copies alone.
  if (bell_.fd && !reactor_.add(bell_.fd.get(), EPOLLIN, bell_).ok()) bell_.fd.reset();
}

CopyWorkers::~CopyWorkers() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  called_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  if (bell_.fd) reactor_.remove(bell_.fd.get());
}

// Starts fewer threads if the system gives no more.
void CopyWorkers::start() noexcept {
  started_ = true;
  if (!bell_.fd) return;
  const SignalsBlocked blocked;
  try {
    while (threads_.size() + 1 < num_threads()) {
      const std::size_t thread = threads_.size() + 1;
      threads_.emplace_back([this, thread] { run(thread); });
      ::pthread_setname_np(threads_.back().native_handle(),
                           ("kvxfer-copy-" + std::to_string(thread)).c_str());
    }
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {}
}

void CopyWorkers::add(SharedCopy& copy) {
  copy.begun_.reserve(num_threads());
  if (!started_) start();
  const std::lock_guard lock(mutex_);
  if (copy.left_.done()) {  // no bytes are left
    copy.landed_.store(true, std::memory_order_release);
    return;
  }
  enqueue(copy);
  call_one();
}

std::uint64_t CopyWorkers::copy_slice_here() noexcept {
  std::unique_lock lock(mutex_);
  return queue_.empty() ? 0 : copy_slice(lock, 0);
}

void CopyWorkers::stop(SharedCopy& copy) noexcept {
  const std::lock_guard lock(mutex_);
  if (copy.landed()) return;
  copy.stopped_ = true;
  dequeue(copy);
  land_if_over(copy);
}

void CopyWorkers::await(const SharedCopy& copy) noexcept {
  std::unique_lock lock(mutex_);
  landed_.wait(lock, [&] { return copy.landed(); });
}

void CopyWorkers::announce_next() noexcept {
  const std::lock_guard lock(mutex_);
  announces_ = true;
}

void CopyWorkers::run_all(std::span<Task* const> tasks) noexcept {
  if (!started_) start();
  std::unique_lock lock(mutex_);
  tasks_ = tasks;
  num_tasks_ = tasks.size();
  for (std::size_t others = 1; others < tasks.size(); ++others) call_one();
  while (!tasks_.empty()) run_task(lock);
  await_awake(lock, Clock::now() + kAwake, [this] { return num_running_ == 0; });
  landed_.wait(lock, [this] { return num_running_ == 0; });
}

void CopyWorkers::run_task(std::unique_lock<std::mutex>& lock) noexcept {
  Task& task = *tasks_.front();
  tasks_ = tasks_.subspan(1);
  --num_tasks_;
  ++num_running_;
  lock.unlock();
  task.run();
  lock.lock();
  if (--num_running_ == 0 && tasks_.empty()) landed_.notify_all();
}

template <class IsSo>
void CopyWorkers::await_awake(std::unique_lock<std::mutex>& lock, Clock::time_point until,
                              IsSo&& is_so) noexcept {
  if (is_so()) return;
  lock.unlock();
  while (!is_so() && Clock::now() < until) std::this_thread::yield();
  lock.lock();
}

void CopyWorkers::run(std::size_t thread) noexcept {
  std::unique_lock lock(mutex_);
  Clock::time_point awake_until{};
  while (!ends_) {
    if (!tasks_.empty()) {
      run_task(lock);
      awake_until = Clock::now() + kAwake;
      continue;
    }
    if (!queue_.empty()) {
      copy_slice(lock, thread);
      continue;
    }
    if (Clock::now() < awake_until) {
      await_awake(lock, awake_until, [this] { return num_tasks_ != 0 || has_slices(); });
      continue;
    }
    ++num_idle_;
    called_.wait(lock, [this] { return num_called_ != 0 || ends_; });
    --num_idle_;
    if (num_called_ != 0) --num_called_;
  }
}

std::uint64_t CopyWorkers::copy_slice(std::unique_lock<std::mutex>& lock, std::size_t thread) noexcept {
  SharedCopy& copy = *queue_.front();
  SlicedCopy slice = copy.begun_.empty() ? copy.left_.take(options_.taken_cost) : copy.begun_.back();
  if (!copy.begun_.empty()) copy.begun_.pop_back();
  ++copy.num_inside_;
  if (copy.left_.done() && copy.begun_.empty()) dequeue(copy);
  if (!queue_.empty()) call_one();
  lock.unlock();
  Status status(Code::kExhausted, {});
  std::uint64_t cost = 0;
  bool starved = false;
  try {
    const Result<std::uint64_t> copied = copy.advance(slice, thread);
    status = copied.status();
    if (copied.ok()) cost = copied.value();
  } catch (const std::bad_alloc&) {
    starved = true;
  } catch (const std::exception& mistake) {
    status = mistake_in_words(mistake);
  }
  lock.lock();
  --copy.num_inside_;
  if (!status.ok()) {
    if (copy.status_.ok()) copy.status_ = std::move(status);
    copy.starved_ = copy.starved_ || starved;
    copy.stopped_ = true;
    dequeue(copy);
  } else if (!copy.stopped_) {
    if (!slice.done()) add_in_room(copy.begun_, slice);
    copy.turn_cost_ += cost;
    const bool is_left = !copy.left_.done() || !copy.begun_.empty();
    if (copy.turn_cost_ >= kTurnCost) dequeue(copy);  // behind the others
    if (is_left && !copy.queued_) enqueue(copy);
  }
  land_if_over(copy);
  return std::max<std::uint64_t>(1, cost);
}

void CopyWorkers::call_one() noexcept {
  if (num_idle_ <= num_called_) return;
  ++num_called_;
  called_.notify_one();
}

void CopyWorkers::enqueue(SharedCopy& copy) noexcept {
  add_in_room(queue_, &copy);
  num_queued_.store(queue_.size(), std::memory_order_relaxed);
  copy.queued_ = true;
  copy.turn_cost_ = 0;
}

void CopyWorkers::dequeue(SharedCopy& copy) noexcept {
  if (!std::exchange(copy.queued_, false)) return;
  queue_.erase(std::find(queue_.begin(), queue_.end(), &copy));
  num_queued_.store(queue_.size(), std::memory_order_relaxed);
}

// The copy may be gone afterwards.
void CopyWorkers::land_if_over(SharedCopy& copy) noexcept {
  if (copy.queued_ || copy.num_inside_ != 0) return;
  copy.landed_.store(true, std::memory_order_release);
  landed_.notify_all();
  if (!std::exchange(announces_, false)) return;
  const std::uint64_t one = 1;
  (void)!::write(bell_.fd.get(), &one, sizeof one);
}

}  // namespace kvxfer
