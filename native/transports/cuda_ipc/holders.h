// Peers that may still have memory of ours mapped in which no region lies any longer. That memory must not be
// freed meanwhile: CUDA calls it undefined to free memory that another process has open by an IPC handle.
#pragma once

#include <list>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/system/fork_guard.h"
#include "kvxfer/transport.h"
#include "transports/cuda_ipc/exports.h"
#include "transports/cuda_ipc/message.h"

namespace kvxfer::cuda_ipc {

class Holders {
 public:
  explicit Holders(Reactor& reactor);
  ~Holders();

  // A peer is about to be told of an allocation, which it may then map. Deregistering needs no memory, since
  // this takes it.
  void may_hold(PeerId peer, MemoryId memory);
  // A region and these allocations are deregistered, and the peers that may hold them are asked to unmap them.
  void wait_for(Exports::Regions::node_type region) noexcept;
  // A peer has answered. False: it was not asked.
  bool unmapped(PeerId peer, MemoryId memory);
  // A peer's rail has ended, and nothing of the peer's is mapped here any more. The peer may have mapped all
  // that it was told of until its half of the socket ends: both ends first unmap and then close theirs, and a
  // process that dies does both. A peer that was forgotten is not waited for.
  void part(PeerId peer, std::string name, GuardedFd socket);
  // No longer waits for this peer.
  void forget(PeerId peer) noexcept;

  // Whether a peer may hold memory of this deregistered region. kEveryRegion: of any region, and also by
  // peers whose rails have ended.
  bool hold(RegionId region) const noexcept;
  bool holds(PeerId peer, RegionId region) const noexcept;  // a peer that has not parted
  // No longer waits for peers that have parted. Returns their names.
  std::vector<std::string> give_up_parted(RegionId region);

 private:
  struct Parting;

  bool is_held(MemoryId memory) const noexcept;
  // Whether one of them is deregistered, with this region or, for kEveryRegion, with any.
  bool any_leaves(const std::set<MemoryId>& held, RegionId region) const noexcept;
  void forget_unheld() noexcept;
  void forget_partings();  // partings that have ended

  Reactor& reactor_;
  Exports::Regions leaving_;  // deregistered, and peers may still have these mapped
  std::map<PeerId, std::set<MemoryId>> held_;  // told of, and not yet unmapped
  std::list<Parting> partings_;
};

}  // namespace kvxfer::cuda_ipc
