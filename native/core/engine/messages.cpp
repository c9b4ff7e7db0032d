#include "core/engine/messages.h"

#include <utility>

namespace kvxfer {
namespace {

// A caller that has taken everything has reported all but this much. The rest of the window is larger than
// the largest message, so a sender always finds room in time.
constexpr std::uint64_t kTellCharge = wire::kMessageWindow / 4;
static_assert(wire::kMessageWindow - kTellCharge - wire::kMaxMessage >= wire::kMaxMessage);

}  // namespace

bool Messages::has_room(const Peer& peer, std::uint64_t nbytes) {
  Window& window = windows_[peer.key()];
  if (window.sent - window.taken_there + message_charge(nbytes) <= wire::kMessageWindow) return true;
  window.lacks_room = true;
  return false;
}

Status Messages::send(Peer& peer, wire::Bytes payload) {
  const std::uint64_t nbytes = payload.size();
  if (nbytes > wire::kMaxMessage)
    return {Code::kInvalidArgument, "a message has at most " + std::to_string(wire::kMaxMessage) +
                                        " bytes, not " + std::to_string(nbytes) +
                                        ": send it in parts, or as blocks by a transfer"};
  if (!has_room(peer, nbytes)) {
    const Window& window = windows_.at(peer.key());
    return {Code::kExhausted,
            "there is no room for a message of " + std::to_string(nbytes) + " bytes to " +
                quoted(peer.name()) + ": the peer has not read " +
                std::to_string(window.sent - window.taken_there) + " of the " +
                std::to_string(wire::kMessageWindow) +
                " bytes that may wait there (each message counts at least " +
                std::to_string(wire::kLeastMessageCharge) +
                " bytes); wait with peer.sendable(), and let the peer read agent.messages()"};
  }
  sessions_.send(peer, wire::AgentMessage{std::move(payload)});
  windows_.at(peer.key()).sent += message_charge(nbytes);
  ++context_.stats.messages_sent;
  return {};
}

Status Messages::on(Peer& peer, wire::AgentMessage& message) {
  Window& window = windows_[peer.key()];
  const std::uint64_t charge = message_charge(message.payload.size());
  Event event{.kind = EventKind::kMessage,
              .peer = peer.key(),
              .payload = std::move(message.payload),
              .charge = Charge::take(peer.budget(), Resource::kMessages, charge)};
  if (!event.charge)
    return {Code::kProtocol,
            "MESSAGE: more bytes than may wait here unread: " + peer.budget()->in_words(Resource::kMessages)};
  window.received += charge;
  ++context_.stats.messages_in;
  if (window.received - window.reported_at >= kTellCharge) {
    event.tells = true;
    window.reported_at = window.received;
  }
  if (peer.is_up())
    context_.host.emit(std::move(event));
  else
    window.early.push_back(std::move(event));
  return {};
}

Status Messages::on(Peer& peer, const wire::MessagesTaken& taken) {
  Window& window = windows_[peer.key()];
  if (taken.charge <= window.taken_there || taken.charge > window.sent)
    return {Code::kProtocol, "MESSAGES_TAKEN.charge: " + std::to_string(taken.charge) + " of " +
                                 std::to_string(window.sent) + " sent, after " +
                                 std::to_string(window.taken_there)};
  window.taken_there = taken.charge;
  if (std::exchange(window.lacks_room, false))
    context_.host.emit({.kind = EventKind::kRoom, .peer = peer.key()});
  return {};
}

void Messages::peer_up(const Peer& peer) {
  const auto found = windows_.find(peer.key());
  if (found == windows_.end()) return;
  for (Event& event : std::exchange(found->second.early, {})) context_.host.emit(std::move(event));
}

void Messages::taken(Peer& peer) {
  const auto found = windows_.find(peer.key());
  if (found == windows_.end()) return;
  Window& window = found->second;
  const std::uint64_t taken = window.received - peer.budget()->used(Resource::kMessages);
  if (taken <= window.told) return;  // another thread took more, and reported that
  sessions_.send(peer, wire::MessagesTaken{taken});
  window.told = taken;
}

}  // namespace kvxfer
