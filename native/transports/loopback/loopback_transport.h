// A rail between agents of one process: the destination copies straight from the source's pages.
//
// The smallest transport, and the one to start from when writing another. Its parts:
//   Exposure    what this agent lets the others reach: its regions and its fence words
//   Peer        one connected agent: its exposure, and what all rails on one host know of a peer (rail_peers.h)
//   copy_slice  a slice of a piece, under the exposure's lock; the rest is CopyingRail's
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "kvxfer/transport.h"
#include "transports/common/copying_rail.h"

namespace kvxfer {

namespace loopback {

class Exposure;

// The one message of each end. It names the sender's exposure, which only code of the same process can look
// up. The token proves that both ends are in one process and use one copy of this library.
struct Hello {
  std::array<char, 8> magic{'k', 'v', 'x', 'l', 'o', 'o', 'p', '1'};
  std::array<std::byte, 16> process{};
  std::uint64_t exposure = 0;

  bool is_of_this_version() const noexcept { return magic == Hello().magic; }
  bool is_hello() const noexcept { return true; }
  Status check(bool has_fd) const {
    return has_fd ? Status(Code::kRailFailed, "it sent a descriptor") : Status();
  }
};
static_assert(sizeof(Hello) == 32);

struct Peer : RailPeer<Hello> {
  using RailPeer::RailPeer;
  std::shared_ptr<Exposure> exposure;  // set when the rail is up
  std::unordered_map<RegionId, std::uint64_t> attached;  // -> end of its bytes
};

}  // namespace loopback

class LoopbackTransport final : public CopyingRail<loopback::Peer> {
 public:
  LoopbackTransport(Reactor& reactor, const FenceTable& fences);
  ~LoopbackTransport() override;

  Capabilities capabilities() const noexcept override;
  Result<RegionKeys> register_memory(const LocalRegion& region, const Pinned&) override;
  void deregister_memory(RegionId region) noexcept override;
  Result<PeerId> connect(UniqueFd socket, const ConnectInfo& info) override;
  Status attach(PeerId peer, const RemoteRegion& region) override;
  void detach(PeerId peer, RegionId region) noexcept override;

 private:
  using Peer = loopback::Peer;

  void greet(Peer& peer) override;
  Status on_hello(Peer& peer, const loopback::Hello& hello, UniqueFd fd) override;
  Status on_message(Peer& peer, const loopback::Hello& hello, UniqueFd fd) override;
  void on_down(Peer& peer) override;
  Result<std::uint64_t> copy_slice(Peer& peer, Peer::Copy& copy, std::string& broken) override;
  Status compare_fence(Peer& peer, const Fence& fence) override;

  std::shared_ptr<loopback::Exposure> exposure_;
};

}  // namespace kvxfer
