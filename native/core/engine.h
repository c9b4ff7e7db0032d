// What an agent does, as pure code: sessions, leases and transfers from both ends. It has no clock, no
// socket, no thread and no lock: every input is a call that carries the time, and everything that it wants
// done goes out through EngineHost. Production drives it with Runtime, tests with a simulated network.
//
// Engine hands each input to the part that it concerns, and ends what several parts hold. The parts
// (core/engine/) have state of their own; each knows only those above it in this list:
//
//   context          time of the call, timers, counters, the host
//   sessions         conversations with peers: frames in and out
//   messages         bytes between callers, without a transfer
//   peer limits      what peers are limited to, by their names
//   rails            the rails of peers, and works under way on them
//   redials          when those are dialled again that were lost
//   regions          memory of ours          peer_regions  memory of peers, and the rails that reach it
//   programs         copy programs between the two, checked
//   handles          what our callers hold
//   records          how each transfer ended, for a watcher outside the engine
//   tag memory       how tags ended that no caller waits for any more
//   leases           rights that we granted  expectations  rights to one tag's writes
//   admission        how many transfers of a session are open, and which of ours wait
//   draining         transfers that have ended while works of them are under way
//   sums             checksums of pieces, in slices
//   sources          transfers whose bytes are ours
//   destinations     transfers whose bytes become ours: scheduled, accounted
//   posting          what our callers ask for becomes a source or a destination
//
// So a part never ends what stands below it in the list. It returns what happened (a Status that is
// a breach of the protocol, a lease that was taken out), and Engine does the rest.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/admission.h"
#include "core/engine/context.h"
#include "core/engine/destinations.h"
#include "core/engine/draining.h"
#include "core/engine/expectations.h"
#include "core/engine/handles.h"
#include "core/engine/leases.h"
#include "core/engine/messages.h"
#include "core/engine/peer_limits.h"
#include "core/engine/peer_regions.h"
#include "core/engine/posting.h"
#include "core/engine/programs.h"
#include "core/engine/rails.h"
#include "core/engine/records.h"
#include "core/engine/redials.h"
#include "core/engine/regions.h"
#include "core/engine/sessions.h"
#include "core/engine/sources.h"
#include "core/engine/tag_memory.h"
#include "core/engine_host.h"

namespace kvxfer {

class Engine {
 public:
  // `workers` compute checksums beside the calling thread, within the call.
  Engine(EngineConfig config, EngineHost& host, std::shared_ptr<CopyWorkers> workers = nullptr)
      : context_(std::move(config), host, std::move(workers)) {}

  // ---- connections
  SessionKey add_session(Time now, SessionRole role);
  // The dialler of this session ends it if connection and handshake take too long.
  void on_dialling(Time now, SessionKey key);
  void on_frame(Time now, SessionKey key, wire::ByteSpan frame);
  void on_disconnected(Time now, SessionKey key, const std::string& why);
  void on_unreachable(Time now, SessionKey key, const std::string& why);  // no connection was ever made
  // Ends a session from this side: sends GOODBYE to the peer, and fails everything of the session with
  // `code`.
  void end_session(Time now, SessionKey key, Code code, const std::string& text);
  // Memory was lacking outside the engine for something that this session caused: the session ends.
  void starve(Time now, SessionKey key) noexcept {
    context_.now = now;
    context_.starve(key);
    end_starved();
  }
  std::uint32_t max_body(SessionKey key) const {
    const Peer* peer = sessions_.find(key);
    return peer == nullptr ? 0 : peer->session().max_body();
  }
  Session* session(SessionKey key) {
    Peer* peer = sessions_.find(key);
    return peer == nullptr ? nullptr : &peer->session();
  }
  // The secrets that sessions accept if they begin from now on. `second`: "" for none.
  void set_secrets(std::string first, std::string second) {
    sessions_.set_secrets(std::move(first), std::move(second));
  }
  Session* find_session(const wire::Id128& id, SessionKey& key) { return sessions_.find_session(id, key); }
  // The budget of a session; its rails charge it, too. Null: there is no such session.
  std::shared_ptr<Budget> budget(SessionKey key) const {
    const Peer* peer = sessions_.find(key);
    return peer == nullptr ? nullptr : peer->budget();
  }

  // ---- rails
  void rail_up(Time now, SessionKey key, const RailInfo& rail);
  // A rail that session_open started or dial_rail dialled has failed; without a name it is not dialled
  // again. `transport`: its name, if known.
  void rail_failed(Time now, SessionKey key, std::optional<wire::RailName> rail, std::string note,
                   std::string_view transport = {});
  void rail_down(Time now, RailId rail, const std::string& why);
  void on_completion(Time now, const Completion& completion);    // CompletionKind::kWork
  // Switches all rails of one transport. Off: rails that are up go down as lost ones do, none is dialled,
  // and rails that peers dial are refused (is_off). kUnsupported, and nothing is done, if the agent
  // requires the transport, or if a session would end with its last rail; the message names the peers. On:
  // rails that this end dials are dialled at once.
  Status switch_rails(Time now, const std::string& transport, bool on);
  bool is_off(std::string_view transport) const { return rails_.is_off(transport); }
  std::vector<std::string> rails_off() const { return rails_.all_off(); }
  // A rail that a peer dialled was refused because its transport is off.
  void refused_rail(Time now, SessionKey key, const wire::RailName& rail, std::string_view transport);

  // ---- time
  void on_time(Time now);
  Time next_deadline() const { return context_.timers.next(); }
  // Posts as much as rails can take, and flushes what sessions have to send. Call it after inputs.
  void pump(Time now);
  // True if a rail said "again" and no descriptor will announce when it can take more: call pump soon.
  bool wants_pump() const noexcept { return context_.pump_again; }

  // ---- regions
  Result<RegionId> register_region(Time now, std::unique_ptr<Region> region);
  // Ends all transfers and rights of the region, and begins none any more. Works on it may still be under
  // way: its memory is its owner's again when is_leaving(id) is false, which EngineHost::region_fenced
  // reports.
  Status deregister_region(Time now, RegionId id);
  bool is_leaving(RegionId id) const { return regions_.is_leaving(id); }
  const Region* region(RegionId id) const { return regions_.find(id); }
  // Reserves an id. A region may be registered under it later, or never.
  RegionId reserve_region_id() noexcept { return regions_.reserve_id(); }
  // One more rail has registered the region, or could not: peers are told of the keys. Does nothing if the
  // region is gone.
  void add_keys(Time now, RegionId id, wire::TransportKeys keys);
  void add_note(RegionId id, std::string note);
  // The node is known once the region's pages are there. Transfers that were posted before go on as they
  // began.
  void region_lies_on(RegionId id, int numa_node) { regions_.lies_on(id, numa_node); }
  std::size_t num_regions() const noexcept { return regions_.all().size(); }

  // ---- transfers and leases of this end's callers
  Result<std::uint32_t> install_program(Time now, SessionKey peer, bool write, RegionId src, RegionId dst,
                                        CopyProgram program);
  // Forgets a program when nothing of ours is posted by it any more: the next program gets its number.
  void forget_program(SessionKey peer, std::uint32_t program) { programs_.forget(peer, program); }
  Result<std::shared_ptr<Handle>> post(Time now, TransferRequest request);
  void layers_ready(Time now, std::uint64_t handle, std::uint32_t layers);
  // Cancels a transfer or an expectation: its handle ends when none of its works is under way any more.
  void cancel(Time now, std::uint64_t handle);
  // Cancels this end of a transfer, whichever end posted it. False: it is not open (any more).
  bool cancel_transfer(Time now, TransferKey key, bool is_source);
  Result<std::shared_ptr<Handle>> expect(Time now, wire::Bytes tag, RegionId region,
                                         std::vector<std::uint32_t> blocks, std::uint32_t first_layer,
                                         std::uint32_t num_layers, const Needed& needed,
                                         std::optional<SessionKey> from, Time timeout_ns,
                                         wire::Bytes context = {});
  // Grants a lease to a peer, and tells it. Or grants it to the bearer: any peer, or any of that name,
  // that names the id. Such an id cannot be guessed, and reaches its bearer by other ways. A bearer's
  // lease permits reading only, and is not renewable. A caller that must pass the id on before the grant
  // draws it itself (`bearer_id`: kBearerBit and 62 random bits).
  Result<LeaseId> grant(Time now, LeaseTerms terms);
  // The lease lasts for `ttl_ns` from now on, or longer if it would have. Its holder is not told. False:
  // it has ended.
  bool extend(Time now, LeaseId lease, Time ttl_ns);
  // The right ends at once. The owner may reuse the blocks when the lease's state is no longer kEnding;
  // kLeaseEnded is emitted then.
  void revoke(Time now, LeaseId lease);
  std::optional<LeaseState> lease_state(LeaseId lease) const { return leases_.state(lease); }
  // False: its holder has not heard of it yet. The engine then asks the holder, and emits kLeaseAcknowledged when
  // the holder has heard of the lease, or when the right ends before. True also if the lease has no holder
  // to tell, or has ended.
  bool await_acknowledged(Time now, LeaseId lease);

  // ---- messages
  // Sends to a peer, at once. kExhausted: messages that its caller has not read take all of the room;
  // kRoom says when to try again.
  Status send_message(Time now, SessionKey peer, wire::Bytes payload);
  // True if there is room for a message of so many bytes. If not, kRoom says when to ask again.
  Result<bool> has_room(Time now, SessionKey peer, std::uint64_t nbytes);
  // Our caller took a message whose event `tells`, and its charge was released.
  void message_taken(Time now, SessionKey peer);

  // ---- limits of peers, by name, for sessions that are open and for those that come
  Status limit_peer(Time now, const std::string& name, const PeerLimit& limit);
  std::vector<std::pair<std::string, PeerLimit>> peer_limits() const { return limits_.all(); }

  // ---- views
  std::optional<PeerView> peer(SessionKey key) const;
  std::shared_ptr<const Sender> sender(SessionKey key) { return sessions_.sender(key); }  // of its mail
  std::vector<SessionKey> open_peers() const { return sessions_.up(); }
  Result<std::vector<RemoteRegionView>> peer_regions(SessionKey key) const {
    return peer_regions_.views(key);
  }
  // The rails over which pages come from a peer's region to ours; `converts`: by a program that converts.
  Result<std::vector<RailWay>> ways(SessionKey peer, RegionId ours, RegionId theirs, bool converts) const;
  // From now on each end of a transfer, and each expectation, leaves a record there when it ends. Null: nowhere.
  void watch_records(RecordRing* ring) noexcept { records_.watch(ring); }
  // Walk the open objects in bounded holds of the gate; the caller keeps the place between them. An object
  // that begins or ends between two holds may be missed. open_transfers returns how many it found;
  // append_leases returns false when it has reached the end.
  struct OpenPlace {
    enum class Of { kSources, kDestinations, kExpectations, kNothing } of = Of::kSources;
    TransferKey transfer{kNobody, 0};
    Expectations::Place expectation{0, 0};
  };
  std::size_t open_transfers(OpenPlace& place, std::span<Record> records) const noexcept;
  bool append_leases(Time now, LeaseId& last, std::size_t most, std::vector<LeaseView>& views) {
    context_.now = now;
    return leases_.append_views(last, most, views);
  }
  const EngineStats& stats() const noexcept { return context_.stats; }
  EngineLoad load() const noexcept;
  std::size_t num_transfers() const noexcept { return sources_.size() + destinations_.size(); }

  // Ends everything. Afterwards every handle is final once all posted works have completed.
  void close(Time now, const Status& why = {Code::kClosed, "the agent was closed"});
  // After close, once the transports are gone: gives up the works that have not completed. Nothing of them
  // lands any more.
  void abandon(Time now);

 private:
  void receive(SessionKey key, wire::ByteSpan frame);
  bool has_work() const noexcept {  // for pump()
    return rails_.has_work() || destinations_.has_work() || sources_.has_work() ||
           admission_.has_any_backlog() || sessions_.has_work() || context_.has_starved() ||
           sessions_.has_undecided() || sessions_.first_behind() != nullptr || !leaving_.empty() ||
           expectations_.has_rest();
  }
  void dispatch(Peer& peer, wire::Message& message);
  void opened(Peer& peer);
  void admit(Peer& peer);
  void decide_names();
  void tell_regions();
  std::size_t tell_regions(Peer& peer, std::size_t most_nbytes);
  void check_up(Peer& peer);
  // A required transport for which the session has no rail; "" for none.
  std::string missing_transport(SessionKey key) const;
  void rail_given_up(Peer& peer, const wire::RailDown& down);
  void rail_down(Rail& gone, const std::string& why);
  void take_down(Rail& rail);
  void log(std::string words) {  // lost if memory is lacking for it
    context_.serve(kNobody,
                   [&] { context_.host.emit({.kind = EventKind::kLog, .message = std::move(words)}); });
  }
  void rail_failed(Peer& peer, std::optional<wire::RailName> rail, std::string note, bool is_off);
  void note_redial(Peer& peer, const wire::RailName& rail, std::string words, bool is_off);
  // Runs work that a peer, or its rail, caused: sets the time of the call, and ends the sessions for which
  // memory was lacking.
  template <class Work>
  void serve(Time now, SessionKey key, Work&& work) {
    context_.now = now;
    context_.serve(key, std::forward<Work>(work));
    if (context_.has_starved()) end_starved();
  }
  void end_starved() noexcept;
  void lose(SessionKey key, Status reason);
  bool finish_leaving() noexcept;
  void end_parts(SessionKey key, const Status& reason);
  void end_lease(LeaseId lease, LeaseEvent event, const Status& why);
  void end_expectations(const std::vector<std::uint64_t>& handles, const Status& why);
  void end_pathless(Peer& peer);
  Status region_gone(Peer& peer, RegionId gone);
  bool begins(const Peer& peer, TransferId transfer) const;
  Time renewal_ns(SessionKey key) const;  // how often this end needs a heartbeat of its own
  void on_timer(const Timers::Due& due, Time late);
  SessionKey session_of(const Timers::Due& due);

  Context context_;
  Sessions sessions_{context_};
  Messages messages_{context_, sessions_};
  PeerLimits limits_{context_, sessions_};
  Rails rails_{context_};
  Redials redials_{context_, rails_};
  Regions regions_{context_};
  PeerRegions peer_regions_{context_, sessions_, rails_};
  Programs programs_{sessions_, regions_, peer_regions_};
  Handles handles_{context_};
  Records records_{context_};
  Leases leases_{context_, sessions_, regions_};
  TagMemory tag_memory_;
  Expectations expectations_{context_, sessions_, regions_, leases_, handles_, records_, tag_memory_};
  Admission admission_{context_.config};
  Draining draining_{context_, sessions_, rails_, regions_, leases_};
  Sources sources_{context_,   sessions_, rails_,   programs_, leases_,
                   admission_, handles_,  records_, draining_};
  Destinations destinations_{context_,   sessions_, limits_,  rails_,        peer_regions_,
                             regions_,   programs_, leases_,  expectations_, tag_memory_,
                             admission_, handles_,  records_, draining_};
  Posting posting_{context_,  sessions_, limits_,  rails_,     regions_, peer_regions_,
                   programs_, leases_,   handles_, admission_, sources_, destinations_};
  std::map<SessionKey, Status> leaving_;  // lost sessions that have something left: memory was lacking
  bool closed_ = false;
};

}  // namespace kvxfer
