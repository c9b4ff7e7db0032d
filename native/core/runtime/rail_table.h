// The transports of an agent, and for each of their peers the session and rail that it belongs to.
//
// The engine knows rails by number, a transport knows peers; this table translates between them. Connections
// decides which sockets become rails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/engine.h"
#include "core/runtime_options.h"
#include "core/system/nvtx.h"
#include "core/transport_registry.h"
#include "kvxfer/transport.h"

namespace kvxfer {

class RailTable {
 public:
  // Makes the transports of the kinds that the options name.
  Status add_transports(const RuntimeOptions& options, Reactor& reactor, const FenceTable& fences,
                        const std::shared_ptr<CopyWorkers>& workers);

  // ---- the transports, by index: instances of one kind in a row; the nearest kind first, among those the
  // preferred
  const std::vector<const TransportKind*>& kinds() const noexcept { return kinds_; }
  std::size_t size() const noexcept { return transports_.size(); }
  const TransportKind& kind(std::size_t transport) const { return *kind_of_[transport]; }
  Transport& at(std::size_t transport) const { return *transports_[transport]; }
  // Shared with a caller that registers memory with the transport without the gate.
  const std::shared_ptr<Transport>& share(std::size_t transport) const { return transports_[transport]; }
  std::uint16_t instance_of(std::size_t transport) const;  // among those of its kind
  std::uint32_t rank_of(const TransportKind& kind) const;  // as the agent prefers them: Capabilities::rank
  // True if it holds for some kind.
  bool any(bool (*is_so)(const TransportKind&)) const;
  // True if peers of this host may fetch by themselves: such a peer can fetch anything.
  bool hands_out_memory(std::size_t transport) const;
  // Which instance of that transport is to serve a rail that a peer dials: the one that serves fewest of
  // the session's other rails, so that both ends pair instances alike. SIZE_MAX: no instance is in use.
  std::size_t instance_for(std::string_view transport, SessionKey session, const wire::RailName& rail) const;

  // ---- rails come and go
  struct NewRail {
    SessionKey session = 0;
    wire::RailName name;
    std::size_t transport = 0;
    std::uint16_t peer_instance = 0;
    Charge descriptor;  // its socket's
  };
  // Hands an authenticated socket to its transport; the rail is to be up by `due_at`.
  Status bind(NewRail rail, UniqueFd socket, const ConnectInfo& info, Time due_at);
  void unbind_session(SessionKey session);
  // A peer that dials a rail anew has given up an earlier rail that was coming up: drops that one. A rail
  // that is up stays until the new one is up; the engine sees to that.
  void drop_unready(SessionKey session, std::uint16_t index);
  Time next_due() const { return due_.empty() ? kNever : due_.front().first; }
  // Ends rails that are not up in time; `limit` says in words how long that is.
  void expire(Time now, const std::string& limit, Engine& engine);
  void disconnect_all();

  // Rails that are up and have more to say than their name (Transport::path_to); each begins with the
  // name.
  std::vector<std::string> paths(SessionKey session) const;
  std::string path(RailId rail) const;  // for one rail, without its name

  // ---- driving
  // Lets transports move data. True if something ended, or if some have not had their turn: an agent has
  // as many rails as its host has NICs, so this bounds how long all of them together keep the gate. `now`:
  // when it began. `all`: each rail has a turn.
  bool poll(Time now, Engine& engine, bool all = false);
  bool busy() const;  // one of the rails has something to move
  bool arm();  // before the driving thread sleeps; false if something came meanwhile

  // ---- as EngineHost's
  Code post(RailId rail, const Work& work);
  WorkKind choose(RailId rail, const Move& move, std::uint32_t piece) const;
  void cancel(RailId rail, std::span<const WorkId> works);
  Status attach(RailId rail, const RemoteRegion& region);
  void detach(RailId rail, RegionId region);
  void drop_rail(RailId rail);
  void region_fenced(RegionId region);

  // ---- peers that may still have memory of a region mapped
  bool held_by_peers(RegionId region) const;
  std::vector<std::string> give_up_holders(RegionId region);

  // With everything that they opened. They end when the caller drops them, which may wait for a device.
  std::vector<std::shared_ptr<Transport>> take_transports();
  void forget_works() { ranges_.clear(); }

 private:
  struct Bound {  // a peer of a transport
    SessionKey session = 0;
    wire::RailName name;
    RailId id = 0;  // 0 until it is up
    Time due_at = kNever;  // when it is to be up
    Charge descriptor;
    std::uint16_t peer_instance = 0;
  };
  using Place = std::pair<std::size_t, PeerId>;  // a transport, and its peer
  void pass_on(std::size_t transport, const Completion& completion, Time now, Engine& engine);
  void unbind(Place place);
  void forget_empty(SessionKey session);  // if the session has no rail any more
  // The rails of one session for which meant() is true.
  template <class Meant>
  void unbind_all(SessionKey session, Meant&& meant);
  const Place* find(RailId rail) const {
    const auto found = places_.find(rail);
    return found == places_.end() ? nullptr : &found->second;
  }

  std::vector<const TransportKind*> kinds_;
  std::vector<std::shared_ptr<Transport>> transports_;
  std::vector<const TransportKind*> kind_of_;  // of transports_
  std::map<Place, Bound> bound_;
  std::unordered_map<SessionKey, std::vector<Place>> of_session_;  // the same, by session
  std::map<RailId, Place> places_;
  RailId next_rail_ = 1;
  std::size_t first_ = 0;  // the transport whose turn is first
  std::deque<std::pair<Time, Place>> due_;  // in the order of their deadlines
  std::unordered_map<WorkId, nvtx::Range> ranges_;  // of posted works, if a tool listens
  // Of one transport in one round; kept, as making the vector costs.
  std::vector<Completion> completions_{64};
};

}  // namespace kvxfer
