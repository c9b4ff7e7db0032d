// A transport that misbehaves within its contract. It is a decorator around any other, and seeded: a run
// with the same seed and the same calls meets the same faults.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kvxfer/transport.h"

namespace kvxfer {

struct Faults {
  std::uint64_t seed = 1;
  double again = 0;    // of posts: takes a random prefix, perhaps empty, and says kAgain
  double delay = 0;    // of completions: held back for 1 to kMaxDelayPolls polls
  double reorder = 0;  // of completions: changes places with another that is due
  double fail = 0;     // of works: kRailFailed, whether or not the bytes moved
  double mistake = 0;  // of attached regions: an exception, as if kvxfer had made a mistake
  std::uint64_t down_after = 0;  // works accepted until the rail of the last one goes down; 0: never

  static constexpr std::uint32_t kMaxDelayPolls = 16;

  // Reads "seed=7,again=0.2,delay=0.3,reorder=0.5,fail=0.01,mistake=0.1,down_after=200"; a fault that is not named
  // keeps its default. kInvalidArgument with the offending part.
  static Result<Faults> parse(std::string_view text);
};

class FaultyTransport final : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, const Faults& faults);

  Capabilities capabilities() const noexcept override { return inner_->capabilities(); }
  Result<Pinned> prepare(const LocalRegion& region) override { return inner_->prepare(region); }
  Result<RegionKeys> register_memory(const LocalRegion& region, const Pinned& pinned) override {
    return inner_->register_memory(region, pinned);
  }
  void deregister_memory(RegionId region) noexcept override { inner_->deregister_memory(region); }
  MemoryLender* lender() noexcept override { return inner_->lender(); }
  Result<PeerId> connect(UniqueFd socket, const ConnectInfo& info) override;
  void disconnect(PeerId peer) noexcept override;
  std::string path_to(PeerId peer) const override { return inner_->path_to(peer); }
  Status attach(PeerId peer, const RemoteRegion& region) override;
  void detach(PeerId peer, RegionId region) noexcept override { inner_->detach(peer, region); }
  Code post(PeerId peer, const Work& work) noexcept override;
  WorkKind choose(PeerId peer, const Move& move, std::uint32_t piece) const noexcept override {
    return inner_->choose(peer, move, piece);
  }
  void cancel(std::span<const WorkId> works) noexcept override;
  std::size_t poll(std::span<Completion> completions) noexcept override;
  bool busy() const noexcept override { return !held_.empty() || inner_->busy(); }
  bool wants_poll() const noexcept override { return !held_.empty() || inner_->wants_poll(); }
  bool arm() noexcept override { return inner_->arm(); }

 private:
  struct Outstanding {
    PeerId peer = 0;
    bool to_fail = false;    // its kOk becomes kRailFailed
    bool cancelled = false;  // by the owner, not by a rail going down
  };
  struct Held {
    Completion completion;
    std::uint32_t polls_left = 0;
  };

  std::uint64_t random(std::uint64_t bound) noexcept;  // below bound
  bool chance(double rate) noexcept;
  void hold(Completion completion);
  void take_down(PeerId peer);

  std::unique_ptr<Transport> inner_;
  const Faults faults_;
  std::uint64_t random_state_;
  std::uint64_t num_accepted_ = 0;
  std::unordered_map<WorkId, Outstanding> outstanding_;  // at the inner transport
  std::unordered_set<PeerId> connected_;                 // and not disconnected yet
  std::unordered_set<PeerId> down_;  // of those: rails that went down, by our hand or by themselves
  std::vector<Held> held_;
};

}  // namespace kvxfer
