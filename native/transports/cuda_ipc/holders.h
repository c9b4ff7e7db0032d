// Who may still have memory of ours mapped in which no region lies any longer. It must not be freed meanwhile:
// what is freed while another process has it open by an IPC handle is undefined, says CUDA.
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

  // A region is deregistered, and with it these allocations; so much these peers are told.
  void wait_for(RegionId region, std::vector<MemoryId> gone, std::span<const PeerId> told);
  // A peer's answer. False where it was not asked.
  bool unmapped(PeerId peer, MemoryId memory);
  // A peer's rail has ended, and nothing of its is mapped here any more. It may have mapped all that was exported,
  // besides what it was asked to unmap, until its half of the socket ends: both ends unmap first and end theirs
  // then, and a process that dies does both. `exported`: empty for a peer that is not waited for.
  void part(PeerId peer, std::string name, GuardedFd socket, std::set<MemoryId> exported);
  // What this peer was asked is not waited for.
  void forget(PeerId peer);

  // Memory of a region that was deregistered; kEveryRegion: of any, by peers whose rails have ended, too.
  bool hold(RegionId region) const noexcept;
  bool holds(PeerId peer, RegionId region) const noexcept;  // a peer that has not parted
  // Those that have parted are waited for no longer. Returns their names.
  std::vector<std::string> give_up_parted(RegionId region);

 private:
  struct Parting;

  bool is_held(MemoryId memory) const noexcept;
  bool is_of(const std::set<MemoryId>& held, RegionId region) const noexcept;
  void forget_unheld();
  void forget_partings();  // that have ended

  Reactor& reactor_;
  std::map<RegionId, std::vector<MemoryId>> leaving_;  // deregistered: what peers may still have mapped
  std::map<PeerId, std::set<MemoryId>> asked_;  // that have not answered
  std::list<Parting> partings_;
};

}  // namespace kvxfer::cuda_ipc
