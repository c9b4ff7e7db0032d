// An entry of the completion ring: something that a caller may wait for.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/control/wire.h"
#include "kvxfer/budget.h"

namespace kvxfer {

using SessionKey = std::uint32_t;  // an agent's own number for a session: a caller's `peer`
using LeaseId = std::uint64_t;     // unique in its grantor

// Who is at the other end of a session.
struct Sender {
  std::string name;
  wire::Id128 incarnation{};
  bool is_ours = false;  // true if we called
  std::string identity;  // by its certificate; "": it has none
};

enum class EventKind : std::uint8_t {
  kEnded,         // handle
  kLayer,         // handle, layer
  kNotification,  // peer, payload, context; in the completion ring it only says that some came
  kPeerUp,        // peer
  kPeerLost,      // peer, code, message
  kRegion,        // peer, region
  kRegionGone,    // peer, region
  kMessage,       // the same, for a message
  kRoom,          // peer: there is now more room for messages to it than when a caller found none
  kLeaseEnded,    // peer, lease, code: one that we granted
  // Lease: its holder has heard of it, or its right has ended; only if a caller waits for that.
  kLeaseAcknowledged,
  kCommands,      // handle: a command ring's id. One of its commands has ended
  kLog,           // message: one line for the log
};

// True if the event changes what an agent shows to an outside watcher (RecordRing::note_change).
constexpr bool is_of_state(EventKind kind) noexcept {
  return kind == EventKind::kPeerUp || kind == EventKind::kPeerLost || kind == EventKind::kRegion ||
         kind == EventKind::kRegionGone || kind == EventKind::kLeaseEnded;
}

struct Event {
  EventKind kind = EventKind::kEnded;
  std::uint64_t handle = 0;
  SessionKey peer = 0;
  RegionId region = 0;
  LeaseId lease = 0;
  std::uint32_t layer = 0;
  Code code = Code::kOk;
  std::string message = {};
  wire::Bytes payload = {};
  wire::Bytes context = {};  // whose request it concerns
  bool tells = false;  // of a message: tell the peer once our caller has taken it (Engine::message_taken)
  Charge charge = {};  // to the budget of a peer that can repeat this event, until our caller takes it
};

}  // namespace kvxfer
