// The words that the two ends of the litmus test exchange.
#pragma once

#include <cstdint>

#include "kvxfer/number.h"

namespace kvxfer::gpu {

// The word at a place in a round. The host's word differs from the device's.
KVXFER_HD inline unsigned litmus_word(unsigned round, unsigned at) {
  return round * 2654435761u + at * 40503u;
}
KVXFER_HD inline unsigned litmus_reply(unsigned round, unsigned at) { return ~litmus_word(round, at); }

// How many words the device found wrong: of its own stores, and of the host's.
struct LitmusWrong { unsigned pages, reply; };

}  // namespace kvxfer::gpu
