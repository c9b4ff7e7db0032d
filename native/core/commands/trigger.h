// A word in memory that somebody stores to when bytes are final, and what transfers that wait for it ask.
//
// Its value says how far things are and only grows until it is reset. Whoever stores releases: what it wrote
// before is seen by whoever reads the word by an acquire. That may be a thread of this process, another
// process that shares the memory, a stream of a GPU or a kernel.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "gpu/driver.h"
#include "kvxfer/status.h"

namespace kvxfer {

class Trigger {
 public:
  using Word = std::uint32_t;
  // What is called after fire(), and when the word becomes one that others store to.
  using Bell = std::function<void()>;

  // A word of this process's own, alone on its cache line.
  static std::shared_ptr<Trigger> create();
  // One in pinned memory, which the host and every GPU reach at the same address.
  static Result<std::shared_ptr<Trigger>> create_pinned(const gpu::Driver& driver, int device);
  // Somebody's, which stays for as long as this object does. Others may store to it from the beginning.
  static Result<std::shared_ptr<Trigger>> create_over(Word* word, std::shared_ptr<const void> keepalive);
  Trigger(const Trigger&) = delete;
  Trigger& operator=(const Trigger&) = delete;
  ~Trigger();

  Word value() const noexcept { return std::atomic_ref(*word_).load(std::memory_order_acquire); }
  // Stores a value, where it is more than what is there, and wakes who waits at once. From any thread.
  void fire(Word value);
  // Back to 0, for the next use. What a transfer has seen it has seen.
  void reset() noexcept { std::atomic_ref(*word_).store(0, std::memory_order_release); }

  // Where it lies, for whoever else is to store to it: from then on transfers that wait have it looked at,
  // again and again, where otherwise fire() wakes them. Such a word is nobody else's as long as the process
  // lives, since a stream or a graph may store to it long after this object is gone.
  Word* share();
  // The same for one store that certainly comes, of any value but 0: when it has come the word is free again.
  Word* share_once();
  bool shared() const noexcept { return shared_.load(std::memory_order_seq_cst); }

  // Rings from now on until the id is forgotten. A bell rings under a lock of the trigger's: it may neither
  // wait for long nor call back.
  void add_bell(const void* id, Bell bell);
  void forget_bell(const void* id);

 private:
  enum class Home : std::uint8_t { kProcess, kPinned, kForeign };
  Trigger(Word* word, Home home, std::shared_ptr<const void> keepalive = nullptr)
      : word_(word), home_(home), keepalive_(std::move(keepalive)) {}
  void ring();

  Word* const word_;
  const Home home_;
  const std::shared_ptr<const void> keepalive_;
  std::atomic<bool> shared_{false};
  bool once_ = false;
  std::mutex mutex_;
  std::vector<std::pair<const void*, Bell>> bells_;
};

// What a transfer waits for: layer k of those that it moves is final once the word is at least
// first + k * step; all of them at once where step is 0.
struct After {
  std::shared_ptr<Trigger> trigger;
  Trigger::Word first = 1, step = 0;

  std::uint32_t layers_ready(std::uint32_t num_layers) const noexcept {
    const Trigger::Word seen = trigger->value();
    if (seen < first) return 0;
    return step == 0 ? num_layers : std::min(num_layers - 1, (seen - first) / step) + 1;
  }
};

}  // namespace kvxfer
