// A transport to read before writing one: rails between agents of one process, as a NIC would make them. The
// destination fetches, by keys that the source's region has on the instance at the rail's other end.
//
//   NIC       what all instances of the process see: pinned memory by key, fence words by endpoint
//   prepare   pins, which may take long: tests let it wait
//   connect   exchanges endpoints over the rail's socket, whose end is the rail's
//   poll      turns queued work into completions, about 1 MiB at a time
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "kvxfer/transport_kind.h"
#include "transports/common/completion_queue.h"

namespace kvxfer::toy {

// What tests have prepare() do before it pins, on the thread that registers; its failure is prepare's.
std::function<Status(const LocalRegion&)>& before_pin();
std::size_t num_pinned();  // regions, of all instances of the process

struct Pin;

class ToyTransport final : public Transport {
 public:
  ToyTransport(Reactor& reactor, const FenceTable& fences, bool pins);
  ~ToyTransport() override;

  Capabilities capabilities() const noexcept override;
  bool prepares() const noexcept override { return pins_; }
  Result<Pinned> prepare(const LocalRegion& region) override;
  Result<RegionKeys> register_memory(const LocalRegion& region) override;
  Result<RegionKeys> register_memory(const LocalRegion& region, const Pinned& pinned) override;
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
  struct Peer;

  void on_ready(Peer& peer);
  void fail(Peer& peer, const std::string& why);
  Completion run(Peer& peer, const Work& work, std::uint64_t& moved_nbytes) noexcept;

  Reactor& reactor_;
  const bool pins_;
  const std::uint64_t endpoint_;
  std::map<RegionId, Pinned> registered_;
  std::map<PeerId, std::unique_ptr<Peer>> peers_;
  PeerId next_peer_ = 1;
  PeerId last_served_ = 0;  // peers take turns, a piece each
  CompletionQueue ready_;   // that did not come from running work
};

}  // namespace kvxfer::toy
