// A lease at its grantor: an expiring right to named blocks of a region, of one peer or of its bearer.
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

// The sum, where it can be kept: a peer's durations may be as long as the numbers go.
constexpr Time time_after(Time start, Time duration_ns) noexcept {
  return duration_ns > kNever - start ? kNever : start + duration_ns;
}

// kEnding: the right has ended, and works under it have not; what it ended as is told when they have.
enum class LeaseState : std::uint8_t { kActive, kRevoked, kExpired, kPeerLost, kRegionGone, kEnding };
enum class LeaseEvent : std::uint8_t { kHeartbeat, kRevoke, kExpire, kPeerLost, kRegionGone };

using LeaseTransition = Transition<LeaseState, LeaseEvent>;
// Only an active lease has transitions: an ended one never comes back.
std::span<const LeaseTransition> lease_transitions() noexcept;
std::string_view name_of(LeaseState state) noexcept;

// Ids of bearers' leases have this bit, which counted ones never reach, and stay below 2^63: on their
// way to the bearer they pass programs whose integers have a sign.
inline constexpr LeaseId kBearerBit = LeaseId{1} << 62;

// What a lease is granted on.
struct LeaseTerms {
  std::optional<SessionKey> holder;  // none: it is its bearer's, and nobody's heartbeats renew it
  RegionId region;
  wire::LeaseMode mode;
  bool all_blocks;
  std::span<const std::uint32_t> blocks;  // below the region's number; empty with all_blocks
  Time ttl_ns;
  bool renewable;
  LeaseId bearer_id = 0;         // as it was told before the grant; 0: none was
  std::string bearer_name = {};  // of the peers that may be its bearer (is_named); empty: any peer
  std::string allow = {};  // and what their certificates say (tls::Pattern); empty: anything
};

// Whether a peer is called that; "decode-0/*" is every name that begins with "decode-0/".
bool is_named(std::string_view peer_name, std::string_view wanted) noexcept;

class Lease {
 public:
  Lease(LeaseId id, LeaseTerms terms, std::uint32_t num_blocks, Time now);

  bool step(LeaseEvent event) noexcept { return kvxfer::step(lease_transitions(), state_, event); }
  bool covers(std::uint32_t block) const noexcept { return blocks_.contains(block); }
  // Whether a peer that names it may use it.
  bool admits(SessionKey peer, std::string_view peer_name, std::string_view identity) const {
    if (holder_) return *holder_ == peer;
    return (bearer_name_.empty() || is_named(peer_name, bearer_name_)) &&
           (!allow_ || allow_->matches(identity));
  }
  // Its holder was heard then.
  void renew(Time at) noexcept {
    if (renewable_ && step(LeaseEvent::kHeartbeat))
      expires_at_ = std::max(expires_at_, time_after(at, ttl_ns_));
  }
  // It ends no earlier than then; its timer finds that out.
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
  // As they were named; none: the whole region.
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
