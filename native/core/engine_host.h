// The engine's surroundings: its limits, what callers ask of it, the views that it gives, and EngineHost,
// through which everything that it wants done goes out.
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

// A name as messages quote it.
inline std::string quoted(const std::string& name) { return "'" + name + "'"; }

// Names whose request an object concerns, to be added to the object's name: " (context 'req-42')", or
// nothing.
inline std::string in_words(const wire::Bytes& context) {
  return context.empty() ? "" : " (context " + quoted(wire::on_one_line(wire::text_of(context))) + ")";
}

using RailId = std::uint32_t;  // an agent's own number for one peer's rail, never reused

struct RailInfo {
  RailId id = 0;
  wire::RailName name;  // in the session; both ends use the same
  Capabilities capabilities;
  std::uint16_t peer_instance = 0;  // the peer's instance of the transport at the rail's other end
};

class EngineHost {
 public:
  virtual ~EngineHost() = default;
  // Leaves the frame as it is if memory is lacking.
  virtual void send(SessionKey session, wire::Bytes&& frame) = 0;
  // What of the frames of a session has not gone out. `is_full`: its connection takes no more for now, and the
  // engine is pumped when it does.
  struct Unsent {
    std::size_t nbytes = 0;
    bool is_full = false;
  };
  virtual Unsent unsent(SessionKey session) const = 0;
  // After everything that was sent; no on_disconnected follows.
  virtual void close_session(SessionKey session) = 0;
  // The peer is authenticated. An initiator starts its rails here, and reports each later by rail_up or
  // rail_failed. Returns how many it started.
  virtual std::uint32_t session_open(SessionKey session) = 0;
  // Dials again a rail that session_open started, in its next attempt. Later rail_up or rail_failed.
  virtual void dial_rail(SessionKey session, const wire::RailName& rail) = 0;
  virtual Code post(RailId rail, const Work& work) = 0;  // see Transport::post
  // See Transport::choose; for a rail that takes both one-sided and two-sided works.
  virtual WorkKind choose(RailId rail, const Move& move, std::uint32_t piece) = 0;
  // Only asks: completions report the end.
  virtual void cancel(RailId rail, std::span<const WorkId> works) = 0;
  virtual Status attach(RailId rail, const RemoteRegion& region) = 0;
  virtual void detach(RailId rail, RegionId region) = 0;
  virtual void drop_rail(RailId rail) = 0;  // its outstanding work still completes
  // Nothing is under way any more on the memory of a deregistered region: transports may let it go.
  virtual void region_fenced(RegionId region) = 0;
  virtual std::uint64_t fence_generation(std::uint32_t slot) = 0;
  virtual void bump_fence(std::uint32_t slot) = 0;
  virtual void emit(Event event) = 0;
  virtual void random(std::span<std::byte> bytes) = 0;
};

struct EngineConfig {
  SessionConfig session;
  Time lease_margin_ns = 100'000'000;  // a reader stops this long before its lease may end
  // For one session, in each direction. A receiver keeps the tables of all open transfers.
  std::uint32_t max_open_transfers = 1024;
  std::uint64_t max_open_pairs = 4 * 1024 * 1024;
  // A session that this end opened needs a rail of each of these, from when it comes up until it ends.
  std::vector<std::string> required_transports = {};
  // For one session and its rails.
  Budget::Amounts peer_budget = kvxfer::peer_budget(max_open_transfers, max_open_pairs);
};

// What a caller asks of post().
struct TransferRequest {
  SessionKey peer = 0;
  std::uint32_t program = 0;  // as install_program returned it
  std::vector<std::uint32_t> src_ids, dst_ids;  // of units, the last num_fine of tokens
  std::uint32_t num_fine = 0;
  std::uint32_t first_layer = 0, num_layers = 0;  // in the program's numbers
  // Counted from first_layer. Bytes of the other layers do not move before they are released, in either
  // direction.
  std::uint32_t layers_ready = 0;
  wire::Bytes notify;
  std::uint8_t priority = 0;
  Time timeout_ns = 0;
  bool integrity = false;
  // A write's handle ends only when none of its bytes can land any more: the destination has said so, or its
  // session is lost.
  bool awaits_last_word = false;
  LeaseId lease = 0;  // of the peer's granting; no other lease may allow it. 0: any lease may
  wire::Bytes context = {};  // whose request it is, at most wire::kMaxContext bytes of UTF-8
};

// The limit of a peer, by its name.
struct PeerLimit {
  std::uint64_t max_bytes_per_s = 0;  // of pages that this agent takes from it; 0: no limit
  // The least priority number of transfers that this agent posts with it: a lower number becomes this one.
  // 0: no change.
  std::uint8_t least_priority = 0;
  bool operator==(const PeerLimit&) const = default;
};

struct PeerView : Sender {
  std::string state;  // "connecting", "open", "lost"
  std::vector<std::string> rails;
  std::vector<std::string> notes;
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
  std::uint32_t rank = 0;  // for our region: while rails of the lowest rank are up, those are chosen
  bool is_far = false;  // the rail is far from our region's memory; its rank includes that
  bool is_staged = false;  // our region's bytes pass through host memory
  std::string why_not;  // "" if pages can come over it
};

// A lease that we granted and that has not ended, or under which works have not.
struct LeaseView {
  LeaseId id = 0;
  std::optional<SessionKey> holder;  // none: a bearer's lease
  std::string name;  // the name of the holder, or of peers that may be the bearer; "" for any
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

// What is held right now. All numbers are 0 once nothing is open, except `timers` (one a session, lease and
// redial), `windows` (one a session that sent messages) and `tags_remembered`, which are bounded
// (TagMemory).
struct EngineLoad {
  std::size_t works = 0, outstanding_pieces = 0, fences = 0, expectations = 0, leases = 0, handles = 0,
              redials = 0, timers = 0, tags_remembered = 0, windows = 0;
};

}  // namespace kvxfer
