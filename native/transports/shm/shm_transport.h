// A rail between agents of one host: the destination copies out of the source's memory.
//
// Memory of a pool is mapped read-only here and copied by this processor; other memory is read by
// the kernel for us. The rail's unix socket carries descriptors of pools (message.h), never
// pages, and its end is the rail's.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/transport.h"
#include "transports/common/completion_queue.h"
#include "transports/common/peer_fences.h"
#include "transports/common/work_queue.h"
#include "transports/shm/message.h"

namespace kvxfer {

class ShmTransport final : public Transport {
 public:
  ShmTransport(Reactor& reactor, const FenceTable& fences);
  ~ShmTransport() override;

  Capabilities capabilities() const noexcept override;
  Result<RegionKeys> register_memory(const LocalRegion& region) override;
  void deregister_memory(RegionId region) noexcept override;
  Result<PeerId> connect(UniqueFd socket, const ConnectInfo& info) override;
  void disconnect(PeerId peer) noexcept override;
  Status attach(PeerId peer, const RemoteRegion& region) override;
  void detach(PeerId peer, RegionId region) noexcept override;
  PostResult post(PeerId peer, std::span<const Work> batch) noexcept override;
  void cancel(WorkId work) noexcept override;
  std::size_t poll(std::span<Completion> completions) noexcept override;
  bool busy() const noexcept override;

  std::size_t num_mappings() const noexcept;  // of peers' pools; a fence table a peer comes on top

 private:
  struct Memfd;
  struct Attached;
  struct Peer;
  // A pool of ours in which some region lies.
  struct Exported {
    SharedFd fd;  // our own, so that it outlives the pool's while a message carries it
    std::uint64_t nbytes = 0;
    std::size_t num_regions = 0;
  };

  void on_ready(Peer& peer, std::uint32_t events);
  Status receive(Peer& peer);  // every message that has arrived
  Status on_hello(Peer& peer, const shm::Message& message, UniqueFd fences);
  Status on_memfd(Peer& peer, const shm::Message& message, UniqueFd fd);
  void on_memfd_gone(Peer& peer, std::uint64_t memfd_id);
  void tell(Peer& peer, const shm::Message& message, SharedFd fd);
  void tell_all(const shm::Message& message, const SharedFd& fd);
  void flush(Peer& peer);
  void fail(Peer& peer, const std::string& why);  // the rail to it is down

  static bool can_run(const Peer& peer, const Work& work) noexcept;
  bool take_next(Peer*& peer, Work& work) noexcept;
  static bool needs_preparing(const Peer& peer) noexcept;
  Completion run(Peer& peer, const Work& work, std::uint64_t& moved_nbytes) noexcept;
  Completion fetch(Peer& peer, const Work& work, std::uint64_t& moved_nbytes) noexcept;
  void check_foreign(std::span<Completion> completions) noexcept;

  Reactor& reactor_;
  SharedFd fences_;  // of our own table
  std::map<RegionId, std::uint64_t> pool_regions_;  // ours -> the memfd_id that each lies in
  std::map<std::uint64_t, Exported> exported_;      // by memfd_id
  std::map<PeerId, std::unique_ptr<Peer>> peers_;
  PeerId next_peer_ = 1;
  PeerId last_served_ = 0;        // peers take turns, a piece each
  std::set<PeerId> active_;       // with work, or a mapping to prepare
  CompletionQueue ready_;         // that did not come from running work
  std::vector<std::pair<WorkId, Peer*>> foreign_reads_;  // of this round of poll
};

}  // namespace kvxfer
