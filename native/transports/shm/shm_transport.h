// A rail between agents of one host: the destination copies out of the source's memory.
//
// Memory of a pool is mapped read-only here and copied by this processor. Other memory is read by the kernel
// for us. The rail's unix socket carries descriptors of pools (message.h), never pages; when the socket ends,
// so does the rail. Its parts:
//   PeerPools      a peer's regions, and its pools, mapped here
//   ForeignMemory  a peer's process, read by the kernel
//   PieceSource    one of these, held while a piece is read from it
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/transport.h"
#include "transports/common/copying_rail.h"
#include "transports/common/peer_fences.h"
#include "transports/shm/message.h"
#include "transports/shm/peer_pools.h"

namespace kvxfer {

namespace shm {

struct Peer : RailPeer<Message> {
  Peer(PeerId number, UniqueFd socket, const ConnectInfo& info)
      : RailPeer(number, std::move(socket), info), pools(name, budget) {}
  PeerFences fences;
  PeerPools pools;
};

}  // namespace shm

class ShmTransport final : public CopyingRail<shm::Peer> {
 public:
  ShmTransport(Reactor& reactor, const FenceTable& fences, std::shared_ptr<CopyWorkers> workers = nullptr);

  Capabilities capabilities() const noexcept override;
  Result<RegionKeys> register_memory(const LocalRegion& region, const Pinned&) override;
  void deregister_memory(RegionId region) noexcept override;
  Result<PeerId> connect(UniqueFd socket, const ConnectInfo& info) override;
  Status attach(PeerId peer, const RemoteRegion& region) override;
  void detach(PeerId peer, RegionId region) noexcept override;

  std::size_t num_mappings() const noexcept;  // of peers' pools; each peer's fence table adds one

 private:
  using Peer = shm::Peer;
  class Shared;
  // A pool of ours in which at least one region lies.
  struct Exported {
    // Our own copy: a message may carry it after the pool's descriptor is closed.
    SharedFd fd;
    std::uint64_t nbytes = 0;
    std::size_t num_regions = 0;
  };

  void greet(Peer& peer) override;
  Status on_hello(Peer& peer, const shm::Message& message, UniqueFd fences) override;
  Status on_message(Peer& peer, const shm::Message& message, UniqueFd fd) override;
  void on_down(Peer& peer) override;
  bool can_run(const Peer& peer, const Work& work) const noexcept override;
  bool wants_time(const Peer& peer) const noexcept override { return peer.pools.wants_populating(); }
  std::size_t num_announced() const noexcept override { return exported_.size(); }

  Result<shm::PieceSource> source_of(const Peer& peer, const Work& work, std::uint64_t src_end) const;
  Result<std::uint64_t> copy_slice(Peer& peer, Peer::Copy& copy, std::string& broken) override;
  std::unique_ptr<Flight> share(Peer& peer, const Work& work, std::uint64_t src_end) override;
  Status result_of(Peer& peer, const Flight& flight, std::string& broken) override;
  Status compare_fence(Peer& peer, const Fence& fence) override;
  void after_round(std::span<Completion> completions) noexcept override;
  void on_idle() override;

  OwnFences fences_;
  std::map<RegionId, std::uint64_t> pool_regions_;  // ours -> the memfd_id that each lies in
  std::map<std::uint64_t, Exported> exported_;  // by memfd_id
  std::shared_ptr<shm::ForeignReaders> readers_;
  std::vector<std::pair<WorkId, Peer*>> foreign_reads_;  // that ended in this round of poll
};

}  // namespace kvxfer
