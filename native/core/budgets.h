// What others may make an agent hold, limit by limit, unless an option says otherwise: one peer, and all
// strangers together.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "core/control/wire.h"
#include "kvxfer/budget.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// The limits of one peer. `max_open_transfers`, `max_open_pairs`: those of one session, in each direction.
inline Budget::Amounts peer_budget(std::uint32_t max_open_transfers, std::uint64_t max_open_pairs) noexcept {
  constexpr std::uint64_t kMiB = 1024 * 1024;
  Budget::Amounts limits{};
  const auto limit = [&](Resource resource) -> std::uint64_t& {
    return limits[static_cast<std::size_t>(resource)];
  };
  // Tables of open transfers: two ids of 4 bytes a pair, in two directions; 64 MiB by default. Programs:
  // 64 MiB. Control frames that the peer does not read: 16 MiB, four of the largest (FrameSocket), and one
  // of the peer's own that has begun to come. 112 MiB for the rest: what the peer tells of its regions,
  // what streams pack for it, queues of NICs (half a MiB a rail), the remembered tags of its writes (1
  // MiB, core/engine/tag_memory.h), and what else its transfers hold.
  limit(Resource::kBytes) = 2 * max_open_pairs * 8 + (64 + 16 + 112) * kMiB;
  // A 64th of the 128 TiB that a process can address; the largest hosts have as much memory.
  limit(Resource::kMapped) = std::uint64_t{2} * 1024 * 1024 * kMiB;
  // Its control socket, 64 rails of one transport (the most that an option asks for), one of each other
  // transport, its ring of frames, its fence table, and 57 pools that it shares: an eighth of the usual
  // 1024 descriptors.
  limit(Resource::kDescriptors) = 128;
  // FenceSlots decides how much of the table is left for other peers.
  limit(Resource::kFenceSlots) = max_open_transfers;
  // 4096 regions that came and went; notifications of open transfers in each direction, 4096 at least.
  // Each is at most 4 KiB and a context of 256 bytes.
  limit(Resource::kEvents) = 2 * 4096 + 2 * std::max<std::uint64_t>(max_open_transfers, 4096);
  // A peer that keeps to the protocol never exceeds it.
  limit(Resource::kMessages) = wire::kMessageWindow;
  return limits;
}

// The limits of all connections that have proved nothing yet; the oldest of them gives way. An eighth of the
// descriptors that the process may have, and 64 at least. Each has at most two frames of the handshake here.
inline std::shared_ptr<Budget> budget_of_strangers() {
  rlimit descriptors{};
  ::getrlimit(RLIMIT_NOFILE, &descriptors);
  const std::uint64_t num = std::clamp<std::uint64_t>(descriptors.rlim_cur / 8, 64, 1024);
  Budget::Amounts limits{};
  limits[static_cast<std::size_t>(Resource::kDescriptors)] = num;
  limits[static_cast<std::size_t>(Resource::kBytes)] =
      num * 2 * (wire::kHeaderNbytes + wire::kMaxHandshakeBody + wire::kMacNbytes);
  return std::make_shared<Budget>(limits);
}

}  // namespace kvxfer
