/* What plain loops share: a clock, and an order in which no two pages are neighbours. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <time.h>

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void shuffle(uint32_t* order, size_t count) {
  uint64_t state = 88172645463325252u;
  for (size_t i = 0; i < count; ++i) order[i] = (uint32_t)i;
  for (size_t i = count - 1; i > 0; --i) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    const size_t other = state % (i + 1);
    const uint32_t kept = order[i];
    order[i] = order[other], order[other] = kept;
  }
}
