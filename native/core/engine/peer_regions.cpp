#include "core/engine/peer_regions.h"

#include <algorithm>

namespace kvxfer {
namespace {

std::string_view name_of(MemoryKind memory) { return memory == MemoryKind::kGpu ? "GPU" : "host"; }

std::string names_of(const std::vector<wire::TransportKeys>& keys) {
  std::string names;
  for (const wire::TransportKeys& each : keys) names += (names.empty() ? "" : ", ") + each.transport;
  return names.empty() ? "nothing" : names;
}

// Counts keys and spans once for each rail, since each may keep a copy of its own and few share one.
std::uint64_t nbytes_of(const PeerRegion& remote) {
  const wire::Region& region = remote.region;
  std::uint64_t nbytes =
      512 + region.name.size() + region.layout.size() + region.spans.size() * sizeof(MemorySpan);
  for (const wire::TransportKeys& each : region.keys)
    nbytes +=
        sizeof each + each.transport.size() + each.keys.size() + region.spans.size() * sizeof(MemorySpan);
  return nbytes;
}

bool has(const std::vector<Rail*>& rails, const Rail* rail) {
  return std::find(rails.begin(), rails.end(), rail) != rails.end();
}

}  // namespace

bool PeerRegion::comes_over(const Rail& rail, MemoryKind memory, bool converts) const {
  if (converts && !rail.capabilities().converts) return false;
  for (const auto& [which, of] : unable)
    if (which == &rail && of == memory) return false;
  return rail.capabilities().memory.has(memory);
}

bool PeerRegion::is_reached_from(MemoryKind memory, bool converts) const {
  for (const Rail* const rail : reach)
    if (comes_over(*rail, memory, converts)) return true;
  return false;
}

void PeerRegion::note(std::string words) {
  if (std::find(notes.begin(), notes.end(), words) == notes.end() && notes.size() < kMaxNotes)
    notes.push_back(std::move(words));
}

Status PeerRegions::add(const Peer& peer, wire::Region& region) {
  const SessionKey session = peer.key();
  std::map<RegionId, PeerRegion>& regions = sessions_regions_[session];
  const RegionId id = region.id;
  if (regions.size() >= wire::kMaxRegions && !regions.contains(id))
    return {Code::kProtocol, "REGION refused: too many regions"};
  auto [found, fresh] = regions.try_emplace(id);
  if (!fresh) return add_keys(peer, found->second, std::move(region.keys));
  found->second.region = std::move(region);
  if (Status status = charge(peer, found->second); !status.ok()) return status;
  for (Rail* rail : rails_.of(session)) attach(found->second, *rail);
  return sessions_.tell_caller(peer, EventKind::kRegion, id);
}

Status PeerRegions::charge(const Peer& peer, PeerRegion& remote) {
  remote.charge.release();
  remote.charge = Charge::take(peer.budget(), Resource::kBytes, nbytes_of(remote));
  if (remote.charge) return {};
  return {Code::kExhausted, "REGION refused: the descriptions of your regions take too much memory: " +
                                peer.budget()->in_words(Resource::kBytes)};
}

// Ids are never reused: a repetition brings only keys of rails that have registered the region since.
Status PeerRegions::add_keys(const Peer& peer, PeerRegion& remote, std::vector<wire::TransportKeys> told) {
  std::vector<wire::TransportKeys>& known = remote.region.keys;
  for (wire::TransportKeys& keys : told) {
    const auto is_same = [&](const wire::TransportKeys& each) {
      return each.transport == keys.transport && each.instance == keys.instance;
    };
    if (known.size() == wire::kMaxRegionKeys || std::any_of(known.begin(), known.end(), is_same)) continue;
    known.push_back(std::move(keys));
    if (Status status = charge(peer, remote); !status.ok()) return status;
    for (Rail* rail : rails_.of(peer.key()))
      if (rail->capabilities().name == known.back().transport &&
          rail->info().peer_instance == known.back().instance)
        attach(remote, *rail);
  }
  return {};
}

PeerRegion* PeerRegions::find(SessionKey session, RegionId id) {
  return const_cast<PeerRegion*>(std::as_const(*this).find(session, id));
}

const PeerRegion* PeerRegions::find(SessionKey session, RegionId id) const {
  auto regions = sessions_regions_.find(session);
  if (regions == sessions_regions_.end()) return nullptr;
  auto found = regions->second.find(id);
  return found == regions->second.end() ? nullptr : &found->second;
}

void PeerRegions::remove(SessionKey session, RegionId id) {
  std::map<RegionId, PeerRegion>& regions = sessions_regions_.at(session);
  auto found = regions.find(id);
  for (const Rail* rail : found->second.reach) context_.host.detach(rail->id(), id);
  regions.erase(found);
}

Result<std::vector<RemoteRegionView>> PeerRegions::views(SessionKey session) const {
  if (std::as_const(sessions_).find(session) == nullptr) return sessions_.lost_status(session);
  std::vector<RemoteRegionView> views;
  auto regions = sessions_regions_.find(session);
  if (regions == sessions_regions_.end()) return views;
  for (const auto& [id, remote] : regions->second) {
    RemoteRegionView view{remote.region, "", remote.notes};
    std::uint32_t best = UINT32_MAX;
    for (const Rail* rail : remote.reach) {
      if (rail->capabilities().rank < best) view.path = rail->capabilities().name;
      best = std::min(best, rail->capabilities().rank);
    }
    views.push_back(std::move(view));
  }
  return views;
}

std::vector<RailWay> PeerRegions::ways(SessionKey session, const Region& local, const PeerRegion& remote,
                                       bool converts) const {
  const MemoryKind memory = local.memory.kind;
  const auto why_not = [&](const Rail& rail) -> std::string {
    const Capabilities& takes = rail.capabilities();
    const auto is_its = [&](const wire::TransportKeys& keys) { return keys.transport == takes.name; };
    if (!takes.memory.has(memory))
      return "it does not reach " + std::string(name_of(memory)) + " memory here";
    if (converts && !takes.converts) return "the elements are converted on the way, and it cannot convert";
    if (std::none_of(local.keys.begin(), local.keys.end(), is_its))
      return "region " + quoted(local.name) + " here is not registered with it";
    if (!has(remote.reach, &rail))
      return "it does not reach region " + quoted(remote.region.name) + " of the peer";
    return remote.comes_over(rail, memory, converts) ? ""
                                                     : "it was tried between the two regions, and failed";
  };
  std::vector<RailWay> ways;
  for (const Rail* const rail : rails_.of(session)) {
    const Capabilities& takes = rail->capabilities();
    const std::uint32_t rank = takes.rank_for(local.memory);
    ways.push_back({rail->id(), std::string(takes.name), rank, rank > takes.rank, takes.staged.has(memory),
                    why_not(*rail)});
  }
  std::stable_sort(ways.begin(), ways.end(), [](const RailWay& one, const RailWay& other) {
    return std::pair(!one.why_not.empty(), one.rank) < std::pair(!other.why_not.empty(), other.rank);
  });
  return ways;
}

std::vector<RegionId> PeerRegions::rail_up(Rail& rail) {
  std::vector<RegionId> reached;
  for (auto& [id, remote] : sessions_regions_[rail.session()])
    if (attach(remote, rail)) reached.push_back(id);
  return reached;
}

void PeerRegions::rail_down(const Rail& rail) {
  for (auto& [id, remote] : sessions_regions_[rail.session()]) {
    std::erase(remote.reach, &rail);
    std::erase_if(remote.unable, [&](const auto& entry) { return entry.first == &rail; });
  }
}

void PeerRegions::rail_failed(PeerRegion& region, Rail* rail, MemoryKind memory) {
  if (rail == nullptr) return;  // it went down, and reaches nothing any more
  if (rail->capabilities().memory.has(MemoryKinds(MemoryKind::kHost) | MemoryKind::kGpu)) {
    region.unable.emplace_back(rail, memory);
  } else {
    std::erase(region.reach, rail);
    context_.host.detach(rail->id(), region.region.id);
  }
}

bool PeerRegions::others_replace(const Rail& rail) const {
  const std::vector<Rail*>& alive = rails_.of(rail.session());
  auto regions = sessions_regions_.find(rail.session());
  return std::any_of(alive.begin(), alive.end(), [&](const Rail* other) {
    return other != &rail && other->capabilities().memory.has(rail.capabilities().memory) &&
           (regions == sessions_regions_.end() ||
            std::all_of(regions->second.begin(), regions->second.end(), [&](const auto& entry) {
              return !has(entry.second.reach, &rail) || has(entry.second.reach, other);
            }));
  });
}

bool PeerRegions::attach(PeerRegion& remote, Rail& rail) {
  RemoteRegion region{remote.region.id, remote.region.base, remote.region.spans, {}};
  bool offered = false;
  for (const wire::TransportKeys& keys : remote.region.keys)
    if (keys.transport == rail.capabilities().name && keys.instance == rail.info().peer_instance) {
      region.keys = keys.keys;
      offered = true;
    }
  if (!offered) return false;  // the peer could not register it with that transport
  if (Status status = context_.host.attach(rail.id(), region); !status.ok()) {
    remote.note(std::string(rail.capabilities().name) + ": " + status.message());
    return false;
  }
  remote.reach.push_back(&rail);
  return true;
}

Status PeerRegions::check_path(const Peer& peer, const Region& local, const PeerRegion& remote,
                               bool fetched_here, bool converts) const {
  const MemoryKind memory = local.memory.kind;
  if (remote.is_reached_from(memory, converts)) return {};
  // The initiator knows when all its rails have come up or failed. An acceptor also waits for rails that
  // it has not seen.
  const bool is_acceptor = peer.role() == SessionRole::kAcceptor;
  bool common = false, coming = !peer.regions_known() || peer.rails_pending() > 0;
  bool lost = std::any_of(remote.unable.begin(), remote.unable.end(),
                          [memory](const auto& entry) { return entry.second == memory; });
  for (const wire::TransportKeys& keys : remote.region.keys) {
    const auto is_named = [&](const auto& transport) { return transport == keys.transport; };
    if (std::none_of(local.keys.begin(), local.keys.end(),
                     [&](const wire::TransportKeys& ours) { return is_named(ours.transport); }))
      continue;
    common = true;
    const std::vector<Rail*>& rails = rails_.of(peer.key());
    const auto is_up = [&](const Rail* rail) { return is_named(rail->capabilities().name); };
    const bool alive = std::any_of(rails.begin(), rails.end(), is_up);
    if (converts && std::any_of(rails.begin(), rails.end(), [&](const Rail* rail) {
          return is_up(rail) && !rail->capabilities().converts;
        }))
      continue;
    // If this end cannot reach the region, the peer's end may. In time every stream reaches host memory;
    // a GPU's memory is reached at once, or not at all.
    if (alive && (!fetched_here || memory == MemoryKind::kHost)) return {};
    const bool was_lost = rails_.was_lost(peer.key(), keys.transport);
    lost = lost || (was_lost && !alive);
    coming = coming || (is_acceptor && !alive && !was_lost);
  }
  if (!common)
    return {Code::kUnsupported, "no transport connects region " + quoted(local.name) + " here (" +
                                    std::string(name_of(memory)) + " memory, over " + names_of(local.keys) +
                                    ") to region " + quoted(remote.region.name) + " of peer " +
                                    quoted(peer.name()) + " (over " + names_of(remote.region.keys) +
                                    "): pages between GPU and host memory are staged by the agent with the "
                                    "GPU and sent over a stream; give both agents a transport that reaches "
                                    "host memory, and do not set staging_nbytes=0 at that agent"};
  if (coming) return {};
  std::string why = std::string(converts ? "no rail that converts elements" : "no rail") +
                    " reaches region " + quoted(remote.region.name) + " of peer " + quoted(peer.name()) +
                    " from " + std::string(name_of(memory)) + " memory";
  for (const std::vector<std::string>& notes : {remote.notes, peer.notes()})
    for (const std::string& note : notes) why += "; " + note;
  return {lost ? Code::kRailFailed : Code::kUnsupported, std::move(why)};
}

Status check_integrity(const Region& local) {
  if (local.memory.kind == MemoryKind::kHost) return {};
  return {
      Code::kUnsupported,
      "region " + quoted(local.name) +
          " is in GPU memory, and checksums of its pages are not supported yet: post with integrity=False"};
}

}  // namespace kvxfer
