#include "transports/verbs/message.h"

#include <algorithm>

namespace kvxfer::verbs {
namespace {

Status wrong(const char* what) { return {Code::kRailFailed, std::string("its hello is wrong: ") + what}; }

}  // namespace

Status Message::check(bool has_fd) const {
  if (has_fd) return {Code::kRailFailed, "it sent a descriptor, which this transport does not use"};
  if (kind < MessageKind::kHello || kind > MessageKind::kDropped)
    return {Code::kRailFailed, "it sent a message of an unknown kind"};
  if (!is_hello()) return {};
  if (num_pairs == 0 || num_pairs > kMostPairs) return wrong("the number of its queue pairs");
  if (takes_writes > 1) return wrong("whether it takes WRITEs");
  if (mtu < static_cast<int>(abi::Mtu::k256) || mtu > static_cast<int>(abi::Mtu::k4096))
    return wrong("its MTU");
  if (link != abi::LinkLayer::kEthernet && link != abi::LinkLayer::kInfiniBand)
    return wrong("its link layer");
  for (std::size_t i = 0; i < num_pairs; ++i) {
    if (pairs[i].reserved != 0) return wrong("a number of a packet has more than 24 bits");
    const bool is_in_order =
        i == 0 ? pairs[i].first_priority == 0 : pairs[i].first_priority >= pairs[i - 1].first_priority;
    if (!is_in_order) return wrong("the order of its classes of priorities");
  }
  std::uint64_t end;
  if (fence_address % 8 != 0 || __builtin_add_overflow(fence_address, fence_nbytes, &end))
    return wrong("where its fence words are");
  return {};
}

std::string Message::device_name() const {
  const std::string name = printable({device.begin(), std::find(device.begin(), device.end(), '\0')});
  return name.empty() ? "a device without a name" : name;
}

}  // namespace kvxfer::verbs
