// What happened, in a code that programs test and a sentence that people read.
#pragma once

#include <cassert>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace kvxfer {

// Grouped by the largest thing lost (kvxfer/errors.py maps each to one exception class).
// The numbers travel on the wire: append, never renumber.
enum class Code : std::uint16_t {
  kOk = 0,
  kAgain = 1,  // back-pressure, not failure: the same call may succeed later

  // The caller's mistake; nothing was posted. -> UsageError
  kInvalidArgument = 10,
  kOutOfRange = 11,       // a block id, layer or offset outside its region
  kDuplicateBlock = 12,   // a destination block named twice
  kLengthMismatch = 13,   // block tables of different length
  kLayoutMismatch = 14,   // no copy program leads from one layout to the other
  kUnknownRegion = 15,    // never registered, or of an earlier epoch
  kUnsupported = 16,      // nothing on this machine or rail can do it; the message says why
  kExhausted = 17,        // a bounded resource (pool, slots, queue) is used up

  // One transfer is lost; retry or recompute. -> TransferError
  kNotPermitted = 30,     // no lease of the peer covers the blocks
  kLeaseEnded = 31,       // revoked or expired while the bytes moved
  kRegionGone = 32,       // deregistered while the bytes moved
  kCancelled = 33,
  kDeadline = 34,
  kIntegrity = 35,        // a checksum differs
  kRefused = 36,          // the peer declined for a reason of its own
  kNoPath = 37,           // no rail that is up can bring the bytes (any more)

  // One path is lost; other rails carry on. -> RailError
  kRailFailed = 50,

  // The peer is lost, with every transfer and lease of its session. -> PeerError
  kPeerLost = 70,         // its connection closed
  kPeerSilent = 71,       // nothing heard for the configured time
  kPeerRestarted = 72,    // the same name came back with another incarnation
  kAuthFailed = 73,
  kProtocol = 74,         // a malformed, replayed or oversized frame
  kUnreachable = 75,      // could not be connected to
  kNoAnswer = 76,         // the time to connect was over

  // The agent is lost. -> AgentError
  kClosed = 90,
  kForked = 91,
  kSystem = 92,           // a system call failed; the message has its name and errno
  kInternal = 93,
};

// The groups of codes with which transfers, expectations and leases end. Whatever else went wrong on the
// way, the caller that awaits one of them hears that it is lost itself, or its peer, or its agent
// (docs/errors.md).
constexpr bool is_of_transfer(Code code) noexcept {
  return code >= Code::kNotPermitted && code < Code::kRailFailed;
}
constexpr bool is_of_peer(Code code) noexcept { return code >= Code::kPeerLost && code < Code::kClosed; }

// The code's name in words, e.g. "lease-ended".
std::string_view name_of(Code code) noexcept;

// What errno says; if the process has no descriptor left, also how many it may have.
std::string words_of(int error);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  static Status from_errno(std::string_view what, int error);  // kSystem, "what: text (errno N)"

  bool ok() const noexcept { return code_ == Code::kOk; }
  Code code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// A value, or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T&& value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(const T& value) : state_(std::in_place_index<0>, value) {}
  Result(Status status) : state_(std::in_place_index<1>, std::move(status)) {
    assert(!std::get<1>(state_).ok());
  }

  bool ok() const noexcept { return state_.index() == 0; }
  Status status() const { return ok() ? Status() : std::get<1>(state_); }
  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace kvxfer
