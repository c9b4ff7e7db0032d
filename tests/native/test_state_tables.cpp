// The tables of transfer and lease: what is listed happens, all else is ignored, what is final stays.
#include <algorithm>
#include <array>
#include <set>
#include <span>
#include <vector>

#include "check.h"
#include "core/lease.h"
#include "core/transfer_states.h"

namespace kvxfer {
namespace {

constexpr int kNumTransferStates = static_cast<int>(TransferState::kCancelled) + 1;
constexpr int kNumTransferEvents = static_cast<int>(TransferEvent::kDrained) + 1;

bool is_final(TransferState state) { return state >= TransferState::kDone; }

template <class Visit>
void for_each_pair(Visit&& visit) {
  for (int s = 0; s < kNumTransferStates; ++s)
    for (int e = 0; e < kNumTransferEvents; ++e)
      visit(static_cast<TransferState>(s), static_cast<TransferEvent>(e));
}

const TransferTransition* find(std::span<const TransferTransition> table, TransferState from,
                               TransferEvent event) {
  const TransferTransition* found = nullptr;
  for (const TransferTransition& transition : table)
    if (transition.from == from && transition.event == event) {
      CHECK(found == nullptr);  // one answer to each question
      found = &transition;
    }
  return found;
}

std::set<TransferState> reachable(std::span<const TransferTransition> table, std::set<TransferState> states) {
  for (std::size_t size = 0; size != states.size();) {
    size = states.size();
    for (const TransferTransition& transition : table)
      if (states.contains(transition.from)) states.insert(transition.to);
  }
  return states;
}

void check_table(std::span<const TransferTransition> table) {
  for_each_pair([&](TransferState from, TransferEvent event) {
    const TransferTransition* const listed = find(table, from, event);
    TransferState state = from;
    CHECK_EQ(step(table, state, event), listed != nullptr);
    CHECK_EQ(state, listed != nullptr ? listed->to : from);
    if (is_final(from)) CHECK(listed == nullptr);
    const bool is_known = std::any_of(table.begin(), table.end(),
                                      [&](const TransferTransition& each) { return each.from == from; });
    if (is_draining(from) && is_known) CHECK_EQ(listed != nullptr, event == TransferEvent::kDrained);
  });
}

void check_every_open_state_can_fail_and_be_cancelled(std::span<const TransferTransition> table,
                                                      const std::set<TransferState>& states) {
  for (const TransferState from : states) {
    if (is_final(from) || is_draining(from)) continue;
    for (const auto& [event, draining, final] :
         {std::tuple(TransferEvent::kFail, TransferState::kFailing, TransferState::kFailed),
          std::tuple(TransferEvent::kCancel, TransferState::kCancelling, TransferState::kCancelled)}) {
      TransferState state = from;
      CHECK(step(table, state, event));
      CHECK_EQ(state, draining);
      CHECK(step(table, state, TransferEvent::kDrained));
      CHECK_EQ(state, final);
    }
  }
}

TEST(every_pair_of_transfer_state_and_event_is_listed_or_ignored) {
  check_table(source_transitions());
  check_table(destination_transitions());
}

TEST(a_source_reaches_its_states_and_no_others) {
  using S = TransferState;
  const auto states = reachable(source_transitions(), {S::kQueued});
  CHECK_EQ(states, (std::set{S::kQueued, S::kServing, S::kFailing, S::kCancelling, S::kFinishing, S::kDone,
                             S::kFailed, S::kCancelled}));
  check_every_open_state_can_fail_and_be_cancelled(source_transitions(), states);
}

TEST(a_destination_reaches_its_states_and_no_others) {
  using S = TransferState;
  const auto states = reachable(destination_transitions(), {S::kQueued, S::kParked});
  CHECK_EQ(states, (std::set{S::kQueued, S::kParked, S::kRequested, S::kMoving, S::kFailing, S::kCancelling,
                             S::kDone, S::kFailed, S::kCancelled}));
  check_every_open_state_can_fail_and_be_cancelled(destination_transitions(), states);
}

TEST(every_transfer_state_and_event_has_a_name_of_its_own) {
  std::set<std::string_view> states, events;
  for_each_pair([&](TransferState state, TransferEvent event) {
    states.insert(name_of(state));
    events.insert(name_of(event));
  });
  CHECK_EQ(states.size(), kNumTransferStates);
  CHECK_EQ(events.size(), kNumTransferEvents);
}

TEST(an_ended_lease_never_comes_back) {
  constexpr std::array kEvents = {LeaseEvent::kHeartbeat, LeaseEvent::kRevoke, LeaseEvent::kExpire,
                                  LeaseEvent::kPeerLost, LeaseEvent::kRegionGone};
  for (const LeaseTransition& transition : lease_transitions()) CHECK(transition.from == LeaseState::kActive);
  std::set<LeaseState> states;
  for (const LeaseEvent first : kEvents) {
    Lease lease(1, {1, 1, wire::LeaseMode::kRead, true, {}, 100, true}, 4, 0);
    CHECK(lease.step(first));
    states.insert(lease.state());
    if (lease.active()) continue;
    const LeaseState ended = lease.state();
    for (const LeaseEvent second : kEvents) CHECK(!lease.step(second));
    lease.renew(50);
    CHECK_EQ(lease.state(), ended);
    CHECK_EQ(lease.expires_at(), 100);
  }
  CHECK_EQ(states.size(), kEvents.size());
  std::set<std::string_view> names;
  for (const LeaseState state : states) names.insert(name_of(state));
  CHECK_EQ(names.size(), states.size());
}

TEST(a_lease_covers_its_blocks_and_is_renewed_where_it_may_be) {
  const std::vector<std::uint32_t> blocks = {1, 3};
  Lease lease(1, {1, 1, wire::LeaseMode::kRead, false, blocks, 100, true}, 4, 10);
  for (std::uint32_t block = 0; block < 4; ++block) CHECK_EQ(lease.covers(block), block % 2 == 1);
  CHECK_EQ(lease.expires_at(), 110);
  lease.renew(60);
  CHECK_EQ(lease.expires_at(), 160);
  Lease fixed(2, {1, 1, wire::LeaseMode::kRead, true, {}, 100, false}, 4, 10);
  fixed.renew(60);
  CHECK_EQ(fixed.expires_at(), 110);
  CHECK(fixed.covers(3));
  Lease endless(3, {1, 1, wire::LeaseMode::kRead, true, {}, kNever, true}, 4, 10);
  CHECK_EQ(endless.expires_at(), kNever);
  endless.renew(60);
  CHECK_EQ(endless.expires_at(), kNever);
}

TEST(a_lease_admits_its_holder_or_where_there_is_none_any_peer) {
  const Lease held(1, {5, 1, wire::LeaseMode::kRead, true, {}, 100, true}, 4, 10);
  for (SessionKey peer = 1; peer < 10; ++peer) CHECK_EQ(held.admits(peer, "a", ""), peer == 5);
  Lease bearers(kBearerBit, {std::nullopt, 1, wire::LeaseMode::kRead, true, {}, 100, true}, 4, 10);
  for (SessionKey peer = 1; peer < 10; ++peer) CHECK(bearers.admits(peer, "a", ""));
  CHECK(!bearers.renewable());
  bearers.renew(60);
  CHECK_EQ(bearers.expires_at(), 110);
}

TEST(a_lease_of_a_name_admits_every_peer_of_that_name) {
  struct Case {
    std::string_view wanted, peer;
    bool is_admitted;
  };
  constexpr Case kCases[] = {
      {"decode-0", "decode-0", true},
      {"decode-0", "decode-01", false},
      {"decode-0", "decode-0/1", false},
      {"decode-0", "DECODE-0", false},
      {"decode-0", "", false},
      {"decode-0/*", "decode-0/1.ab", true},
      {"decode-0/*", "decode-0/1/2", true},
      {"decode-0/*", "decode-0", false},
      {"decode-0/*", "decode-01/1", false},
      {"decode-0/*", "x/decode-0/1", false},
      {"decode-0*", "decode-01", false},
      {"*", "decode-0", false},
      {"decode-*/0", "decode-1/0", false},
      {"/*", "decode-0", false},
  };
  for (const Case& one : kCases) {
    Lease lease(kBearerBit,
                {std::nullopt, 1, wire::LeaseMode::kRead, true, {}, 100, false, 0, std::string(one.wanted)},
                4, 10);
    CHECK_EQ(lease.admits(7, one.peer, "acme/decode/decode-0"), one.is_admitted);
  }
}

TEST(a_lease_of_certificates_admits_those_that_match) {
  const auto lease_of = [](std::string allow, std::string name = "") {
    LeaseTerms terms{std::nullopt, 1, wire::LeaseMode::kRead, true, {}, 100, false, 0, std::move(name)};
    terms.allow = std::move(allow);
    return Lease(kBearerBit, std::move(terms), 4, 10);
  };
  CHECK(lease_of("acme/*/*").admits(7, "decode-0", "acme/decode/decode-0"));
  CHECK(!lease_of("acme/*/*").admits(7, "decode-0", "other/decode/decode-0"));
  CHECK(!lease_of("acme/*/*").admits(7, "decode-0", ""));
  CHECK(lease_of("acme/*/*", "decode-0").admits(7, "decode-0", "acme/decode/decode-0"));
  CHECK(!lease_of("acme/*/*", "decode-1").admits(7, "decode-0", "acme/decode/decode-0"));
}

}  // namespace
}  // namespace kvxfer
