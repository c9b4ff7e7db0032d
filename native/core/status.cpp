// Codes in words, and the one system call that a Status may come from.
#include "kvxfer/status.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "core/system/fork_guard.h"
#include "kvxfer/transport.h"

namespace kvxfer {

std::string_view name_of(Code code) noexcept {
  switch (code) {
    case Code::kOk: return "ok";
    case Code::kAgain: return "again";
    case Code::kInvalidArgument: return "invalid-argument";
    case Code::kOutOfRange: return "out-of-range";
    case Code::kDuplicateBlock: return "duplicate-block";
    case Code::kLengthMismatch: return "length-mismatch";
    case Code::kLayoutMismatch: return "layout-mismatch";
    case Code::kUnknownRegion: return "unknown-region";
    case Code::kUnsupported: return "unsupported";
    case Code::kExhausted: return "exhausted";
    case Code::kNotPermitted: return "not-permitted";
    case Code::kLeaseEnded: return "lease-ended";
    case Code::kRegionGone: return "region-gone";
    case Code::kCancelled: return "cancelled";
    case Code::kDeadline: return "deadline";
    case Code::kIntegrity: return "integrity";
    case Code::kRefused: return "refused";
    case Code::kNoPath: return "no-path";
    case Code::kRailFailed: return "rail-failed";
    case Code::kPeerLost: return "peer-lost";
    case Code::kPeerSilent: return "peer-silent";
    case Code::kPeerRestarted: return "peer-restarted";
    case Code::kAuthFailed: return "auth-failed";
    case Code::kProtocol: return "protocol";
    case Code::kUnreachable: return "unreachable";
    case Code::kNoAnswer: return "no-answer";
    case Code::kClosed: return "closed";
    case Code::kForked: return "forked";
    case Code::kSystem: return "system";
    case Code::kInternal: return "internal";
  }
  return "unknown";  // a number that no release has given out; the wire decoder refuses it
}

std::string words_of(int error) {
  std::string words = std::generic_category().message(error);
  rlimit limit{};
  if (error == EMFILE && ::getrlimit(RLIMIT_NOFILE, &limit) == 0)
    words += ": this process has " + std::to_string(limit.rlim_cur) + " of " +
             std::to_string(limit.rlim_cur) + " descriptors, raise ulimit -n";
  return words;
}

Status Status::from_errno(std::string_view what, int error) {
  return Status(Code::kSystem,
                std::string(what) + ": " + words_of(error) + " (errno " + std::to_string(error) + ")");
}

void UniqueFd::guard() noexcept {
  if (fd_ < 0 || guarded_) return;
  guard_fd(fd_);
  guarded_ = true;
}

int UniqueFd::release() noexcept {
  if (std::exchange(guarded_, false)) unguard_fd(fd_);
  return std::exchange(fd_, -1);
}

void UniqueFd::reset(int fd) noexcept {
  if (std::exchange(guarded_, false)) unguard_fd(fd_);
  const int old = std::exchange(fd_, fd);
  // close() is not repeated after EINTR: Linux has released the number by then, and another thread may
  // hold it.
  if (old >= 0 && old != fd) ::close(old);
}

}  // namespace kvxfer
