#include "transports/cuda_ipc/message.h"

namespace kvxfer::cuda_ipc {

Status Message::check(bool has_fd) const {
  if (kind < MessageKind::kHello || kind > MessageKind::kMemoryUnmapped)
    return {Code::kRailFailed, "it sent a message of an unknown kind"};
  const bool is_memory = kind == MessageKind::kMemory;
  if (is_memory && (handle_kind < gpu::HandleKind::kFabric || handle_kind > gpu::HandleKind::kIpc))
    return {Code::kRailFailed, "it sent memory by an unknown kind of handle"};
  if (has_fd != (is_hello() || (is_memory && handle_kind == gpu::HandleKind::kPosixFd)))
    return {Code::kRailFailed, "it sent a message with a missing or an extra descriptor"};
  if (is_memory && (nbytes == 0 || nbytes > UINT64_MAX - base))
    return {Code::kRailFailed, "it sent memory of impossible size"};
  return {};
}

}  // namespace kvxfer::cuda_ipc
