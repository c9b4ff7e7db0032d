#include "transports/verbs/faults.h"

namespace kvxfer::verbs {
namespace {

const char* advice_for(abi::WorkStatus status) noexcept {
  using Status = abi::WorkStatus;
  switch (status) {
    case Status::kRetriesExceeded:
    case Status::kResponseTimeout:
      return "its port does not answer: is the peer's port up, does a route lead there (ping -I by the same "
             "addresses), do both ends have one MTU, and is verbs.gid_index of the right network?";
    case Status::kRnrRetriesExceeded:
      return "its queue pair takes no requests: the peer is closing, or stands still; or, in Soft-RoCE, its "
             "interface sends no packets of that size: do both ends have one MTU?";
    case Status::kRemoteAccess:
      return "the peer's device refused the key or the address: the peer deregistered that memory, or is "
             "another than "
             "it was";
    case Status::kRemoteInvalidRequest:
    case Status::kRemoteInvalidRead:
      return "the peer's device refused the request: its queue pair permits no READs, or fewer at a time "
             "(verbs.reads)";
    case Status::kRemoteOperation:
    case Status::kRemoteAbort:
    case Status::kBadResponse: return "the peer's device failed at it: see the kernel's log there";
    case Status::kLocalLength:
    case Status::kLocalOperation:
    case Status::kLocalProtection:
    case Status::kLocalAccess:
      return "the fault is at this end: its port is down, or memory is not registered as it should be";
    case Status::kFatal:
    case Status::kGeneral: return "the device has failed here: see the kernel's log";
    case Status::kFlushed: return "its queue pair failed before";
    case Status::kSuccess: break;
  }
  return "see the kernel's log";
}

}  // namespace

std::string words_of(const Library& library, const abi::WorkCompletion& completion) {
  const char* const name = library.wc_status_str(completion.status);
  return std::string(name != nullptr ? name : "an unknown error") + " (status " +
         std::to_string(static_cast<int>(completion.status)) + ", vendor's " +
         std::to_string(completion.vendor_error) + "): " + advice_for(completion.status);
}

}  // namespace kvxfer::verbs
