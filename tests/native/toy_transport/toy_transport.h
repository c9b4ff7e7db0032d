// A transport to read before writing one: rails between agents of one process, as a NIC would make them.
//
//   NIC       what all instances of the process see: pinned memory by key, and endpoints, one for each end of a rail
//   prepare   pins, which may take long: tests let it wait
//   connect   exchanges endpoints over the rail's socket, whose end is the rail's
//   choose    what lies in few runs is fetched, by keys that the source's region has on the instance at the rail's
//             other end; what lies in many, or is to be converted, is sent: gathered there and scattered here
//   poll      turns works into completions, about 1 MiB at a time
//   arm       what was sent is announced only to an endpoint that is armed, by a byte over the rail's socket
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "kvxfer/transport_kind.h"
#include "transports/common/completion_queue.h"

namespace kvxfer::toy {

// What tests have prepare() do before it pins, on the thread that registers; its failure is prepare's.
std::function<Status(const LocalRegion&)>& before_pin();
std::size_t num_pinned();  // regions, of all instances of the process
// What tests have arm() do first, of an instance that waits for so many pieces.
std::function<void(std::size_t num_receives)>& before_arm();
// While it is set what is sent waits in the NIC until its receiver arms: it comes in the very last moment.
void hold(bool held);
std::size_t num_held();
std::size_t num_polls();  // of all instances of the process

struct Pin;

class ToyTransport final : public Transport {
 public:
  ToyTransport(Reactor& reactor, const FenceTable& fences, bool pins);
  ~ToyTransport() override;

  Capabilities capabilities() const noexcept override;
  Result<Pinned> prepare(const LocalRegion& region) override;
  Result<RegionKeys> register_memory(const LocalRegion& region, const Pinned& pinned) override;
  void deregister_memory(RegionId region) noexcept override;
  Result<PeerId> connect(UniqueFd socket, const ConnectInfo& info) override;
  void disconnect(PeerId peer) noexcept override;
  Status attach(PeerId peer, const RemoteRegion& region) override;
  void detach(PeerId peer, RegionId region) noexcept override;
  Code post(PeerId peer, const Work& work) noexcept override;
  WorkKind choose(PeerId peer, const Move& move, std::uint32_t piece) const noexcept override;
  void cancel(std::span<const WorkId> works) noexcept override;
  std::size_t poll(std::span<Completion> completions) noexcept override;
  bool busy() const noexcept override;
  bool wants_poll() const noexcept override;
  bool arm() noexcept override;

 private:
  struct Peer;
  struct Posted {
    Peer* peer;
    Work work;
  };

  bool accept(Peer& peer, const Work& work);
  void on_ready(Peer& peer);
  void fail(Peer& peer, const std::string& why);
  Completion run(Peer& peer, const Work& work, std::uint64_t& moved_nbytes) noexcept;
  Completion fetch(const Peer& peer, const Work& work) const;
  Completion send(const Peer& peer, const Work& work) const;
  bool receive(Peer& peer, std::uint64_t& moved_nbytes);

  Reactor& reactor_;
  const FenceTable& fences_;
  const bool pins_;
  std::map<RegionId, Pinned> registered_;
  std::map<PeerId, std::unique_ptr<Peer>> peers_;
  PeerId next_peer_ = 1;
  PeerId last_served_ = 0;  // peers take turns, a piece each
  std::map<WorkId, Posted> works_;  // that have not ended
  CompletionQueue ready_;  // that did not come from running work
};

}  // namespace kvxfer::toy
