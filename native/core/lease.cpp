#include "core/lease.h"

#include <array>
#include <utility>

namespace kvxfer {

std::span<const LeaseTransition> lease_transitions() noexcept {
  using S = LeaseState;
  using E = LeaseEvent;
  static constexpr LeaseTransition kTable[] = {
      {S::kActive, E::kHeartbeat, S::kActive},      {S::kActive, E::kRevoke, S::kRevoked},
      {S::kActive, E::kExpire, S::kExpired},        {S::kActive, E::kPeerLost, S::kPeerLost},
      {S::kActive, E::kRegionGone, S::kRegionGone},
  };
  return kTable;
}

std::string_view name_of(LeaseState state) noexcept {
  constexpr std::array<std::string_view, 6> kNames = {"active",    "revoked",     "expired",
                                                      "peer-lost", "region-gone", "ending"};
  return kNames[static_cast<std::size_t>(state)];
}

bool is_named(std::string_view peer_name, std::string_view wanted) noexcept {
  if (!wanted.ends_with("/*")) return peer_name == wanted;
  wanted.remove_suffix(1);
  return peer_name.starts_with(wanted);
}

Lease::Lease(LeaseId id, LeaseTerms terms, std::uint32_t num_blocks, Time now)
    : id_(id),
      holder_(terms.holder),
      bearer_name_(std::move(terms.bearer_name)),
      allow_text_(std::move(terms.allow)),
      region_(terms.region),
      mode_(terms.mode),
      renewable_(terms.renewable && terms.holder),
      blocks_(terms.all_blocks ? SparseBitSet::all() : SparseBitSet(num_blocks)),
      ttl_ns_(terms.ttl_ns),
      expires_at_(time_after(now, terms.ttl_ns)) {
  for (const std::uint32_t block : terms.blocks) blocks_.insert(block);
  if (!allow_text_.empty()) allow_ = tls::Pattern::parse(allow_text_).value();
  if (!terms.all_blocks) num_blocks_ = static_cast<std::uint32_t>(terms.blocks.size());
}

}  // namespace kvxfer
