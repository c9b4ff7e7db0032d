// The host's part of the litmus test (native/gpu/litmus.cu). It waits for a round, looks at its words,
// replies, and lets the stream go on.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>

#include "gpu/litmus.h"

namespace kvxfer::bench {

// All of these lie in the host's memory, which the device reaches.
struct Relay {
  std::uint64_t* done;        // the device stores a round's number
  std::uint32_t* word;        // the device's stream waits for that number here
  const std::uint32_t* said;  // the words that the device stored for the round
  std::uint32_t* reply;       // the host's reply
  std::uint32_t num_words;
};

// Returns how many words of all rounds differed from what the device had said; none if the rounds did not end
// in time. In that case every stream is let go.
inline std::optional<std::uint64_t> relay(const Relay& ends, std::uint32_t num_rounds, double timeout_s) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  std::uint64_t wrong = 0;
  for (std::uint32_t round = 1; round <= num_rounds; ++round) {
    for (std::uint32_t looks = 0; std::atomic_ref(*ends.done).load(std::memory_order_acquire) < round;
         ++looks) {
      if (looks % 1024 != 1023) continue;
      if (std::chrono::steady_clock::now() > until) {
        std::atomic_ref(*ends.word).store(num_rounds, std::memory_order_release);
        return std::nullopt;
      }
      std::this_thread::yield();
    }
    for (std::uint32_t at = 0; at < ends.num_words; ++at) {
      wrong += ends.said[at] != gpu::litmus_word(round, at);
      ends.reply[at] = gpu::litmus_reply(round, at);
    }
    std::atomic_ref(*ends.word).store(round, std::memory_order_release);
  }
  return wrong;
}

}  // namespace kvxfer::bench
