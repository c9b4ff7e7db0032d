#include "core/lease.h"

#include <array>

namespace kvxfer {
namespace {

using S = LeaseState;
using E = LeaseEvent;

constexpr LeaseTransition kTable[] = {
    {S::kActive, E::kHeartbeat, S::kActive},      {S::kActive, E::kRevoke, S::kRevoked},
    {S::kActive, E::kExpire, S::kExpired},        {S::kActive, E::kPeerLost, S::kPeerLost},
    {S::kActive, E::kRegionGone, S::kRegionGone},
};

}  // namespace

std::span<const LeaseTransition> lease_transitions() noexcept { return kTable; }

std::string_view name_of(LeaseState state) noexcept {
  constexpr std::array<std::string_view, 6> kNames = {"active",    "revoked",     "expired",
                                                      "peer-lost", "region-gone", "ending"};
  return kNames[static_cast<std::size_t>(state)];
}

Lease::Lease(LeaseId id, std::optional<SessionKey> holder, RegionId region, wire::LeaseMode mode,
             bool all_blocks, std::span<const std::uint32_t> blocks, std::uint32_t num_blocks, Time ttl_ns,
             bool renewable, Time now)
    : id_(id),
      holder_(holder),
      region_(region),
      mode_(mode),
      renewable_(renewable && holder),
      blocks_(all_blocks ? BitSet::all(num_blocks) : BitSet(num_blocks)),
      ttl_ns_(ttl_ns),
      expires_at_(time_after(now, ttl_ns)) {
  for (const std::uint32_t block : blocks) blocks_.insert(block);
}

}  // namespace kvxfer
