// What a forked child must not keep. Its copies of our sockets would hide our death from peers, its copies of
// peers' memory would keep that from being freed, and its copy of an agent has no progress thread: the
// descriptors are closed in the child, and every call on the agent says kForked.
#pragma once

#include <sys/types.h>

#include <utility>

#include "kvxfer/transport.h"

namespace kvxfer {

// Descriptors are closed in children forked while they are guarded. Bounded (4096); past it they
// are merely inherited. Safe to call from any thread; the child's handler only closes.
void guard_fd(int fd) noexcept;
void unguard_fd(int fd) noexcept;

// True in a process other than the one that created the object with `owner` = getpid().
bool is_forked(pid_t owner) noexcept;

// A descriptor that is guarded for as long as it is open. In a forked child it is closed already, and its
// number may be another's.
class GuardedFd {
 public:
  GuardedFd() = default;
  explicit GuardedFd(UniqueFd fd) noexcept;
  GuardedFd(GuardedFd&&) noexcept = default;
  GuardedFd& operator=(GuardedFd&& other) noexcept;
  ~GuardedFd() { reset(); }
  int get() const noexcept { return fd_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(fd_); }
  void reset() noexcept;

 private:
  pid_t owner_ = 0;
  UniqueFd fd_;
};

}  // namespace kvxfer
