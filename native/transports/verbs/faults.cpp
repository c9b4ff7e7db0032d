#include "transports/verbs/faults.h"

namespace kvxfer::verbs {
namespace {

const char* advice_for(abi::WorkStatus status) noexcept {
  using Status = abi::WorkStatus;
  switch (status) {
    case Status::kRetriesExceeded:
    case Status::kResponseTimeout:
      return "its port does not answer: is the peer's port up, does a route lead there (ping -I by the same "
             "addresses), do both ends have the same MTU, and does verbs.gid_index name a GID of the right "
             "network?";
    case Status::kRnrRetriesExceeded:
      return "its queue pair takes no requests: the peer is closing, or its process is stopped; or, in "
             "Soft-RoCE, its interface cannot send packets of that size: do both ends have the same MTU?";
    case Status::kRemoteAccess:
      return "the peer's device refused the key or the address: the peer deregistered that memory, or "
             "another process has taken its place";
    case Status::kRemoteInvalidRequest:
    case Status::kRemoteInvalidRead:
      return "the peer's device refused the request: its queue pair permits no READs, or fewer in flight "
             "(verbs.reads)";
    case Status::kRemoteOperation:
    case Status::kRemoteAbort:
    case Status::kBadResponse:
      return "the peer's device failed to serve it: see the kernel log of the peer's host";
    case Status::kLocalLength:
    case Status::kLocalOperation:
    case Status::kLocalProtection:
    case Status::kLocalAccess:
      return "the fault is at this end: the port is down, or memory is not registered correctly";
    case Status::kFatal:
    case Status::kGeneral: return "the device at this end has failed: see the kernel log";
    case Status::kFlushed: return "its queue pair had failed before";
    case Status::kSuccess: break;
  }
  return "see the kernel log";
}

}  // namespace

std::string words_of(const Library& library, const abi::WorkCompletion& completion) {
  const char* const name = library.wc_status_str(completion.status);
  return std::string(name != nullptr ? name : "an unknown error") + " (status " +
         std::to_string(static_cast<int>(completion.status)) + ", vendor error " +
         std::to_string(completion.vendor_error) + "): " + advice_for(completion.status);
}

}  // namespace kvxfer::verbs
