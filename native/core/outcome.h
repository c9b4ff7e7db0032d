// How a transfer, or an expectation, has ended.
#pragma once

#include <cstdint>

namespace kvxfer {

// Kernels read these numbers (stream_wait.h): they stay what they are.
enum class Outcome : std::uint8_t { kPending = 0, kDone = 1, kFailed = 2, kCancelled = 3 };

}  // namespace kvxfer
