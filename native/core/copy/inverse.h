// Replacements for a division by a scale. A division costs as much as the rest of a conversion.
#pragma once

#include <cstdint>

namespace kvxfer {

struct Inverse {
  enum Kind : std::uint8_t {
    kNone,    // nothing: divide
    kHigh,    // x * high is x / scale, to the bit
    kHighLow  // fma(x, high, x * low) rounds to the same 8-bit number as x / scale
  };
  Kind kind = kNone;
  float high = 1, low = 0;
  // If x is a bf16, x * bf16 rounds to the same 8-bit float as x / scale; 0: there is no such factor.
  float bf16 = 0;
};

// Remembers results: runs are short, and there are only as many scales as heads, often just one.
Inverse inverse_of(float scale) noexcept;

}  // namespace kvxfer
