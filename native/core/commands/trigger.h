// A word in memory that its writer stores to when bytes are final, and the condition that waiting transfers
// check.
//
// The word's value says how far the writer is, and only grows until it is reset. The writer stores with
// release: a reader that loads the word with acquire sees all that was written before. The writer may be a
// thread of this process, another process that shares the memory, a stream of a GPU, or a kernel.
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
  // Called after fire(), and when the word becomes one that others store to.
  using Bell = std::function<void()>;

  // Makes one with a word of this process's own, on a cache line of its own.
  static std::shared_ptr<Trigger> create();
  // Makes one with a word in pinned memory, which the host and every GPU reach at the same address.
  static Result<std::shared_ptr<Trigger>> create_pinned(const gpu::Driver& driver, int device);
  // Makes one over the caller's word, which must stay for as long as this object. Others may store to it
  // from the beginning.
  static Result<std::shared_ptr<Trigger>> create_over(Word* word, std::shared_ptr<const void> keepalive);
  Trigger(const Trigger&) = delete;
  Trigger& operator=(const Trigger&) = delete;
  ~Trigger();

  Word value() const noexcept { return std::atomic_ref(*word_).load(std::memory_order_acquire); }
  // Stores a value if it is larger than the present one, and wakes waiting threads at once. From any
  // thread.
  void fire(Word value);
  // Sets the word back to 0, for the next use. Layers that a transfer has seen released stay released.
  void reset() noexcept { std::atomic_ref(*word_).store(0, std::memory_order_release); }

  // Returns the word's address for another writer. From then on the agent looks again and again at the
  // word of a waiting transfer; before, fire() wakes it. The word is not reused as long as the process
  // lives, since a stream or a graph may store to it long after this object is gone.
  Word* share();
  // The same for a single store that certainly comes, of any value but 0. After that store the word may be
  // reused.
  Word* share_once();
  bool shared() const noexcept { return shared_.load(std::memory_order_seq_cst); }

  // Rings `bell` from now on, until forget_bell(id). A bell rings under a lock of the trigger: it must
  // neither wait for long nor call back.
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

// What a transfer waits for: layer k of those that it moves is final once the word is at least first + k *
// step. With step 0, all layers become final at once.
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
