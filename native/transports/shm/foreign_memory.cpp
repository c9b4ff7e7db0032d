#include "transports/shm/foreign_memory.h"

#include <poll.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace kvxfer::shm {
namespace {

// The kernel's value; -1 if it is built without Yama.
int yama_ptrace_scope() {
  int scope = -1;
  if (std::FILE* file = std::fopen("/proc/sys/kernel/yama/ptrace_scope", "re")) {
    if (std::fscanf(file, "%d", &scope) != 1) scope = -1;
    std::fclose(file);
  }
  return scope;
}

std::string refusal_words(int error, pid_t pid, uid_t uid) {
  const std::string failed =
      Status::from_errno("process_vm_readv of process " + std::to_string(pid), error).message();
  if (error == ENOSYS) return failed + ": this kernel is built without CONFIG_CROSS_MEMORY_ATTACH";
  if (error == ESRCH)
    return failed +
           ": it runs in another pid namespace; start both containers with a common one (docker run "
           "--pid=container:<other>, Kubernetes shareProcessNamespace)";
  if (error == EFAULT)
    return failed + ": this pid belongs to another process here; give both a common pid namespace";
  if (error != EPERM) return failed;

  std::string words = failed + ": ";
  const int scope = yama_ptrace_scope();
  if (uid != ::geteuid())
    words += "it runs as user " + std::to_string(uid) + " and this process as " +
             std::to_string(::geteuid()) + "; run both as one user, or this one with CAP_SYS_PTRACE";
  else if (scope > 0)
    words += "Yama's ptrace_scope is " + std::to_string(scope) +
             "; set it to 0 (sysctl kernel.yama.ptrace_scope=0), or give this process CAP_SYS_PTRACE";
  else
    words +=
        "this process lacks CAP_SYS_PTRACE, or a seccomp profile forbids the call (docker run --cap-add "
        "SYS_PTRACE), or the peer made itself undumpable";
  return words;
}

UniqueFd open_pidfd(pid_t pid) noexcept {
#if defined(SYS_pidfd_open)
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));  // closed on exec
#else
  static_cast<void>(pid);
  return {};
#endif
}

}  // namespace

ForeignMemory::ForeignMemory(pid_t pid, uid_t uid, const Probe& probe) : pid_(pid) {
  refusal_.clear();
  if (pid <= 0) {
    refusal_ =
        "the peer's process is not visible in this pid namespace; start both containers with a common one";
    return;
  }
  // Opened before the probe, so that the probe and the pidfd are of the same process.
  pidfd_ = open_pidfd(pid);
  Probe found;
  iovec local{found.bytes.data(), found.bytes.size()};
  iovec remote{reinterpret_cast<void*>(probe.address), found.bytes.size()};
  const ssize_t nbytes = ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
  if (nbytes < 0)
    refusal_ = refusal_words(errno, pid, uid);
  else if (static_cast<std::size_t>(nbytes) != found.bytes.size() || found.bytes != probe.bytes)
    refusal_ = "process " + std::to_string(pid) + " is not the process at the other end of the socket";
}

Status ForeignMemory::failed(int error) const {
  if (error == ESRCH) return {Code::kRailFailed, "process " + std::to_string(pid_) + " is gone"};
  if (error != EFAULT) return Status::from_errno("process_vm_readv", error);
  // A process that ends loses its pages a moment before its number.
  if (Status alive = check_alive(); !alive.ok()) return alive;
  return {Code::kSystem,
          "part of the region is no longer mapped, at the peer or here (process_vm_readv: EFAULT); "
          "memory must stay mapped while it is registered"};
}

bool ForeignMemory::is_gone() const noexcept {
  pollfd ended{pidfd_.get(), POLLIN, 0};
  return pidfd_ && ::poll(&ended, 1, 0) > 0;
}

Status ForeignMemory::check_alive() const {
  if (!is_gone()) return {};
  return {Code::kRailFailed, "process " + std::to_string(pid_) + " is gone"};
}

}  // namespace kvxfer::shm
