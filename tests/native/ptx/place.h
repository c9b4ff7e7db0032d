// Where a translated kernel is, and how the program ends if the kernel does something that PTX does not
// define.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "cuda_threads.h"

namespace ptx {

// An instruction, as in the PTX.
struct Place {
  const char* file;
  int line;
  const char* instruction;
};

// How long a thread waits for what should happen. A kernel that would hang on a device ends the program.
inline std::atomic<int> bound_s{30};

[[gnu::format(printf, 2, 3), noreturn]] inline void trap(const Place& at, const char* format, ...) {
  char why[400];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(why, sizeof why, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "%s:%d: thread %u of CTA %u: %s: %s\n", at.file, at.line, threadIdx.x, blockIdx.x,
               at.instruction, why);
  std::abort();
}

inline constexpr std::chrono::microseconds kLongestRest{1000};

// Waits until holds(), or calls give_up().
template <class Condition, class GiveUp>
void wait_until(Condition&& holds, GiveUp&& give_up) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(bound_s);
  // Checks less and less often, since hundreds of threads may wait at a time.
  for (std::chrono::microseconds rest{10}; !holds(); rest = std::min(2 * rest, kLongestRest)) {
    if (std::chrono::steady_clock::now() > end) give_up();
    std::this_thread::sleep_for(rest);
  }
}

}  // namespace ptx
