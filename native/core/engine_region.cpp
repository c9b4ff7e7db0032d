// Regions of this agent, and what peers tell of theirs: regions and programs between the two.
#include <algorithm>

#include "core/engine.h"

namespace kvxfer {
namespace {

constexpr std::size_t kMaxPeerPrograms = 4096;  // a pair of layouts each
constexpr std::size_t kMaxPeerRegions = 4096;

}  // namespace

Result<RegionId> Engine::register_region(Time now, std::unique_ptr<Region> region) {
  now_ = now;
  const RegionId id = next_region_++;
  region->memory.id = id;
  for (auto& [key, peer] : peers_) send(*peer, region->described());
  regions_.emplace(id, std::move(region));
  return id;
}

Status Engine::deregister_region(Time now, RegionId id) {
  now_ = now;
  auto found = regions_.find(id);
  if (found == regions_.end())
    return {Code::kUnknownRegion, "region " + std::to_string(id) + " is not registered (any more)"};
  const Status why{Code::kRegionGone, "region " + quoted(found->second->name) + " was deregistered"};
  end_leases(id, why);
  std::vector<std::uint64_t> expected;
  for (auto& [handle, expectation] : expectations_)
    if (expectation->region() == id) expected.push_back(handle);
  for (std::uint64_t handle : expected) end_expectation(handle, TransferState::kFailed, why);
  std::vector<Source*> sources;
  for (auto& [key, source] : sources_)
    if (source->region == id) sources.push_back(source.get());
  for (Source* source : sources) fail_source(*source, TransferEvent::kFail, why, true);
  std::vector<Destination*> destinations;
  for (auto& [key, destination] : destinations_)
    if (destination->region == id) destinations.push_back(destination.get());
  for (Destination* destination : destinations)
    fail_destination(*destination, TransferEvent::kFail, why, true);
  for (auto& [key, peer] : peers_) {
    peer->ended_on.erase({id, wire::LeaseMode::kRead});
    peer->ended_on.erase({id, wire::LeaseMode::kWrite});
    send(*peer, wire::RegionGone{id});
    forget_programs(*peer, id, false);
  }
  // What is left of its transfers drains.
  std::size_t num_draining = 0;
  for (const auto& [key, source] : sources_) num_draining += source->region == id;
  for (const auto& [key, destination] : destinations_) num_draining += destination->region == id;
  std::unique_ptr<Region> gone = std::move(found->second);
  regions_.erase(found);
  if (num_draining != 0) {
    leaving_regions_.emplace(id, LeavingRegion{std::move(gone), num_draining});
    return {};
  }
  bury(std::move(gone));
  host_.region_fenced(id);
  return {};
}

const Region* Engine::region(RegionId id) const {
  auto found = regions_.find(id);
  return found == regions_.end() ? nullptr : found->second.get();
}

void Engine::on(Peer& peer, wire::Region& region) {
  const RegionId id = region.id;
  if (peer.regions.size() >= kMaxPeerRegions) {
    end_session(now_, peer.key, Code::kProtocol, "REGION refused: too many");
    return;
  }
  auto [found, fresh] = peer.regions.try_emplace(id);
  if (!fresh) return;  // ids are never reused: a repetition says nothing new
  found->second.region = std::move(region);
  for (RailId rail : peer.rails) attach(peer, found->second, rail);
  host_.emit({.kind = EventKind::kRegion, .peer = peer.key, .region = id});
}

void Engine::on(Peer& peer, const wire::RegionGone& gone) {
  auto found = peer.regions.find(gone.id);
  if (found == peer.regions.end()) return;
  const Status why{Code::kRegionGone,
                   "the peer deregistered its region " + quoted(found->second.region.name)};
  std::vector<Destination*> destinations;
  for (auto it = destinations_.lower_bound({peer.key, 0});
       it != destinations_.end() && it->first.first == peer.key; ++it)
    if (it->second->remote_region == gone.id) destinations.push_back(it->second.get());
  for (Destination* destination : destinations)
    fail_destination(*destination, TransferEvent::kFail, why, false);
  for (RailId rail : found->second.reach) host_.detach(rail, gone.id);
  peer.regions.erase(found);
  forget_programs(peer, gone.id, true);
  // Should it announce that number again, with other bounds, nothing is taken for checked.
  for (auto& [id, told] : peer.peer_programs) told.checked_offer = false;
  host_.emit({.kind = EventKind::kRegionGone, .peer = peer.key, .region = gone.id});
}

// Our programs from or to a region that is gone. Both agents count regions from 1, so an id alone
// does not say whose region it is.
void Engine::forget_programs(Peer& peer, RegionId gone, bool of_peer) {
  std::erase_if(peer.programs, [&](const auto& entry) {
    return (entry.second.write != of_peer ? entry.second.src : entry.second.dst) == gone;
  });
}

void Engine::on(Peer& peer, wire::Program& program) {
  Program entry;
  entry.program = std::make_shared<CopyProgram>(std::move(program.program));
  entry.src = program.src_region;
  entry.dst = program.dst_region;
  // A peer that never stops telling programs is not a user of them. Those whose regions are gone
  // leave only now: which way a program leads is not known before it is used.
  if (peer.peer_programs.size() >= kMaxPeerPrograms)
    std::erase_if(peer.peer_programs, [&](const auto& told) {
      const Program& old = told.second;
      return !(region(old.dst) != nullptr && peer.regions.contains(old.src)) &&
             !(region(old.src) != nullptr && peer.regions.contains(old.dst));
    });
  if (Status status = check_program(*entry.program);
      !status.ok() || peer.peer_programs.size() >= kMaxPeerPrograms) {
    end_session(now_, peer.key, Code::kProtocol,
                "PROGRAM refused: " + (status.ok() ? "too many" : status.message()));
    return;
  }
  peer.peer_programs.insert_or_assign(program.id, std::move(entry));
}

}  // namespace kvxfer
