// What a forked child must not keep. Its copies of our sockets would hide our death from peers,
// and its copy of an agent has no progress thread: the descriptors are closed in the child, and
// every call on the agent says kForked.
#pragma once

#include <sys/types.h>

namespace kvxfer {

// Descriptors are closed in children forked while they are guarded. Bounded (4096); past it they
// are merely inherited. Safe to call from any thread; the child's handler only closes.
void guard_fd(int fd) noexcept;
void unguard_fd(int fd) noexcept;

// True in a process other than the one that created the object with `owner` = getpid().
bool is_forked(pid_t owner) noexcept;

}  // namespace kvxfer
