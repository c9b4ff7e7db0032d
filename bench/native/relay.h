// The host's part of the litmus test (native/gpu/litmus.cu): hears of a round, looks, replies, lets go.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>

#include "gpu/litmus.h"

namespace kvxfer::bench {

// All of it is memory of the host's that the device reaches.
struct Relay {
  std::uint64_t* done;        // the device stores the number of a round
  std::uint32_t* word;        // its stream waits for the same
  const std::uint32_t* said;  // by the device, of the round
  std::uint32_t* reply;       // by the host
  std::uint32_t num_words;
};

// Returns how many words of all rounds were not as the device had said; none where it did not come to the end
// within the time. Then every stream is let go.
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
