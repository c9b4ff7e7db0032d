// Adding to a list for which room was made before, in code that must not fail.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

namespace kvxfer {

// Ends the process: a caller's mistake, and never for want of memory.
[[noreturn]] inline void end_for_want_of_room() noexcept {
  std::fputs("kvxfer: a list was given too little room; this is a defect, please report it\n", stderr);
  std::abort();
}

// The caller has reserved room, so that nothing is allocated here.
template <class T, class... Parts>
T& add_in_room(std::vector<T>& list, Parts&&... parts) noexcept {
  try {
    return list.emplace_back(std::forward<Parts>(parts)...);
  } catch (...) {
    end_for_want_of_room();
  }
}

}  // namespace kvxfer
