// What an agent does, as pure code: sessions, leases and transfers from both ends. No clock, no
// socket, no thread, no lock: every input is a call that carries the time, every wish goes out
// through EngineHost. Production drives it with Runtime, tests with a simulated network.
//
// engine.cpp           sessions, regions, rails, time
// engine_transfer.cpp  transfers from either end: programs, posting, checking, ending
// engine_source.cpp    transfers whose bytes are ours
// engine_destination.cpp  transfers whose bytes become ours: scheduling, accounting, confirming
// engine_path.cpp      whether any rail goes from one region to another, by the memory that they lie in
// engine_lease.cpp     leases and expectations
// engine_fence.cpp     rights and regions that have ended, until nothing under them is under way
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/event.h"
#include "core/executor.h"
#include "core/expectation.h"
#include "core/handle.h"
#include "core/lease.h"
#include "core/peer_budget.h"
#include "core/region_table.h"
#include "core/session.h"
#include "core/transfer.h"
#include "core/wire.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// A name in a message.
inline std::string quoted(const std::string& name) { return "'" + name + "'"; }

using RailId = std::uint32_t;  // an agent's own number for one peer's rail, never reused

struct RailInfo {
  RailId id = 0;
  std::uint16_t index = 0;  // in the session; both ends use the same
  Capabilities capabilities;
};

class EngineHost {
 public:
  virtual ~EngineHost() = default;
  virtual void send(SessionKey session, wire::Bytes frame) = 0;
  virtual void close_session(SessionKey session) = 0;  // after what was sent; no on_disconnected follows
  // The peer is authenticated. An initiator starts its rails here and reports each by rail_up or
  // rail_failed; returns how many it started.
  virtual std::uint32_t session_open(SessionKey session) = 0;
  virtual PostResult post(RailId rail, const Work& work) = 0;
  virtual void cancel(RailId rail, WorkId work) = 0;  // asks: its completion says that it has ended
  virtual Status attach(RailId rail, const RemoteRegion& region) = 0;
  virtual void detach(RailId rail, RegionId region) = 0;
  virtual void drop_rail(RailId rail) = 0;  // its outstanding work still completes
  // Nothing is under way on the memory of a region that was deregistered: transports may let it go.
  virtual void region_fenced(RegionId region) = 0;
  virtual std::uint64_t fence_generation(std::uint32_t slot) = 0;
  virtual void bump_fence(std::uint32_t slot) = 0;
  virtual std::uint32_t checksum(const Move& move, std::uint32_t piece, Side side) = 0;
  virtual void emit(Event event) = 0;
  virtual void random(std::span<std::byte> bytes) = 0;
};

struct EngineConfig {
  SessionConfig session;
  Time lease_margin_ns = 100'000'000;     // a reader stops this long before its lease may end
  // Of one session, in each direction. A receiver keeps the tables of all that are open.
  std::uint32_t max_open_transfers = 1024;
  std::uint64_t max_open_pairs = 4 * 1024 * 1024;
  // Of one session and its rails.
  Budget::Amounts peer_budget = kvxfer::peer_budget(max_open_transfers, max_open_pairs);
};

// What a caller asks of post().
struct TransferRequest {
  SessionKey peer = 0;
  std::uint32_t program = 0;  // as install_program returned it
  std::vector<std::uint32_t> src_ids, dst_ids;    // of units, the last num_fine of tokens
  std::uint32_t num_fine = 0;
  std::uint32_t first_layer = 0, num_layers = 0;  // in the program's numbers
  // Counted from first_layer: of these no byte moves before they are released, in either direction.
  std::uint32_t layers_ready = 0;
  wire::Bytes notify;
  std::uint8_t priority = 0;
  Time timeout_ns = 0;
  bool integrity = false;
  LeaseId lease = 0;  // of the peer's granting, the only one that may allow it; 0: any
};

struct PeerView {
  std::string name;
  wire::Id128 incarnation{};
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

struct EngineStats {
  std::uint64_t pieces_in = 0, pieces_sent = 0, bytes_in = 0, transfers_done = 0, transfers_failed = 0,
                pieces_redone = 0, fences_stale = 0, frames_refused = 0;
};

// What is held for transfers right now: all 0 once nothing is open, `timers` one a session and lease.
struct EngineLoad {
  std::size_t works = 0, outstanding_pieces = 0, fences = 0, expectations = 0, leases = 0, handles = 0,
              timers = 0;
};

class Engine {
 public:
  Engine(EngineConfig config, EngineHost& host);
  ~Engine();

  // ---- connections
  SessionKey add_session(Time now, SessionRole role);
  // Of a session whose connection is being dialled: the time of its handshake begins with on_connected.
  void on_dialling(Time now, SessionKey key);
  void on_connected(Time now, SessionKey key);
  void on_frame(Time now, SessionKey key, wire::ByteSpan frame);
  void on_disconnected(Time now, SessionKey key, std::string why);
  void on_unreachable(Time now, SessionKey key, std::string why);  // it was never connected
  // Ends a session from this side: GOODBYE to the peer, everything of it fails with `code`.
  void end_session(Time now, SessionKey key, Code code, std::string text);
  std::uint32_t max_body(SessionKey key) const;
  Session* session(SessionKey key);
  Session* find_session(const wire::Id128& id, SessionKey& key);
  bool has_session(SessionKey key) const { return peers_.contains(key); }
  std::shared_ptr<Budget> budget(
      SessionKey key) const;  // of a session: its rails charge it, too; null: none such

  // ---- rails
  void rail_up(Time now, SessionKey key, const RailInfo& rail);
  void rail_failed(Time now, SessionKey key, std::string note);  // one that session_open started
  void rail_down(Time now, RailId rail, std::string why);
  void on_completion(Time now, const Completion& completion);    // CompletionKind::kWork

  // ---- time
  void on_time(Time now);
  Time next_deadline() const;
  // Posts whatever rails can take, and flushes what sessions have to say. Call after inputs.
  void pump(Time now);
  // A rail said "again" and nothing will announce that it can: pump soon.
  bool wants_pump() const noexcept { return again_; }

  // ---- regions
  Result<RegionId> register_region(Time now, std::unique_ptr<Region> region);
  // Everything of it ends, and nothing of it begins any more. Its memory is its owner's again when
  // is_leaving(id) is false, which EngineHost::region_fenced tells: works on it may be under way until then.
  Status deregister_region(Time now, RegionId id);
  bool is_leaving(RegionId id) const { return leaving_regions_.contains(id); }
  const Region* region(RegionId id) const;
  RegionId next_region_id() const noexcept { return next_region_; }

  // ---- transfers and leases of this end's callers
  Result<std::uint32_t> install_program(Time now, SessionKey peer, bool write, RegionId src, RegionId dst,
                                        CopyProgram program);
  Result<std::shared_ptr<Handle>> post(Time now, TransferRequest request);
  void layers_ready(Time now, std::uint64_t handle, std::uint32_t layers);
  // Of a transfer or an expectation: its handle ends when nothing of it is under way any more.
  void cancel(Time now, std::uint64_t handle);
  Result<std::shared_ptr<Handle>> expect(Time now, wire::Bytes tag, RegionId region,
                                         std::vector<std::uint32_t> blocks, std::uint32_t first_layer,
                                         std::uint32_t num_layers, const Needed& needed,
                                         std::optional<SessionKey> from, Time timeout_ns);
  // To a peer, which is told of it; or to the bearer: any peer that names the id, which is handed on by
  // other ways and cannot be guessed. Such a lease is one to read, and not renewable. Who has to hand the
  // id on before the grant draws it (`bearer_id`: kBearerBit and 62 random bits); 0 draws one here.
  Result<LeaseId> grant(Time now, std::optional<SessionKey> peer, RegionId region, wire::LeaseMode mode,
                        bool all_blocks, std::span<const std::uint32_t> blocks, Time ttl_ns, bool renewable,
                        LeaseId bearer_id = 0);
  // The right ends at once. Blocks under it are their owner's again when its state is no longer kEnding;
  // kLeaseEnded is emitted then.
  void revoke(Time now, LeaseId lease);
  std::optional<LeaseState> lease_state(LeaseId lease) const;

  // ---- views
  std::optional<PeerView> peer(SessionKey key) const;
  std::vector<SessionKey> open_peers() const;
  Result<std::vector<RemoteRegionView>> peer_regions(SessionKey key) const;
  const EngineStats& stats() const noexcept { return stats_; }
  EngineLoad load() const noexcept;
  std::size_t num_transfers() const noexcept { return sources_.size() + destinations_.size(); }

  // Ends everything; afterwards every handle is final once work that was posted has completed.
  void close(Time now);
  // After that, of what has not completed by then, once its transports are gone: nothing of it lands any more.
  void abandon(Time now);

 private:
  using Key = std::pair<SessionKey, TransferId>;
  enum class TimerKind : std::uint8_t { kSession, kSource, kDestination, kLease, kExpectation, kRail, kPath };
  struct TimerKey {
    TimerKind kind;
    std::uint64_t a, b;
  };
  using Timers = std::multimap<Time, TimerKey>;

  struct Rail {
    RailInfo info;
    SessionKey session = 0;
    std::uint32_t outstanding = 0;  // pieces that we wait for on it
    bool again = false;             // said so in this pump
    Time moved_at = 0;              // something came over it, or was first waited for
    bool forgiven = false;          // since then: a standstill of our own
    std::optional<Timers::iterator> watch;
  };
  struct Remote {                   // a region of a peer
    wire::Region region;
    std::vector<RailId> reach;      // rails that its bytes can come over
    // Of those, ones that turned out unable from memory of that kind here.
    std::vector<std::pair<RailId, MemoryKind>> unable;
    std::vector<std::string> notes;
  };
  struct Program {
    std::shared_ptr<const CopyProgram> program;
    RegionId src = 0, dst = 0;
    bool write = false;             // ours alone
    // The peer's: it holds for OFFERs, for REQUESTs. Region ids are each agent's own, so the two uses
    // of one program name different regions, and what holds for one says nothing about the other.
    bool checked_offer = false, checked_request = false;
  };
  struct Peer {
    SessionKey key = 0;
    std::unique_ptr<Session> session;
    std::shared_ptr<Budget> budget;  // of the session and its rails
    std::vector<RailId> rails;      // alive
    std::vector<std::string> notes;
    std::map<RegionId, Remote> regions;
    std::map<std::uint32_t, Program> programs, peer_programs;  // that we, that the peer compiled
    std::uint32_t next_program = 1;
    TransferId next_transfer = 0;
    struct Open {                   // transfers that are open, and the block pairs that they hold
      std::uint32_t transfers = 0;
      std::uint64_t pairs = 0;
    } ours, theirs;                 // by who posted them
    std::deque<Key> backlog;        // ours that wait for room among the open
    std::map<std::uint8_t, std::list<TransferId>> ready;       // destinations with pieces to post
    std::vector<LeaseId> leases;    // that we granted to it
    LeaseId newest_lease_told = 0;  // of those that the peer granted
    // Blocks on which a right of this peer's ended: what it posted may be meant for that one.
    std::map<std::pair<RegionId, wire::LeaseMode>, BlockSet> ended_on;
    Time heartbeat_seen = 0;
    bool was_open = false, regions_known = false, up = false;
    std::uint32_t rails_pending = 0;
    std::set<std::string, std::less<>> lost_rails;  // transports of which one was up and went down
    bool stirred = false;           // its session has something to say
    Timers::iterator timer;
    Time timer_at = kNever;
  };

  struct Transfer {                 // what both ends keep
    Key key;
    bool ours = false;              // posted at this end
    TransferState state = TransferState::kQueued;
    std::shared_ptr<Handle> handle; // of our caller, if there is one
    std::shared_ptr<const Move> move;
    RegionId region = 0;            // at this end
    MemoryKind memory = MemoryKind::kHost;  // that it lies in
    std::uint32_t program = 0;
    wire::Bytes notify;
    std::uint8_t priority = 0;
    bool integrity = false;
    Time timeout_ns = 0;
    Timers::iterator timer;
    bool timed = false;
    Status reason;                  // once it fails
    LeaseId lease = 0;              // as in TransferSpec
    bool lease_named = false;
    std::vector<LeaseId> leases;    // that allow it
    bool counted = false;           // among the open of its session
    Time draining_since = 0;
    std::vector<std::pair<WorkId, RailId>> posted;  // few: as many as rails have windows for
  };
  struct Source : Transfer {
    std::uint32_t layers_ready = 0;
    std::uint32_t fence_slot = 0;
    std::uint64_t fence_generation = 0;
    bool fenced = true;             // holds a slot
    std::list<std::pair<std::uint16_t, std::uint32_t>> to_send;  // rail index, piece
    std::uint64_t num_credited = 0;  // pieces, those asked for again too
  };
  struct Destination : Transfer {
    RegionId remote_region = 0;
    std::uint32_t layers_ready = 0;
    std::uint32_t fence_slot = 0;
    std::uint64_t fence_generation = 0;
    Time lease_ttl_ns = kNever;     // a reader's
    bool lease_renewable = false;
    Time asked_at = 0;
    std::shared_ptr<Expectation> expectation;
    std::vector<bool> arrived;      // a bit for each piece, whichever rail brought it
    std::uint32_t num_arrived = 0;
    std::vector<std::uint32_t> left_in_layer;   // pieces
    std::vector<bool> confirmed;    // layers whose bytes are in and were read under a right
    std::uint32_t num_confirmed = 0;
    std::vector<std::uint32_t> to_confirm;      // layers that are in
    std::vector<std::uint32_t> confirming;      // covered by the fence check that is posted
    std::uint32_t next_piece = 0;
    std::list<std::uint32_t> redo;  // as `ready` and `to_send` a list: empty, it has allocated nothing
    std::uint64_t num_redone = 0;
    bool ready_listed = false;
    bool one_sided = false;         // some piece in was fetched: only the fence word confirms
    std::unordered_map<std::uint32_t, std::uint32_t> sums_here, sums_there;  // integrity
    std::vector<std::pair<RailId, std::uint32_t>> to_credit;  // posted in this pump, to be asked for
  };
  enum class WorkUse : std::uint8_t { kFetch, kReceive, kFence, kSend };
  struct WorkRecord {
    WorkUse use;
    Key transfer;
    RailId rail;
    std::uint32_t piece;
    bool draining = false;  // of a transfer that ended: its piece is waited for by nobody
  };
  // What has ended as a right, with works under it that have not: how many transfers are still to drain.
  struct EndingLease {
    std::optional<SessionKey> holder;
    LeaseState state;
    Status why;
    std::size_t num_draining;
  };
  struct EndingExpectation {
    std::shared_ptr<Expectation> expectation;
    TransferState state;
    Status why;
    std::size_t num_draining;
  };
  struct LeavingRegion {
    std::unique_ptr<Region> region;  // with what keeps its memory
    std::size_t num_draining;
  };

  // engine.cpp
  void flush(Peer& peer);
  void send(Peer& peer, const wire::Message& message);
  void on_message(Peer& peer, wire::Message message);
  void opened(Peer& peer);
  void check_up(Peer& peer);
  void lose(SessionKey key, Status reason);
  void schedule_session(Peer& peer);
  void attach(Peer& peer, Remote& remote, RailId rail);
  void count_posted(Rail& rail);
  void said_again(Rail& rail);
  void watch_rail(RailId id, Time late = 0);  // `late`: how much too late this agent asks
  void forget_rail(RailId id);
  template <class T>
  void bury(std::unique_ptr<T> owned) {
    graveyard_.emplace_back(owned.release(), [](void* dead) { delete static_cast<T*>(dead); });
  }
  static void forget_programs(Peer& peer, RegionId gone, bool of_peer);
  void on(Peer& peer, wire::Region& region);
  void on(Peer& peer, const wire::RegionGone& gone);
  void on(Peer& peer, wire::Program& program);
  void on(Peer& peer, const wire::Lease& lease);
  void on(Peer& peer, const wire::LeaseEnded& ended);
  void on(Peer& peer, wire::Offer& offer);
  void on(Peer& peer, wire::Request& request);
  void on(Peer& peer, const wire::Accept& accept);
  void on(Peer& peer, const wire::Credit& credit);
  void on(Peer& peer, const wire::LayersReady& ready);
  void on(Peer& peer, const wire::Checksums& checksums);
  void on(Peer& peer, const wire::Done& done);
  void on(Peer& peer, const wire::Fail& fail);
  Peer* find_peer(SessionKey key);
  const Peer* find_peer(SessionKey key) const;
  Peer* open_peer(SessionKey key);
  Status lost_status(SessionKey key) const;
  void set_timer(Transfer& transfer, TimerKind kind, Time at);
  void clear_timer(Transfer& transfer);
  void arm(Time at, TimerKind kind, std::uint64_t a, std::uint64_t b, Timers::iterator& out);

  // engine_transfer.cpp
  std::shared_ptr<Handle> new_handle(std::uint32_t first_layer, std::uint32_t num_layers);
  void end_handle(const std::shared_ptr<Handle>& handle, TransferState state, Status status,
                  std::vector<std::uint32_t> failed);
  bool has_room(const Peer::Open& open, std::uint64_t num_pairs) const;
  void count_open(Peer& peer, Transfer& transfer);
  void count_closed(Peer& peer, Transfer& transfer);
  void start_backlog(Peer& peer);
  // Checks a peer's TransferSpec against our half of it; the result is our region.
  Result<const Region*> check_spec(Peer& peer, const wire::TransferSpec& spec, Footprint::Half ours);
  // Takes the spec's tables.
  static std::shared_ptr<Move> make_move(wire::TransferSpec& spec, const Program& program,
                                         const Region& local, RegionId remote);
  static wire::TransferSpec spec_of(const Transfer& transfer);
  static void forget_work(Transfer& transfer, WorkId work);
  static std::vector<std::uint32_t> blocks_of(const Move& move, Footprint::Half half,
                                              const std::vector<bool>& pairs);
  void refuse(Peer& peer, TransferId transfer, const Status& why);

  // engine_source.cpp
  Status tell_offer(Peer& peer, Source& source);
  void send_pieces(Peer& peer, Source& source);
  void fail_source(Source& source, TransferEvent event, Status why, bool tell_peer);
  void drained_source(Source& source);
  void release_fence(Source& source);
  Source* find_source(Key key);

  // engine_destination.cpp
  void begin_moving(Peer& peer, Destination& destination);
  void list_ready(Peer& peer, Destination& destination);
  bool post_next(Peer& peer, bool& progressed);
  std::optional<std::uint32_t> next_piece(Destination& destination);
  Rail* choose_rail(Peer& peer, Destination& destination, bool& reachable);
  void piece_in(Peer& peer, Destination& destination, std::uint32_t piece);
  void count_piece(Peer& peer, Destination& destination, std::uint32_t piece);
  void redo(Peer& peer, Destination& destination, std::uint32_t piece);
  void confirm(Peer& peer, Destination& destination);
  void redo_unconfirmed(Peer& peer, Destination& destination);
  void confirmed(Peer& peer, Destination& destination, std::span<const std::uint32_t> layers);
  void compare_sums(Peer& peer, Destination& destination, std::uint32_t piece);
  void flush_credits(Peer& peer, Destination& destination);
  void finish_destination(Peer& peer, Destination& destination);
  void fail_destination(Destination& destination, TransferEvent event, Status why, bool tell_peer);
  void drained_destination(Destination& destination);
  std::vector<std::uint32_t> failed_blocks(const Destination& destination) const;
  // Redoing is bounded: a rail that fails everything must not keep a transfer busy for ever.
  static std::uint64_t max_redone(const PieceGrid& grid) { return 64 + 4 * std::uint64_t{grid.num_pieces()}; }
  Destination* find_destination(Key key);
  void confirm_dirty();

  // engine_path.cpp
  bool carries(const Remote& remote, RailId rail, MemoryKind memory) const;
  bool reaches(const Remote& remote, MemoryKind memory) const;
  Status check_path(const Peer& peer, const Region& local, const Remote& remote, bool fetched_here) const;
  Status check_integrity(const Region& local) const;
  void end_pathless(Peer& peer);

  // engine_lease.cpp
  Status authorize(Peer& peer, Destination& destination);
  Status find_leases(const Peer& peer, Transfer& transfer, wire::LeaseMode mode) const;
  void unpark(Peer& peer);
  static bool may_come_true(const Status& refusal);
  void end_lease(Lease& lease, LeaseEvent event, const Status& why);
  void end_leases(RegionId region, const Status& why);
  void renew_leases(Peer& peer);
  LeaseId draw_bearer_id();
  void end_expectation(std::uint64_t handle, TransferState state, Status why);

  // engine_fence.cpp
  void stop_works(Transfer& transfer, TimerKind kind);
  void tell_draining(Transfer& transfer, TimerKind kind);
  void drained(const Transfer& transfer);
  void lease_fenced(LeaseId id, std::optional<SessionKey> holder, LeaseState state, const Status& why);
  void expectation_fenced(const Expectation& expectation, TransferState state, Status why);
  void let_streams_go();

  const EngineConfig config_;
  EngineHost& host_;
  Time now_ = 0;
  std::map<SessionKey, std::unique_ptr<Peer>> peers_;
  std::map<SessionKey, PeerView> lost_;           // the newest kMaxLost
  std::map<RailId, Rail> rails_;
  RegionTable regions_;
  std::map<Key, std::unique_ptr<Source>> sources_;
  std::map<Key, std::unique_ptr<Destination>> destinations_;
  std::unordered_map<WorkId, WorkRecord> works_;
  std::unordered_map<std::uint64_t, std::pair<bool, Key>> handles_;  // id -> is destination, key
  std::map<LeaseId, Lease> leases_;
  std::map<std::uint64_t, std::shared_ptr<Expectation>> expectations_;  // by handle
  std::map<LeaseId, EndingLease> ending_leases_;
  std::map<std::uint64_t, EndingExpectation> ending_expectations_;  // by handle
  std::map<RegionId, LeavingRegion> leaving_regions_;
  std::map<std::string, std::uint64_t> tags_;      // an expectation's tag -> its handle
  std::map<std::uint64_t, Timers::iterator> expectation_timers_;
  std::map<LeaseId, Timers::iterator> lease_timers_;
  std::unordered_map<LeaseId, LeaseState> ended_leases_;
  std::deque<LeaseId> ended_lease_ids_;           // those, as they ended: the newest kMaxEndedLeases
  Timers timers_;
  std::vector<std::uint32_t> free_slots_;
  std::set<Key> sending_;                         // sources with pieces that wait for their rail
  std::set<Key> dirty_;                           // destinations with layers to confirm or credits to send
  std::set<Key> retry_;                           // the same, put off by a rail that said again
  SessionKey next_session_ = 1;
  RegionId next_region_ = 1;
  WorkId next_work_ = 1;
  LeaseId next_lease_ = 1;
  std::uint64_t next_handle_ = 1;
  std::uint32_t outstanding_pieces_ = 0;
  // What a round has to look at, so that its cost does not grow with peers that are idle.
  std::set<SessionKey> ready_peers_;              // with pieces to post
  std::set<SessionKey> backlogged_;               // with transfers that wait for room
  std::vector<SessionKey> stirred_;               // with frames to send
  std::vector<wire::Bytes> outgoing_;             // of one of them, and whose turn it is: kept, as making
  std::vector<SessionKey> turns_;                 // them costs
  std::vector<RailId> again_rails_;
  SessionKey last_served_ = 0;
  // What ended in this round; a caller up the stack may still hold a reference until pump().
  std::vector<std::unique_ptr<void, void (*)(void*)>> graveyard_;
  bool again_ = false;
  bool closed_ = false;
  EngineStats stats_;
};

}  // namespace kvxfer
