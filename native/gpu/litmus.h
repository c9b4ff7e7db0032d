// What the litmus test's ends say to each other.
#pragma once

#include <cstdint>

#include "kvxfer/number.h"

namespace kvxfer::gpu {

// The word at a place in a round; what the host says is another than what the device says.
KVXFER_HD inline unsigned litmus_word(unsigned round, unsigned at) {
  return round * 2654435761u + at * 40503u;
}
KVXFER_HD inline unsigned litmus_reply(unsigned round, unsigned at) { return ~litmus_word(round, at); }

// What a device found wrong: of what it had stored itself, and of what the host had.
struct LitmusWrong { unsigned pages, reply; };

}  // namespace kvxfer::gpu
