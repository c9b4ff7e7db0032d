// What one system call on a stream did.
#pragma once

#include <cstdint>

#include "kvxfer/status.h"

namespace kvxfer::stream {

struct Step {
  Status status;
  std::uint64_t nbytes = 0;
  bool would_block = false;  // the socket had no room, or no bytes, for all that was asked
};

}  // namespace kvxfer::stream
