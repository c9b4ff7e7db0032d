// What a forked child must not keep. Its copies of our sockets would hide our death from peers, its copies
// of peers' memory would keep that memory from being freed, and its copy of an agent has no progress thread.
// So the child closes the descriptors, and every call on the agent returns kForked there.
#pragma once

#include <sys/types.h>

#include <utility>

#include "kvxfer/transport.h"

namespace kvxfer {

// A guarded descriptor is closed in children that are forked meanwhile. At most 4096 are guarded; children
// merely inherit any others. Safe to call from any thread; the child's handler only closes.
void guard_fd(int fd) noexcept;
void unguard_fd(int fd) noexcept;

// True in any process but the one that created the object, whose getpid() was `owner`.
bool is_forked(pid_t owner) noexcept;

// A descriptor that is guarded for as long as it is open. A forked child has closed it already, and its
// number may name another file there.
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
