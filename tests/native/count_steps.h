// Counts the instructions of a call by stepping through it: the count is the same on every machine, however
// busy it is.
#pragma once

#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <optional>

namespace check {

// Runs body in a copy of this process, so its changes are not visible here. Returns nothing where tracing is
// not allowed. A step takes some 30 us, so counting ends after at_most steps, and at_most + 1 is returned.
template <class Body>
std::optional<std::uint64_t> count_steps(Body&& body, std::uint64_t at_most = UINT64_MAX) {
  const pid_t child = ::fork();
  if (child < 0) return std::nullopt;
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(1);
    ::raise(SIGSTOP);
    body();
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  int status = 0;
  std::optional<std::uint64_t> steps;
  if (::waitpid(child, &status, 0) == child && WIFSTOPPED(status)) {
    std::uint64_t count = 0;
    while (count <= at_most && ::ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) == 0 &&
           ::waitpid(child, &status, 0) == child && WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP)
      ++count;
    if (count > at_most || (WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP)) steps = count;
    ::kill(child, SIGKILL);
    ::waitpid(child, &status, 0);
  }
  return steps;
}

}  // namespace check
