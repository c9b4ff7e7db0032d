#include "core/transfer_states.h"

#include <array>

namespace kvxfer {

std::span<const TransferTransition> source_transitions() noexcept {
  using S = TransferState;
  using E = TransferEvent;
  static constexpr TransferTransition kTable[] = {
      {S::kQueued, E::kAnnounced, S::kServing}, {S::kQueued, E::kFail, S::kFailing},
      {S::kQueued, E::kCancel, S::kCancelling}, {S::kServing, E::kPeerDone, S::kFinishing},
      {S::kServing, E::kFail, S::kFailing},     {S::kServing, E::kCancel, S::kCancelling},
      {S::kFailing, E::kDrained, S::kFailed},   {S::kCancelling, E::kDrained, S::kCancelled},
      {S::kFinishing, E::kDrained, S::kDone},
  };
  return kTable;
}

std::span<const TransferTransition> destination_transitions() noexcept {
  using S = TransferState;
  using E = TransferEvent;
  static constexpr TransferTransition kTable[] = {
      {S::kQueued, E::kAnnounced, S::kRequested},  {S::kQueued, E::kFail, S::kFailing},
      {S::kQueued, E::kCancel, S::kCancelling},    {S::kParked, E::kAuthorized, S::kMoving},
      {S::kParked, E::kFail, S::kFailing},         {S::kParked, E::kCancel, S::kCancelling},
      {S::kRequested, E::kAccepted, S::kMoving},   {S::kRequested, E::kFail, S::kFailing},
      {S::kRequested, E::kCancel, S::kCancelling}, {S::kMoving, E::kAllIn, S::kDone},
      {S::kMoving, E::kFail, S::kFailing},         {S::kMoving, E::kCancel, S::kCancelling},
      {S::kFailing, E::kDrained, S::kFailed},      {S::kCancelling, E::kDrained, S::kCancelled},
  };
  return kTable;
}

std::string_view name_of(TransferState state) noexcept {
  constexpr std::array<std::string_view, 11> kNames = {"queued",  "parked",  "requested",  "moving",
                                                       "serving", "failing", "cancelling", "finishing",
                                                       "done",    "failed",  "cancelled"};
  return kNames[static_cast<std::size_t>(state)];
}

std::string_view name_of(TransferEvent event) noexcept {
  constexpr std::array<std::string_view, 8> kNames = {"told",      "authorized", "accepted", "all in",
                                                      "peer-done", "fail",       "cancel",   "drained"};
  return kNames[static_cast<std::size_t>(event)];
}

}  // namespace kvxfer
