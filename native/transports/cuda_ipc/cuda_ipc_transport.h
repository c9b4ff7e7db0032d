// A rail between agents of one machine whose caches lie on GPUs: the destination's GPU copies out of the
// source's memory, mapped here, over NVLink, PCIe, or within one device.
//
// The rail's unix socket carries handles of allocations, never pages, and its end is the rail's. Its parts:
//   Exports      our allocations, as peers can map them
//   Holders      who may still have some of them mapped, though no region lies there any longer
//   PeerRegions  a peer's regions, mapped for our kernels
//   Flights      launches of copy kernels (gpu/copy_stream.h) on one stream of the destination's device
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpu/copy_stream.h"
#include "gpu/driver.h"
#include "kvxfer/transport.h"
#include "transports/common/completion_queue.h"
#include "transports/common/message_channel.h"
#include "transports/cuda_ipc/exports.h"
#include "transports/cuda_ipc/flights.h"
#include "transports/cuda_ipc/holders.h"
#include "transports/cuda_ipc/message.h"

namespace kvxfer {

class CudaIpcTransport final : public Transport {
 public:
  struct Options {
    int device = 0;
    gpu::Kernels kernels;
    gpu::CopyStreamOptions stream;
    std::uint64_t most_flying_nbytes = cuda_ipc::Flights::kMostNbytes;
  };

  static Result<std::unique_ptr<CudaIpcTransport>> create(Reactor& reactor, const FenceTable& fences,
                                                          const gpu::Driver& driver, const Options& options);
  ~CudaIpcTransport() override;

  Capabilities capabilities() const noexcept override;
  Result<RegionKeys> register_memory(const LocalRegion& region) override;
  void deregister_memory(RegionId region) noexcept override;
  bool held_by_peers(RegionId region) const noexcept override;
  std::vector<std::string> give_up_holders(RegionId region) override;
  Result<PeerId> connect(UniqueFd socket, const ConnectInfo& info) override;
  void disconnect(PeerId peer) noexcept override;
  Status attach(PeerId peer, const RemoteRegion& region) override;
  void detach(PeerId peer, RegionId region) noexcept override;
  PostResult post(PeerId peer, std::span<const Work> batch) noexcept override;
  // A kernel that was launched cannot be stopped: its works end as it ends.
  void cancel(WorkId work) noexcept override;
  std::size_t poll(std::span<Completion> completions) noexcept override;
  bool busy() const noexcept override;

  std::size_t num_mappings() const noexcept;  // of peers' allocations

 private:
  struct Peer;

  CudaIpcTransport(Reactor& reactor, const FenceTable& fences, const gpu::Driver& driver,
                   const Options& options, gpu::PrimaryContext context,
                   std::unique_ptr<gpu::CopyStream> stream);

  Peer* find(PeerId peer) const noexcept;
  void on_ready(Peer& peer, std::uint32_t events);
  Status receive(Peer& peer);
  Status on_hello(Peer& peer, const cuda_ipc::Message& message, const UniqueFd& fences);
  Status on_memory_gone(Peer& peer, cuda_ipc::MemoryId memory);
  Status on_memory_unmapped(Peer& peer, cuda_ipc::MemoryId memory);
  void tell(Peer& peer, const cuda_ipc::Message& message, SharedFd fd = nullptr);
  void flush(Peer& peer);

  void fail(Peer& peer, const std::string& why);  // the rail to it is down
  void fail_all(const std::string& why);          // the device is lost
  void go_down(Peer& peer);
  void settle(Peer& peer);  // what had to wait for kernels, of one that may be gone then
  void part(Peer& peer);    // its rail has ended: unmaps all of its memory

  static bool can_run(const Peer& peer, const Work& work) noexcept;
  bool run_next();
  void land();  // what has ended

  Reactor& reactor_;
  SharedFd fences_;  // of our own table
  const gpu::Driver& driver_;
  const int device_;
  gpu::PrimaryContext context_;

  cuda_ipc::Exports exports_;
  cuda_ipc::Holders holders_;
  std::map<PeerId, std::unique_ptr<Peer>> peers_;
  PeerId next_peer_ = 1;
  PeerId last_served_ = 0;  // peers take turns, a launch each
  CompletionQueue ready_;   // to be told
  std::string lost_why_;    // of the device; empty while it works
  // Last, so that it ends first: it waits for kernels, while what they read is mapped.
  cuda_ipc::Flights flights_;
};

}  // namespace kvxfer
