#include "core/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>

namespace kvxfer {
namespace {

// Plain atomics: in a forked child no lock may be assumed to be free. Slot holds fd + 1.
std::array<std::atomic<int>, 4096> guarded{};

// A system call in every call of a caller's would cost more than some of the calls.
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

bool is_forked(pid_t owner) noexcept { return this_process.load(std::memory_order_relaxed) != owner; }

}  // namespace kvxfer
