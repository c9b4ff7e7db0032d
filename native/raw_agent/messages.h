// Messages between two raw agents: a kind, and its content.
#pragma once

#include <cstdint>
#include <string>

#include "kvxfer/status.h"

namespace kvxfer::raw_agent {

// First byte of a message.
inline constexpr std::uint8_t kClaim = 1;  // a token
inline constexpr std::uint8_t kGranted = 2;  // a token
inline constexpr std::uint8_t kRefused = 3;  // a token
inline constexpr std::uint8_t kNotify = 4;  // a caller's bytes
inline constexpr std::uint8_t kPart = 5;  // of what the next of those below says
inline constexpr std::uint8_t kTell = 6;  // metadata
inline constexpr std::uint8_t kAsk = 7;  // for metadata
inline constexpr std::uint8_t kAnswer = 8;  // metadata
inline constexpr std::uint8_t kForget = 9;
inline constexpr std::uint8_t kThanks = 10;  // it is done

// The error for a remote agent that is not known.
inline Status unknown(const std::string& name) {
  return {Code::kUnknownRegion, "no metadata of agent " + name + " were loaded"};
}

}  // namespace kvxfer::raw_agent
