#include "transports/shm/message.h"

namespace kvxfer::shm {

Status Message::check(bool has_fd) const {
  if (kind < MessageKind::kHello || kind > MessageKind::kMemfdGone)
    return {Code::kRailFailed, "it sent a message of an unknown kind"};
  if (has_fd != (kind != MessageKind::kMemfdGone))
    return {Code::kRailFailed, "it sent a message without its descriptor, or one too many"};
  return {};
}

}  // namespace kvxfer::shm
