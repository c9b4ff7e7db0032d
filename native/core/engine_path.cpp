// Whether any rail goes from one region to another: a rail reaches memory of some kinds at each of its ends,
// and a region is registered with the transports of its kind alone. So the keys that a REGION carries say how
// its bytes can leave and enter, and to this end it does not matter in what memory it lies there.
#include <algorithm>

#include "core/engine.h"

namespace kvxfer {
namespace {

std::string_view name_of(MemoryKind memory) { return memory == MemoryKind::kGpu ? "GPU" : "host"; }

std::string names_of(const std::vector<wire::TransportKeys>& keys) {
  std::string names;
  for (const wire::TransportKeys& each : keys) names += (names.empty() ? "" : ", ") + each.transport;
  return names.empty() ? "nothing" : names;
}

}  // namespace

// Between the region, which the rail reaches, and memory of that kind here.
bool Engine::carries(const Remote& remote, RailId rail, MemoryKind memory) const {
  return rails_.at(rail).info.capabilities.memory.has(memory) &&
         std::find(remote.unable.begin(), remote.unable.end(), std::pair(rail, memory)) ==
             remote.unable.end();
}

bool Engine::reaches(const Remote& remote, MemoryKind memory) const {
  return std::any_of(remote.reach.begin(), remote.reach.end(),
                     [&](RailId id) { return carries(remote, id, memory); });
}

// Ok where bytes can go between the two, or a rail may still come up on which they could. `fetched_here`:
// they become ours.
Status Engine::check_path(const Peer& peer, const Region& local, const Remote& remote,
                          bool fetched_here) const {
  const MemoryKind memory = local.memory.kind;
  if (reaches(remote, memory)) return {};
  const std::string& name = peer.session->peer().name;
  // The initiator knows when all its rails have come or failed. An acceptor waits for what it has not seen.
  const bool is_acceptor = peer.session->role() == SessionRole::kAcceptor;
  bool common = false, coming = !peer.regions_known || peer.rails_pending > 0;
  bool lost = std::any_of(remote.unable.begin(), remote.unable.end(),
                          [memory](const auto& entry) { return entry.second == memory; });
  for (const wire::TransportKeys& keys : remote.region.keys) {
    const auto is_named = [&](const auto& transport) { return transport == keys.transport; };
    if (std::none_of(local.keys.begin(), local.keys.end(),
                     [&](const wire::TransportKeys& ours) { return is_named(ours.transport); }))
      continue;
    common = true;
    const bool alive = std::any_of(peer.rails.begin(), peer.rails.end(),
                                   [&](RailId id) { return is_named(rails_.at(id).info.capabilities.name); });
    // Where it cannot reach the region from here, the peer's end may. What lies in host memory is
    // everybody's to reach by streams; a GPU's is reached at once, or not at all.
    if (alive && (!fetched_here || memory == MemoryKind::kHost)) return {};
    const bool was_lost = peer.lost_rails.contains(keys.transport);
    lost = lost || (was_lost && !alive);
    coming = coming || (is_acceptor && !alive && !was_lost);
  }
  if (!common)
    return {
        Code::kUnsupported,
        "no transport goes from region " + quoted(local.name) + " here (" + std::string(name_of(memory)) +
            " memory, over " + names_of(local.keys) + ") to region " + quoted(remote.region.name) +
            " of peer " + quoted(name) + " (over " + names_of(remote.region.keys) +
            "): pages between GPU and host memory go over unix and tcp, staged by the agent with the "
            "GPU; name one of them among the transports of both, and leave that agent its staging_nbytes"};
  if (coming) return {};
  std::string why = "no rail reaches region " + quoted(remote.region.name) + " of peer " + quoted(name) +
                    " from " + std::string(name_of(memory)) + " memory";
  for (const std::vector<std::string>* notes : {&remote.notes, &peer.notes})
    for (const std::string& note : *notes) why += "; " + note;
  return {lost ? Code::kRailFailed : Code::kUnsupported, std::move(why)};
}

// Sums are the processor's, for which memory of a GPU is not there.
Status Engine::check_integrity(const Region& local) const {
  if (local.memory.kind == MemoryKind::kHost) return {};
  return {Code::kUnsupported, "region " + quoted(local.name) +
                                  " lies on a GPU, and checksums of its pages are not there yet: post with "
                                  "integrity=False"};
}

// After a rail went down, or did not come up: what it alone could have brought ends now and not at its
// deadline.
void Engine::end_pathless(Peer& peer) {
  const auto path = [&](const Transfer& transfer, RegionId theirs, bool fetched_here) -> Status {
    const Region* local = region(transfer.region);
    const auto remote = peer.regions.find(theirs);
    if (local == nullptr || remote == peer.regions.end()) return {};
    return check_path(peer, *local, remote->second, fetched_here);
  };
  std::vector<std::pair<Destination*, Status>> destinations;
  for (auto it = destinations_.lower_bound({peer.key, 0});
       it != destinations_.end() && it->first.first == peer.key; ++it)
    if (Status status = path(*it->second, it->second->remote_region, true); !status.ok())
      destinations.emplace_back(it->second.get(), std::move(status));
  std::vector<std::pair<Source*, Status>> sources;
  for (auto it = sources_.lower_bound({peer.key, 0}); it != sources_.end() && it->first.first == peer.key;
       ++it)
    if (Status status = path(*it->second, it->second->move->remote_region, false); !status.ok())
      sources.emplace_back(it->second.get(), std::move(status));
  for (auto& [destination, why] : destinations)
    fail_destination(*destination, TransferEvent::kFail, std::move(why), true);
  for (auto& [source, why] : sources) fail_source(*source, TransferEvent::kFail, std::move(why), true);
}

}  // namespace kvxfer
