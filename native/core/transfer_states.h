// The two ends of a transfer as state machines: one table for each end lists every transition.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/outcome.h"
#include "core/state_table.h"

namespace kvxfer {

enum class TransferState : std::uint8_t {
  kQueued,      // ours, not told to the peer yet: the session has as many open transfers as it may
  kParked,      // destination: no right covers the blocks of this offer yet
  kRequested,   // destination: asked to read, waiting for ACCEPT
  kMoving,      // destination: pieces are scheduled and moved
  kServing,     // source: the destination may fetch
  kFailing,     // stopped; posted works have yet to complete
  kCancelling,  // the same, because the caller asked
  kFinishing,  // source: the destination has everything; sends that it did not need have yet to complete
  kDone,
  kFailed,
  kCancelled,
};

enum class TransferEvent : std::uint8_t {
  kAnnounced,        // OFFER or REQUEST went out
  kAuthorized,  // a lease or an expectation covers every block
  kAccepted,    // the source's ACCEPT came
  kAllIn,       // destination: every piece is in, read or sent under a right that held
  kPeerDone,    // source: the destination's DONE came
  kFail,        // every bad end: deadline, lease, region, rail, peer, checksum
  kCancel,      // by the caller at this end
  kDrained,     // none of its works is posted any more
};

using TransferTransition = Transition<TransferState, TransferEvent>;
std::span<const TransferTransition> source_transitions() noexcept;
std::span<const TransferTransition> destination_transitions() noexcept;

// Its end is known, and is told when the last of its works has completed.
constexpr bool is_draining(TransferState state) noexcept {
  return state == TransferState::kFailing || state == TransferState::kCancelling ||
         state == TransferState::kFinishing;
}

// How a transfer in this state ends, or has ended; kPending before that is known.
constexpr Outcome outcome_of(TransferState state) noexcept {
  switch (state) {
    case TransferState::kFinishing:
    case TransferState::kDone: return Outcome::kDone;
    case TransferState::kFailing:
    case TransferState::kFailed: return Outcome::kFailed;
    case TransferState::kCancelling:
    case TransferState::kCancelled: return Outcome::kCancelled;
    default: return Outcome::kPending;
  }
}

std::string_view name_of(TransferState state) noexcept;
std::string_view name_of(TransferEvent event) noexcept;

}  // namespace kvxfer
