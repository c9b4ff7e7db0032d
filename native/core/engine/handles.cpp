#include "core/engine/handles.h"

#include <cassert>

namespace kvxfer {

void Handles::end(const std::shared_ptr<Handle>& handle, TransferState state, const Status& status,
                  std::vector<std::uint32_t> failed_blocks) {
  if (handle == nullptr) return;
  assert(state == TransferState::kDone || is_of_transfer(status.code()) || is_of_peer(status.code()) ||
         status.code() == Code::kClosed);  // as documented (docs/errors.md)
  if (const auto found = transfers_.find(handle->id()); found != transfers_.end())
    spare_.erase(transfers_, found);
  if (handle->outcome() == Outcome::kPending)
    handle->end(context_.now, outcome_of(state), status, std::move(failed_blocks));
  context_.host.emit({.kind = EventKind::kEnded,
                      .handle = handle->id(),
                      .code = status.code(),
                      .message = status.message()});
}

}  // namespace kvxfer
