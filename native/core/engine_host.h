// What the engine is given and what it says: its limits, what callers ask of it, how it shows itself, and
// EngineHost, through which everything that it wants done goes out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/budgets.h"
#include "core/control/session.h"
#include "core/control/wire.h"
#include "core/copy/executor.h"
#include "core/event.h"
#include "core/lease.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// A name in a message.
inline std::string quoted(const std::string& name) { return "'" + name + "'"; }

// Whose request something concerns, behind the name of what it is: " (context 'req-42')", or nothing.
inline std::string in_words(const wire::Bytes& context) {
  return context.empty() ? "" : " (context " + quoted(wire::on_one_line(wire::text_of(context))) + ")";
}

using RailId = std::uint32_t;  // an agent's own number for one peer's rail, never reused

struct RailInfo {
  RailId id = 0;
  wire::RailName name;  // in the session; both ends use the same
  Capabilities capabilities;
  std::uint16_t peer_instance = 0;  // of the peer's instances of the transport, the one at its other end
};

class EngineHost {
 public:
  virtual ~EngineHost() = default;
  virtual void send(SessionKey session, wire::Bytes frame) = 0;
  virtual void close_session(SessionKey session) = 0;  // after what was sent; no on_disconnected follows
  // The peer is authenticated. An initiator starts its rails here and reports each by rail_up or
  // rail_failed; returns how many it started.
  virtual std::uint32_t session_open(SessionKey session) = 0;
  // A rail that session_open started is dialled again, in its next life: later rail_up or rail_failed.
  virtual void dial_rail(SessionKey session, const wire::RailName& rail) = 0;
  virtual PostResult post(RailId rail, const Work& work) = 0;
  // As Transport's, for a rail that takes works of one side and of two.
  virtual WorkKind choose(RailId rail, const Move& move, std::uint32_t piece) = 0;
  virtual void cancel(RailId rail, std::span<const WorkId> works) = 0;  // asks: completions say that it is so
  virtual Status attach(RailId rail, const RemoteRegion& region) = 0;
  virtual void detach(RailId rail, RegionId region) = 0;
  virtual void drop_rail(RailId rail) = 0;  // its outstanding work still completes
  // Nothing is under way on the memory of a region that was deregistered: transports may let it go.
  virtual void region_fenced(RegionId region) = 0;
  virtual std::uint64_t fence_generation(std::uint32_t slot) = 0;
  virtual void bump_fence(std::uint32_t slot) = 0;
  virtual void emit(Event event) = 0;
  virtual void random(std::span<std::byte> bytes) = 0;
};

struct EngineConfig {
  SessionConfig session;
  Time lease_margin_ns = 100'000'000;  // a reader stops this long before its lease may end
  // Of one session, in each direction. A receiver keeps the tables of all that are open.
  std::uint32_t max_open_transfers = 1024;
  std::uint64_t max_open_pairs = 4 * 1024 * 1024;
  // Of each a session has a rail when it comes up, at the end that called, and as long as it lasts.
  std::vector<std::string> required_transports = {};
  // Of one session and its rails.
  Budget::Amounts peer_budget = kvxfer::peer_budget(max_open_transfers, max_open_pairs);
};

// What a caller asks of post().
struct TransferRequest {
  SessionKey peer = 0;
  std::uint32_t program = 0;  // as install_program returned it
  std::vector<std::uint32_t> src_ids, dst_ids;  // of units, the last num_fine of tokens
  std::uint32_t num_fine = 0;
  std::uint32_t first_layer = 0, num_layers = 0;  // in the program's numbers
  // Counted from first_layer: of these no byte moves before they are released, in either direction.
  std::uint32_t layers_ready = 0;
  wire::Bytes notify;
  std::uint8_t priority = 0;
  Time timeout_ns = 0;
  bool integrity = false;
  LeaseId lease = 0;  // of the peer's granting, the only one that may allow it; 0: any
  wire::Bytes context = {};  // whose request it is, at most wire::kMaxContext bytes of UTF-8
};

// What a peer is limited to, by its name.
struct PeerLimit {
  std::uint64_t max_bytes_per_s = 0;  // of pages that this agent takes from it; 0: any
  // Of transfers that this agent posts with it: those that ask to go earlier have this number. 0: what they ask.
  std::uint8_t least_priority = 0;
  bool operator==(const PeerLimit&) const = default;
};

struct PeerView {
  std::string name;
  wire::Id128 incarnation{};
  std::string state;  // "connecting", "open", "lost"
  std::vector<std::string> rails;
  std::vector<std::string> notes;
  bool is_ours = false;  // whether we called
  std::string identity;  // by its certificate; "": it has none
  Status reason;  // when lost
  std::shared_ptr<const Budget> budget;  // what it holds here, until it is lost
};

struct RemoteRegionView {
  wire::Region region;
  std::string path;  // the transport that will be used, "" for none yet
  std::vector<std::string> notes;
};

// A rail between a region of ours and one of a peer's, for pages that come to ours.
struct RailWay {
  RailId rail = 0;
  std::string transport;
  std::uint32_t rank = 0;  // for our region: rails of the lowest are chosen while one of them is up
  bool is_far = false;  // from our region's memory, which counts in its rank
  bool is_staged = false;  // our region's bytes pass memory of the host
  std::string why_not;  // "" where pages can come over it
};

// One that we granted, and that has not ended or whose works have not.
struct LeaseView {
  LeaseId id = 0;
  std::optional<SessionKey> holder;  // none: its bearer's
  std::string name;  // the holder's, or of those that may be its bearer; "" for any
  RegionId region = 0;
  wire::LeaseMode mode = wire::LeaseMode::kRead;
  std::optional<std::uint32_t> num_blocks;  // none: the whole region
  LeaseState state = LeaseState::kActive;
  Time left_ns = 0;
};

struct EngineStats {
  std::uint64_t pieces_in = 0, pieces_sent = 0, bytes_in = 0, transfers_done = 0, transfers_failed = 0,
                pieces_redone = 0, fences_stale = 0, frames_refused = 0, rails_lost = 0, rails_redialled = 0,
                messages_in = 0, messages_sent = 0;
};

// What is held right now: all 0 once nothing is open, but for `timers`, one a session, lease and redial, `windows`, one
// a session that sent messages, and `tags_remembered`, which are bounded (TagMemory).
struct EngineLoad {
  std::size_t works = 0, outstanding_pieces = 0, fences = 0, expectations = 0, leases = 0, handles = 0,
              redials = 0, timers = 0, tags_remembered = 0, windows = 0;
};

}  // namespace kvxfer
