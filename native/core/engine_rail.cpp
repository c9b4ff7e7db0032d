// Rails of a peer: up, down, and when one that stands still is given up.
#include <algorithm>

#include "core/engine.h"

namespace kvxfer {
namespace {

// Of a process that dies the kernel ends one socket after the other, within a millisecond unless the machine
// is busy: only later is a rail that went down the rail's loss and not the peer's.
constexpr Time kAfterRailDown = 100'000'000;

}  // namespace

void Engine::rail_up(Time now, SessionKey key, const RailInfo& info) {
  now_ = now;
  Peer* peer = find_peer(key);
  if (peer == nullptr) {
    host_.drop_rail(info.id);
    return;
  }
  Rail& rail = rails_[info.id];
  rail.info = info;
  rail.session = key;
  peer->rails.push_back(info.id);
  for (auto& [id, remote] : peer->regions) attach(*peer, remote, info.id);
  if (peer->rails_pending > 0) --peer->rails_pending;
  check_up(*peer);
}

void Engine::rail_failed(Time now, SessionKey key, std::string note) {
  now_ = now;
  Peer* peer = find_peer(key);
  if (peer == nullptr) return;
  peer->notes.push_back(std::move(note));
  if (peer->rails_pending > 0) --peer->rails_pending;
  end_pathless(*peer);
  check_up(*peer);
}

void Engine::rail_down(Time now, RailId id, std::string why) {
  now_ = now;
  auto found = rails_.find(id);
  if (found == rails_.end()) return;
  const SessionKey key = found->second.session;
  const std::uint16_t index = found->second.info.index;
  Peer* peer = find_peer(key);
  const std::string words = std::string(found->second.info.capabilities.name) + " rail " +
                            std::to_string(found->second.info.index) + " went down: " + why;
  std::string transport(found->second.info.capabilities.name);
  forget_rail(id);
  if (peer == nullptr) return;
  peer->notes.push_back(words);
  peer->lost_rails.insert(std::move(transport));
  for (const Key& sending : sending_)
    if (Source* source = sending.first == key ? find_source(sending) : nullptr)
      std::erase_if(source->to_send, [&](const auto& entry) { return entry.first == index; });
  std::erase(peer->rails, id);
  for (auto& [region, remote] : peer->regions) {
    std::erase(remote.reach, id);
    std::erase_if(remote.unable, [id](const auto& entry) { return entry.first == id; });
  }
  // Control frames may still flow, but no page ever will: the peer is lost, say so at once.
  if (peer->rails.empty())
    end_session(now, key, Code::kPeerLost,
                "the last rail to " + quoted(peer->session->peer().name) + " is gone: " + words);
  else {
    Timers::iterator unused;
    arm(time_after(now_, kAfterRailDown), TimerKind::kPath, key, 0, unused);
  }
}

void Engine::forget_rail(RailId id) {
  auto found = rails_.find(id);
  if (found == rails_.end()) return;
  if (found->second.watch) timers_.erase(*found->second.watch);
  rails_.erase(found);
}

void Engine::said_again(Rail& rail) {
  rail.again = true;
  again_rails_.push_back(rail.info.id);
}

// A piece that we wait for is on its way.
void Engine::count_posted(Rail& rail) {
  ++outstanding_pieces_;
  if (rail.outstanding++ == 0) {
    rail.moved_at = now_;
    rail.forgiven = false;
  }
  if (!rail.watch) watch_rail(rail.info.id);
}

// A rail that is silent for as long as would end a session is given up while others live that could
// bring the same, though nobody said that it broke: a router between may forget a connection. The last one
// is kept; its transfers have their deadlines.
void Engine::watch_rail(RailId id, Time late) {
  Rail& rail = rails_.at(id);
  rail.watch.reset();
  if (rail.outstanding == 0) return;
  const Time silent = config_.session.silent_ns;
  Time at = time_after(rail.moved_at, silent);
  if (at <= now_) {
    const Peer* peer = find_peer(rail.session);
    // What came while this agent stood still it has not looked at yet; once, as in a session.
    const bool forgive = late >= silent / 4 && !std::exchange(rail.forgiven, true);
    const bool others =
        peer != nullptr && std::any_of(peer->rails.begin(), peer->rails.end(), [&](RailId other) {
          const auto has = [](const Remote& remote, RailId of) {
            return std::find(remote.reach.begin(), remote.reach.end(), of) != remote.reach.end();
          };
          return other != id &&
                 rails_.at(other).info.capabilities.memory.has(rail.info.capabilities.memory) &&
                 std::all_of(peer->regions.begin(), peer->regions.end(), [&](const auto& entry) {
                   return !has(entry.second, id) || has(entry.second, other);
                 });
        });
    if (!forgive && others) {
      const std::string why = std::to_string(rail.outstanding) + " pieces were due and none came for " +
                              std::to_string(silent / 1'000'000) + " ms";
      host_.drop_rail(id);
      rail_down(now_, id, why);
      return;
    }
    at = time_after(now_, silent);
  }
  arm(at, TimerKind::kRail, id, 0, rail.watch.emplace());
}

void Engine::attach(Peer& peer, Remote& remote, RailId id) {
  const Capabilities& capabilities = rails_.at(id).info.capabilities;
  RemoteRegion region{remote.region.id, remote.region.base, remote.region.spans, {}};
  bool offered = false;
  for (const wire::TransportKeys& keys : remote.region.keys)
    if (keys.transport == capabilities.name) {
      region.keys = keys.keys;
      offered = true;
    }
  if (!offered) return;  // the peer could not register it with that transport
  if (Status status = host_.attach(id, region); !status.ok()) {
    remote.notes.push_back(std::string(capabilities.name) + ": " + status.message());
    return;
  }
  remote.reach.push_back(id);
  // Some may have waited for a path.
  for (auto it = destinations_.lower_bound({peer.key, 0});
       it != destinations_.end() && it->first.first == peer.key; ++it)
    if (it->second->state == TransferState::kMoving && it->second->remote_region == region.id)
      list_ready(peer, *it->second);
}

}  // namespace kvxfer
