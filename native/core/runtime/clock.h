// The clock of agents: monotonic, so that no time is counted by the wall's.
#pragma once

#include <ctime>

#include "core/control/session.h"

namespace kvxfer {

inline Time monotonic_now() noexcept {
  timespec time;
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return Time{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace kvxfer
