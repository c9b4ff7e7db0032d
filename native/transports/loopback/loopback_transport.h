// A rail between agents of one process: the destination copies straight from the source's pages.
//
// The smallest transport, and the one to start from when writing another. Its parts:
//   Exposure  what this agent lets the others reach: its regions and its fence words
//   Peer      one connected agent: its socket (alive or not), its exposure, its queue of work
//   poll      turns queued work into completions, about 1 MiB at a time
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "kvxfer/transport.h"
#include "transports/common/completion_queue.h"
#include "transports/common/work_queue.h"

namespace kvxfer {

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(Reactor& reactor, const FenceTable& fences);
  ~LoopbackTransport() override;

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

 private:
  struct Exposure;
  struct Peer;

  void on_ready(Peer& peer);                           // its socket can be read
  void fail(Peer& peer, const std::string& why);       // the rail to it is down
  Completion run(Peer& peer, const Work& work, std::uint64_t& moved_nbytes) noexcept;
  Completion fetch(Peer& peer, const Work& work, std::uint64_t& moved_nbytes) noexcept;
  Completion check_fence(Peer& peer, const Work& work) noexcept;

  Reactor& reactor_;
  std::shared_ptr<Exposure> exposure_;
  std::map<PeerId, std::unique_ptr<Peer>> peers_;
  PeerId next_peer_ = 1;
  PeerId last_served_ = 0;              // peers take turns, a piece each
  CompletionQueue ready_;               // that did not come from running work
};

}  // namespace kvxfer
