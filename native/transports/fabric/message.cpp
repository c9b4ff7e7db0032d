#include "transports/fabric/message.h"

#include <algorithm>
#include <cstring>
#include <span>

namespace kvxfer::fabric {
namespace {

constexpr std::size_t kMostWords = 256;

void append(std::vector<std::byte>& whole, std::span<const std::byte> field) {
  const auto nbytes = static_cast<std::uint32_t>(field.size());
  const auto head = std::as_bytes(std::span(&nbytes, 1));
  whole.insert(whole.end(), head.begin(), head.end());
  whole.insert(whole.end(), field.begin(), field.end());
}

}  // namespace

Status Message::check(bool has_fd) const {
  if (has_fd) return {Code::kRailFailed, "it sent a descriptor, which this transport does not use"};
  if (kind < MessageKind::kHello || kind > MessageKind::kWritten)
    return {Code::kRailFailed, "it sent a message of an unknown kind"};
  if (part_nbytes > kPartNbytes || whole_nbytes > Introduction::kMostNbytes)
    return {Code::kRailFailed, "its introduction is too long"};
  return {};
}

std::vector<Message> Introduction::encode() const {
  std::vector<std::byte> whole;
  append(whole, std::as_bytes(std::span(library)));
  append(whole, std::as_bytes(std::span(terms)));
  append(whole, address);
  append(whole, fences);
  std::vector<Message> messages;
  for (std::size_t at = 0; at < whole.size(); at += Message::kPartNbytes) {
    Message& message = messages.emplace_back();
    message.kind = at == 0 ? MessageKind::kHello : MessageKind::kMore;
    if (at == 0) message.whole_nbytes = static_cast<std::uint32_t>(whole.size());
    message.part_nbytes = static_cast<std::uint32_t>(std::min(Message::kPartNbytes, whole.size() - at));
    std::memcpy(message.part.data(), whole.data() + at, message.part_nbytes);
  }
  return messages;
}

Result<Introduction> Introduction::decode(std::span<const std::byte> whole) {
  const auto next = [&](std::span<const std::byte>& field) {
    std::uint32_t nbytes = 0;
    if (whole.size() < sizeof nbytes) return false;
    std::memcpy(&nbytes, whole.data(), sizeof nbytes);
    whole = whole.subspan(sizeof nbytes);
    if (whole.size() < nbytes) return false;
    field = whole.first(nbytes);
    whole = whole.subspan(nbytes);
    return true;
  };
  std::array<std::span<const std::byte>, 4> fields;
  if (!std::all_of(fields.begin(), fields.end(), next) || !whole.empty() || fields[0].size() > kMostWords ||
      fields[1].size() > kMostWords || fields[3].size() > kMaxKeyBytes)
    return Status(Code::kRailFailed, "its introduction is not in the format of this version");
  const auto words = [](std::span<const std::byte> field) {
    return printable({reinterpret_cast<const char*>(field.data()), field.size()});
  };
  return Introduction{words(fields[0]),
                      words(fields[1]),
                      {fields[2].begin(), fields[2].end()},
                      {fields[3].begin(), fields[3].end()}};
}

}  // namespace kvxfer::fabric
