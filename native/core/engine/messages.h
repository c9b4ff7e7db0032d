// Messages: bytes from our callers to those of peers and back, with no transfer, in the order of their sending.
//
// Each direction of a session has a window (wire::kMessageWindow): what was sent and the receiver's caller has not
// taken. The sender keeps to it and has its caller wait. The receiver charges it to the session's budget
// (Resource::kMessages), which has room for one window, so whoever sends more breaks the protocol; it says by
// MESSAGES_TAKEN how much its caller took, once for each quarter of the window.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/sessions.h"

namespace kvxfer {

// What a message of so many bytes counts in the window.
constexpr std::uint64_t message_charge(std::uint64_t nbytes) noexcept {
  return std::max(nbytes, wire::kLeastMessageCharge);
}

class Messages {
 public:
  Messages(Context& context, Sessions& sessions) : context_(context), sessions_(sessions) {}

  // ---- to a peer
  // kExhausted where the window has no room for it: kRoom is emitted when there is more.
  Status send(Peer& peer, wire::Bytes payload);
  // For one of so many bytes; the same where not.
  bool has_room(const Peer& peer, std::uint64_t nbytes);

  // ---- from a peer. An error is a breach of the protocol.
  Status on(Peer& peer, wire::AgentMessage& message);
  Status on(Peer& peer, const wire::MessagesTaken& taken);
  // Our callers hear of messages after they have heard of the peer: now those that came before.
  void peer_up(const Peer& peer);
  // Our caller took one with Event::tells.
  void taken(Peer& peer);

  void remove_session(SessionKey session) { windows_.erase(session); }
  std::size_t size() const noexcept { return windows_.size(); }

 private:
  // Charges (message_charge) since the session opened, of each direction.
  struct Window {
    std::uint64_t sent = 0, taken_there = 0;
    bool lacks_room = false;  // a caller found none since kRoom was emitted
    std::uint64_t received = 0;
    std::uint64_t told_at = 0;  // of `received`, with the newest message that tells
    std::uint64_t told = 0;  // what our caller took, as the peer knows
    std::vector<Event> early;  // that came before our callers knew of the peer
  };

  Context& context_;
  Sessions& sessions_;
  std::map<SessionKey, Window> windows_;  // of sessions that have sent any
};

}  // namespace kvxfer
