#include "core/system/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>

namespace kvxfer {
namespace {

// Plain atomics: in a forked child no lock may be assumed to be free. Slot holds fd + 1.
std::array<std::atomic<int>, 4096> guarded{};

// getpid() in every call of a caller would cost more than some of the calls.
std::atomic<pid_t> this_process{::getpid()};

void in_child() {
  this_process = ::getpid();
  for (std::atomic<int>& slot : guarded)
    if (const int value = slot.exchange(0); value != 0) ::close(value - 1);
}

[[maybe_unused]] const int registered = ::pthread_atfork(nullptr, nullptr, in_child);

}  // namespace

void guard_fd(int fd) noexcept {
  for (std::atomic<int>& slot : guarded) {
    int empty = 0;
    if (slot.load(std::memory_order_relaxed) == 0 && slot.compare_exchange_strong(empty, fd + 1)) return;
  }
}

void unguard_fd(int fd) noexcept {
  for (std::atomic<int>& slot : guarded) {
    int value = fd + 1;
    if (slot.load(std::memory_order_relaxed) == value && slot.compare_exchange_strong(value, 0)) return;
  }
}

GuardedFd::GuardedFd(UniqueFd fd) noexcept
    : owner_(this_process.load(std::memory_order_relaxed)), fd_(std::move(fd)) {
  if (fd_) guard_fd(fd_.get());
}

GuardedFd& GuardedFd::operator=(GuardedFd&& other) noexcept {
  reset();
  owner_ = other.owner_;
  fd_ = std::move(other.fd_);
  return *this;
}

void GuardedFd::reset() noexcept {
  if (!fd_) return;
  if (is_forked(owner_)) {
    static_cast<void>(fd_.release());  // in_child has closed it
    return;
  }
  unguard_fd(fd_.get());
  fd_.reset();
}

bool is_forked(pid_t owner) noexcept { return this_process.load(std::memory_order_relaxed) != owner; }

}  // namespace kvxfer
