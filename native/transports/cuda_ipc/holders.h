// Peers that may still have memory of ours mapped in which no region lies any longer. That memory must not be
// freed meanwhile: CUDA calls it undefined to free memory that another process has open by an IPC handle.
#pragma once

#include <list>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/system/fork_guard.h"
#include "kvxfer/transport.h"
#include "transports/cuda_ipc/message.h"

namespace kvxfer::cuda_ipc {

class Holders {
 public:
  explicit Holders(Reactor& reactor);
  ~Holders();

  // A region and these allocations are deregistered. These peers were told of it.
  void wait_for(RegionId region, std::vector<MemoryId> gone, std::span<const PeerId> told);
  // A peer has answered. False: it was not asked.
  bool unmapped(PeerId peer, MemoryId memory);
  // A peer's rail has ended, and nothing of the peer's is mapped here any more. The peer may have mapped all
  // exported allocations, besides those that it was asked to unmap, until its half of the socket ends: both
  // ends first unmap and then close theirs, and a process that dies does both. `exported`: empty if the peer
  // is not waited for.
  void part(PeerId peer, std::string name, GuardedFd socket, std::set<MemoryId> exported);
  // No longer waits for what this peer was asked.
  void forget(PeerId peer);

  // Whether a peer may hold memory of this deregistered region. kEveryRegion: of any region, and also by
  // peers whose rails have ended.
  bool hold(RegionId region) const noexcept;
  bool holds(PeerId peer, RegionId region) const noexcept;  // a peer that has not parted
  // No longer waits for peers that have parted. Returns their names.
  std::vector<std::string> give_up_parted(RegionId region);

 private:
  struct Parting;

  bool is_held(MemoryId memory) const noexcept;
  bool is_of(const std::set<MemoryId>& held, RegionId region) const noexcept;
  void forget_unheld();
  void forget_partings();  // partings that have ended

  Reactor& reactor_;
  std::map<RegionId, std::vector<MemoryId>> leaving_;  // deregistered, and peers may still have these mapped
  std::map<PeerId, std::set<MemoryId>> asked_;  // questions without an answer
  std::list<Parting> partings_;
};

}  // namespace kvxfer::cuda_ipc
