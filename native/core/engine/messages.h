// Messages: bytes from our callers to callers of peers and back, without a transfer, in the order of their
// sending.
//
// Each direction of a session has a window (wire::kMessageWindow). It covers what was sent and the
// receiver's caller has not taken. The sender keeps within it and makes its caller wait. The receiver
// charges it to the session's budget (Resource::kMessages), which has room for one window, so a peer that
// sends more breaks the protocol. With MESSAGES_TAKEN the receiver says how much its caller took, once for
// each quarter of the window.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/sessions.h"

namespace kvxfer {

// How much of the window a message of so many bytes takes.
constexpr std::uint64_t message_charge(std::uint64_t nbytes) noexcept {
  return std::max(nbytes, wire::kLeastMessageCharge);
}

class Messages {
 public:
  Messages(Context& context, Sessions& sessions) : context_(context), sessions_(sessions) {}

  // ---- to a peer
  // kExhausted if the window has no room for it; kRoom is emitted when there is more.
  Status send(Peer& peer, wire::Bytes payload);
  // True if the window has room for a message of so many bytes; if not, kRoom follows likewise.
  bool has_room(const Peer& peer, std::uint64_t nbytes);

  // ---- from a peer. An error is a breach of the protocol.
  Status on(Peer& peer, wire::AgentMessage& message);
  Status on(Peer& peer, const wire::MessagesTaken& taken);
  // Our callers hear of messages only after they have heard of the peer: this delivers those that came
  // earlier.
  void peer_up(const Peer& peer);
  // Our caller took a message with Event::tells.
  void taken(Peer& peer);

  void remove_session(SessionKey session) { windows_.erase(session); }
  std::size_t size() const noexcept { return windows_.size(); }

 private:
  // Sums of charges (message_charge) since the session opened, for each direction.
  struct Window {
    std::uint64_t sent = 0, taken_there = 0;
    bool lacks_room = false;  // a caller found no room since kRoom was last emitted
    std::uint64_t received = 0;
    std::uint64_t reported_at = 0;  // the value of `received` at the newest message that tells
    std::uint64_t told = 0;  // what our caller took, as the peer knows
    std::vector<Event> early;  // messages that came before our callers knew of the peer
  };

  Context& context_;
  Sessions& sessions_;
  std::map<SessionKey, Window> windows_;  // of sessions that have sent messages
};

}  // namespace kvxfer
