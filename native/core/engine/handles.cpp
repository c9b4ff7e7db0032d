#include "core/engine/handles.h"

#include <cassert>

namespace kvxfer {

void Handles::end(const std::shared_ptr<Handle>& handle, TransferState state, Status status,
                  std::vector<std::uint32_t> failed_blocks) {
  if (handle == nullptr) return;
  assert(state == TransferState::kDone || is_of_transfer(status.code()) || is_of_peer(status.code()) ||
         status.code() == Code::kClosed);  // as documented (docs/errors.md)
  const Code code = status.code();
  std::string message = status.message();
  if (const auto found = transfers_.find(handle->id()); found != transfers_.end())
    spare_.erase(transfers_, found);
  if (handle->outcome() == Outcome::kPending)
    handle->end(context_.now, outcome_of(state), std::move(status), std::move(failed_blocks));
  context_.host.emit(
      {.kind = EventKind::kEnded, .handle = handle->id(), .code = code, .message = std::move(message)});
}

}  // namespace kvxfer
