#include "transports/shm/message.h"

namespace kvxfer::shm {

Status Message::check(bool has_fd) const {
  if (kind < MessageKind::kHello || kind > MessageKind::kMemfdGone)
    return {Code::kRailFailed, "it sent a message of an unknown kind"};
  if (has_fd != (kind != MessageKind::kMemfdGone))
    return {Code::kRailFailed, "it sent a message with a missing or an extra descriptor"};
  return {};
}

}  // namespace kvxfer::shm
