#include "transports/common/connector.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>

#include "core/in_room.h"
#include "core/mistake.h"
#include "core/system/signals_blocked.h"

namespace kvxfer {

Result<std::unique_ptr<Connector>> Connector::create() {
  UniqueFd bell(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!bell) return Status::from_errno("eventfd", errno);
  return std::unique_ptr<Connector>(new Connector(GuardedFd(std::move(bell))));
}

Connector::~Connector() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
    for (const auto& each : running_) each->is_abandoned = true;
  }
  called_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

Status Connector::begin(std::unique_ptr<SetUp>& set_up) {
  const std::lock_guard lock(mutex_);
  running_.reserve(kMostThreads);
  ended_.reserve(ended_.size() + running_.size() + waiting_.size() + 1);
  waiting_.push_back(std::move(set_up));
  if (waiting_.size() + running_.size() > threads_.size() && threads_.size() < kMostThreads) try {
      const SignalsBlocked blocked;
      threads_.reserve(kMostThreads);
      threads_.emplace_back([this] { run(); });
      ::pthread_setname_np(threads_.back().native_handle(), "kvxfer-connect");
    } catch (const std::exception&) {  // there is no memory, or no thread: those that there are do it
      if (threads_.empty()) {
        set_up = std::move(waiting_.back());
        waiting_.pop_back();
        return {Code::kExhausted, "the system could not start a thread to set up the connection"};
      }
    }
  called_.notify_one();
  return {};
}

void Connector::abandon(PeerId peer) noexcept {
  std::unique_ptr<SetUp> gone;  // ends without the lock
  const std::lock_guard lock(mutex_);
  const auto is_its = [peer](const std::unique_ptr<SetUp>& each) { return each->peer == peer; };
  if (const auto found = std::find_if(waiting_.begin(), waiting_.end(), is_its); found != waiting_.end()) {
    gone = std::move(*found);
    waiting_.erase(found);
  } else if (const auto run = std::find_if(running_.begin(), running_.end(), is_its); run != running_.end()) {
    (*run)->is_abandoned = true;
  }
}

void Connector::await(PeerId peer) noexcept {
  std::unique_lock lock(mutex_);
  const auto is_its = [peer](const std::unique_ptr<SetUp>& each) { return each->peer == peer; };
  ended_one_.wait(lock, [&] {
    return std::none_of(waiting_.begin(), waiting_.end(), is_its) &&
           std::none_of(running_.begin(), running_.end(), is_its);
  });
}

void Connector::acknowledge() noexcept {
  std::uint64_t count;
  (void)!::read(bell_.get(), &count, sizeof count);
}

std::unique_ptr<Connector::SetUp> Connector::take_ended() noexcept {
  const std::lock_guard lock(mutex_);
  if (ended_.empty()) return nullptr;
  std::unique_ptr<SetUp> first = std::move(ended_.front());
  ended_.erase(ended_.begin());
  return first;
}

void Connector::run() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    SetUp* next = nullptr;
    called_.wait(lock, [&] { return ends_ || (next = take_waiting()) != nullptr; });
    if (next == nullptr) return;
    lock.unlock();
    run(*next);
    lock.lock();
    end(*next);
  }
}

void Connector::run(SetUp& set_up) noexcept {
  try {
    set_up.status = set_up.run();
  } catch (const std::bad_alloc&) {
    set_up.status = Status(Code::kExhausted, {});
  } catch (const std::exception& mistake) {
    set_up.status = mistake_in_words(mistake);
  }
  if (set_up.is_abandoned) set_up.on_abandoned();
}

Connector::SetUp* Connector::take_waiting() noexcept {
  const auto has_thread = [this](const std::string& name) {
    return std::any_of(running_.begin(), running_.end(),
                       [&](const std::unique_ptr<SetUp>& each) { return each->name == name; });
  };
  for (auto next = waiting_.begin(); next != waiting_.end(); ++next) {
    if (has_thread((*next)->name)) continue;
    add_in_room(running_, std::move(*next));
    waiting_.erase(next);
    return running_.back().get();
  }
  return nullptr;
}

void Connector::end(SetUp& set_up) noexcept {
  const auto found = std::find_if(running_.begin(), running_.end(),
                                  [&](const std::unique_ptr<SetUp>& each) { return each.get() == &set_up; });
  add_in_room(ended_, std::move(*found));
  running_.erase(found);
  ended_one_.notify_all();
  const std::uint64_t one = 1;
  (void)!::write(bell_.get(), &one, sizeof one);
}

}  // namespace kvxfer
