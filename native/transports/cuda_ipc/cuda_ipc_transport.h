// A rail between agents of one machine whose caches lie on GPUs: the destination's GPU copies out of the
// source's memory, mapped here, over NVLink, PCIe, or within one device.
//
// Pieces become launches of copy kernels on one stream of the destination's device (gpu/copy_stream.h).
// The rail's unix socket carries handles of allocations, never pages, and its end is the rail's.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gpu/copy_stream.h"
#include "gpu/driver.h"
#include "gpu/shared_memory.h"
#include "kvxfer/transport.h"
#include "transports/common/message_channel.h"

namespace kvxfer {

class CudaIpcTransport final : public Transport {
 public:
  struct Options {
    int device = 0;
    gpu::Kernels kernels;
    gpu::CopyStreamOptions stream;
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
  struct Message;
  struct Attached;
  struct Peer;
  struct Parting;
  // An allocation of ours in which some region lies.
  struct Exported {
    gpu::ExportedMemory memory;
    SharedFd fd;
    std::size_t num_regions = 0;
  };
  // Works whose kernels are under way; they end together.
  struct Flight {
    gpu::CopyStream::Ticket ticket;
    PeerId peer;
    std::vector<WorkId> works;
    std::uint64_t nbytes;
  };

  CudaIpcTransport(Reactor& reactor, const FenceTable& fences, gpu::PrimaryContext context,
                   const gpu::Driver& driver, const Options& options);

  void on_ready(Peer& peer, std::uint32_t events);
  Status receive(Peer& peer);
  Status on_hello(Peer& peer, const Message& message, UniqueFd fences);
  Status on_memory(Peer& peer, const Message& message, UniqueFd fd);
  Status on_memory_gone(Peer& peer, std::uint64_t memory_id);
  Status on_memory_unmapped(Peer& peer, std::uint64_t memory_id);
  void place(Peer& peer, Attached& region);
  Result<gpu::Placement> placement_of(Peer& peer, const Attached& region);
  static Message memory_message(const std::pair<const std::uint64_t, Exported>& entry) noexcept;
  void tell(Peer& peer, const Message& message, SharedFd fd);
  void flush(Peer& peer);
  void fail(Peer& peer, const std::string& why);  // the rail to it is down
  void fail_all(const std::string& why);          // the device is lost
  void go_down(Peer& peer);
  void settle(Peer& peer);  // what had to wait for kernels, of one that may be gone then
  void part(Peer& peer);    // its rail has ended: unmaps all of its memory
  void forget_partings();                         // that have ended
  bool is_held(std::uint64_t memory_id) const noexcept;
  void forget_unheld();
  void end_work(Peer& peer, Code code, const std::string& detail);
  void drop_unused(Peer& peer);
  void unmap_unused(Peer& peer);

  static bool can_run(const Peer& peer, const Work& work) noexcept;
  Peer* next_peer() noexcept;
  bool run_next();
  bool submit(Peer& peer, Attached& region);
  Completion check_fence(Peer& peer, const Work& work) const noexcept;
  void land();  // what has ended
  void end_flight(const Flight& flight, bool is_done);

  Reactor& reactor_;
  SharedFd fences_;  // of our own table
  const gpu::Driver& driver_;
  const Options options_;
  gpu::PrimaryContext context_;
  std::unique_ptr<gpu::CopyStream> stream_;

  std::map<RegionId, std::vector<std::uint64_t>> regions_;  // ours -> the allocations that each lies in
  std::map<std::uint64_t, Exported> exported_;              // by the number that peers know it by
  // Of regions that were deregistered: allocations that peers may still have mapped.
  std::map<RegionId, std::vector<std::uint64_t>> leaving_;
  std::list<Parting> partings_;
  std::uint64_t next_memory_ = 1;
  std::map<PeerId, std::unique_ptr<Peer>> peers_;
  PeerId next_peer_ = 1;
  PeerId last_served_ = 0;        // peers take turns, a launch each
  std::deque<Completion> ready_;  // to be told
  std::deque<Flight> flights_;    // in order
  std::uint64_t flying_nbytes_ = 0;
  gpu::CopyStream::Ticket landed_ = 0;  // up to here all flights have ended
  std::string lost_why_;          // of the device; empty while it works
  std::uint32_t idle_polls_ = 0;  // with flights that do not land
};

}  // namespace kvxfer
