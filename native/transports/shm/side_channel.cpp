#include "transports/shm/side_channel.h"

#include <cstring>

namespace kvxfer::shm {

Result<std::optional<Received>> SideChannel::receive() {
  Result<MessageChannel::Received> next = channel_.receive();
  if (!next.ok()) return next.status();
  if (next.value().message.empty()) return std::optional<Received>();
  Received whole;
  std::memcpy(&whole.message, next.value().message.data(), sizeof whole.message);
  whole.fd = std::move(next.value().fd);
  if (whole.message.magic != Message().magic || whole.message.reserved != Message().reserved)
    return Status(Code::kRailFailed, "it sent a message that is not of this transport's version");
  const MessageKind kind = whole.message.kind;
  if (kind < MessageKind::kHello || kind > MessageKind::kMemfdGone)
    return Status(Code::kRailFailed, "it sent a message of an unknown kind");
  if (static_cast<bool>(whole.fd) != (kind != MessageKind::kMemfdGone))
    return Status(Code::kRailFailed, "it sent a message without its descriptor, or one too many");
  return std::optional<Received>(std::move(whole));
}

}  // namespace kvxfer::shm
