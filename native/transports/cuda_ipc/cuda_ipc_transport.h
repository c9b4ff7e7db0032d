// A rail between agents of one machine whose caches lie on GPUs. The destination's GPU copies out of the
// source's memory, which is mapped here, over NVLink, PCIe, or within one device.
//
// The rail's unix socket carries handles of allocations, never pages; when the socket ends, so does the rail.
// Its parts:
//   Exports      our allocations, as peers can map them
//   Holders      peers that may still have allocations mapped in which no region lies any longer
//   PeerRegions  a peer's regions, mapped for our kernels
//   Flights      launches of copy kernels (gpu/copy_stream.h) on one stream of the destination's device
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gpu/copy_stream.h"
#include "gpu/driver.h"
#include "kvxfer/transport.h"
#include "transports/common/peer_fences.h"
#include "transports/common/rail_peers.h"
#include "transports/cuda_ipc/exports.h"
#include "transports/cuda_ipc/flights.h"
#include "transports/cuda_ipc/holders.h"
#include "transports/cuda_ipc/message.h"
#include "transports/cuda_ipc/peer_regions.h"

namespace kvxfer {

namespace cuda_ipc {

struct Peer : RailPeer<Message> {
  Peer(PeerId number, UniqueFd socket, const ConnectInfo& info, const PeerRegions::Reader& reader)
      : RailPeer(number, std::move(socket), info), regions(reader, name, budget) {}

  // Memory that its owner takes back. It is unmapped, and the owner told, once the kernels up to a ticket
  // have ended.
  struct Going {
    Flights::Ticket after;
    MemoryId memory_id;
    std::optional<PeerRegions::Mapped> mapped;
  };

  bool gone = false;  // disconnected: erased once nothing of it is under way
  bool parted = false;  // all of its memory is unmapped, which happens after down
  bool given_up = false;  // we no longer wait for what it may have mapped of ours
  PeerFences fences;
  PeerRegions regions;
  std::deque<Going> going;
  Flights::Ticket unused_after = 0;  // once this has landed, unused mappings are unmapped; 0: there are none
};

}  // namespace cuda_ipc

class CudaIpcTransport final : public RailPeers<cuda_ipc::Peer>, private MemoryLender {
 public:
  struct Options {
    int device = 0;
    gpu::Kernels kernels;
    gpu::CopyStreamOptions stream;
    std::uint64_t most_flying_nbytes = cuda_ipc::Flights::kMostNbytes;
  };

  static Result<std::unique_ptr<CudaIpcTransport>> create(Reactor& reactor, const FenceTable& fences,
                                                          const gpu::Driver& driver, const Options& options);

  Capabilities capabilities() const noexcept override;
  Result<RegionKeys> register_memory(const LocalRegion& region, const Pinned&) override;
  void deregister_memory(RegionId region) noexcept override;
  MemoryLender* lender() noexcept override { return this; }
  Result<PeerId> connect(UniqueFd socket, const ConnectInfo& info) override;
  Status attach(PeerId peer, const RemoteRegion& region) override;
  void detach(PeerId peer, RegionId region) noexcept override;
  std::size_t poll(std::span<Completion> completions) noexcept override;
  bool busy() const noexcept override;
  bool wants_poll() const noexcept override;

  std::size_t num_mappings() const noexcept;  // of peers' allocations

 private:
  using Peer = cuda_ipc::Peer;

  bool held_by_peers(RegionId region) const noexcept override;
  std::vector<std::string> give_up_holders(RegionId region) override;

  CudaIpcTransport(Reactor& reactor, const FenceTable& fences, const gpu::Driver& driver,
                   const Options& options, gpu::PrimaryContext context,
                   std::unique_ptr<gpu::CopyStream> stream);

  void greet(Peer& peer) override;
  Status on_hello(Peer& peer, const cuda_ipc::Message& message, UniqueFd fences) override;
  Status on_message(Peer& peer, const cuda_ipc::Message& message, UniqueFd fd) override;
  Status on_memory_gone(Peer& peer, cuda_ipc::MemoryId memory);
  Status on_memory_unmapped(Peer& peer, cuda_ipc::MemoryId memory);
  void on_down(Peer& peer) override { clean_up(peer); }  // kernels may still read; unmaps after them
  void forget(Peer& peer) noexcept override;
  bool can_run(const Peer& peer, const Work& work) const noexcept override;
  std::size_t num_announced() const noexcept override { return exports_.all().size(); }

  // Tells a peer of an allocation.
  void tell_of_memory(Peer& peer, cuda_ipc::MemoryId id, const cuda_ipc::Exports::Entry& entry) noexcept;
  void fail_all(const std::string& why) noexcept;  // the device is lost
  void clean_up(Peer& peer) noexcept;  // does what waited for kernels; may erase the peer
  void part(Peer& peer);  // its rail has ended: unmaps all of its memory

  bool run_next(Peer& peer);
  void land() noexcept;  // takes in what has ended

  OwnFences fences_;
  const gpu::Driver& driver_;
  const int device_;
  gpu::PrimaryContext context_;

  cuda_ipc::Exports exports_;
  cuda_ipc::Holders holders_;
  bool is_lost_ = false;
  std::string lost_why_;  // why the device is lost; empty while it works
  // Last, so that it is destroyed first: it waits for kernels while the memory that they read is still
  // mapped.
  cuda_ipc::Flights flights_;
};

}  // namespace kvxfer
