// What one system call on a stream did.
#pragma once

#include <cstdint>

#include "kvxfer/status.h"

namespace kvxfer::stream {

// A system call costs about as much as this many bytes. So a peer that sends or takes a few bytes at a time
// gets no larger share of a turn.
inline constexpr std::uint64_t kCallWork = 8 * 1024;

struct Step {
  Status status;
  std::uint64_t nbytes = 0;
  std::uint64_t work = 0;  // what it cost, in bytes of long runs; at least kCallWork
  bool would_block = false;  // the socket had no room, or no bytes, for all that was asked
};

}  // namespace kvxfer::stream
