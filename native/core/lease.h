// A lease at its grantor: an expiring right of one peer, or of its bearer, to named blocks of a region.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/control/session.h"
#include "core/control/wire.h"
#include "core/event.h"
#include "core/sparse_table.h"
#include "core/state_table.h"
#include "core/tls/identity.h"

namespace kvxfer {

// The sum, or kNever if the sum is too large: a peer may name any duration.
constexpr Time time_after(Time start, Time duration_ns) noexcept {
  return duration_ns > kNever - start ? kNever : start + duration_ns;
}

// kEnding: the right has ended, and works under it have not. Its final state is told when they have.
enum class LeaseState : std::uint8_t { kActive, kRevoked, kExpired, kPeerLost, kRegionGone, kEnding };
enum class LeaseEvent : std::uint8_t { kHeartbeat, kRevoke, kExpire, kPeerLost, kRegionGone };

using LeaseTransition = Transition<LeaseState, LeaseEvent>;
// Only an active lease has transitions: an ended one never comes back.
std::span<const LeaseTransition> lease_transitions() noexcept;
std::string_view name_of(LeaseState state) noexcept;

// Ids of bearers' leases have this bit, which counted ids never reach. They stay below 2^63, since on their
// way to the bearer they pass through programs with signed integers.
inline constexpr LeaseId kBearerBit = LeaseId{1} << 62;

// The terms on which a lease is granted.
struct LeaseTerms {
  std::optional<SessionKey> holder;  // none: a bearer's lease, which no heartbeat renews
  RegionId region;
  wire::LeaseMode mode;
  bool all_blocks;
  std::span<const std::uint32_t> blocks;  // below the region's number of blocks; empty with all_blocks
  Time ttl_ns;
  bool renewable;
  LeaseId bearer_id = 0;         // as a caller drew it before the grant; 0: none drawn
  std::string bearer_name = {};  // names of peers that may be the bearer (is_named); empty: any peer
  std::string allow = {};  // And what those peers' certificates must say (tls::Pattern); empty: anything.
};

// Does the peer's name match? "decode-0/*" matches every name that begins with "decode-0/".
bool is_named(std::string_view peer_name, std::string_view wanted) noexcept;

class Lease {
 public:
  Lease(LeaseId id, LeaseTerms terms, std::uint32_t num_blocks, Time now);

  bool step(LeaseEvent event) noexcept { return kvxfer::step(lease_transitions(), state_, event); }
  bool covers(std::uint32_t block) const noexcept { return blocks_.contains(block); }
  // May a peer that names the lease use it?
  bool admits(SessionKey peer, std::string_view peer_name, std::string_view identity) const {
    if (holder_) return *holder_ == peer;
    return (bearer_name_.empty() || is_named(peer_name, bearer_name_)) &&
           (!allow_ || allow_->matches(identity));
  }
  // Its holder was heard at that time.
  void renew(Time at) noexcept {
    if (renewable_ && step(LeaseEvent::kHeartbeat))
      expires_at_ = std::max(expires_at_, time_after(at, ttl_ns_));
  }
  // It ends no earlier than `until`; its timer finds that out.
  void extend(Time until) noexcept { expires_at_ = std::max(expires_at_, until); }

  LeaseId id() const noexcept { return id_; }
  std::optional<SessionKey> holder() const noexcept { return holder_; }
  const std::string& bearer_name() const noexcept { return bearer_name_; }
  const std::string& allow() const noexcept { return allow_text_; }
  RegionId region() const noexcept { return region_; }
  wire::LeaseMode mode() const noexcept { return mode_; }
  LeaseState state() const noexcept { return state_; }
  bool active() const noexcept { return state_ == LeaseState::kActive; }
  bool renewable() const noexcept { return renewable_; }
  const SparseBitSet& blocks() const noexcept { return blocks_; }
  // As many as were named; none: the whole region.
  std::optional<std::uint32_t> num_blocks() const noexcept { return num_blocks_; }
  Time ttl_ns() const noexcept { return ttl_ns_; }
  Time expires_at() const noexcept { return expires_at_; }

 private:
  LeaseId id_;
  std::optional<SessionKey> holder_;
  std::string bearer_name_;
  std::string allow_text_;
  std::optional<tls::Pattern> allow_;  // the same
  RegionId region_;
  wire::LeaseMode mode_;
  LeaseState state_ = LeaseState::kActive;
  bool renewable_;
  SparseBitSet blocks_;
  std::optional<std::uint32_t> num_blocks_;
  Time ttl_ns_, expires_at_;
};

}  // namespace kvxfer
