// What a stream of a GPU waits for: a word in pinned memory, and beside it the outcome.
//
// The stream goes on once the word has reached `target`. The outcome is stored before the word is set. So
// kernels that run behind the wait, and any thread that sees that they ran, may read the outcome.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "core/outcome.h"
#include "core/system/nvtx.h"
#include "gpu/driver.h"
#include "kvxfer/status.h"

namespace kvxfer {

class StreamWait {
 public:
  using Word = std::uint32_t;

  static Result<std::shared_ptr<StreamWait>> create(const gpu::Driver& driver, int device);
  StreamWait(const StreamWait&) = delete;
  StreamWait& operator=(const StreamWait&) = delete;
  // Leaves no stream waiting: if no outcome was set, the stream goes on as failed. The word then belongs
  // to another wait. Streams that have not reached their wait yet pass it, since values of a word only
  // grow.
  ~StreamWait();

  // Lets the stream go. Only the first call counts. Work behind the wait sees what was written before this
  // call.
  void end(Outcome outcome) noexcept;
  Outcome outcome() const noexcept { return static_cast<Outcome>(outcome_word().load()); }

  // For cuStreamWaitValue32: greater or equal.
  Word* word() const noexcept { return &place_->word; }
  Word target() const noexcept { return target_; }
  // The address of 4 bytes that hold an Outcome, for kernels; valid as long as this object exists.
  const Word* outcome_address() const noexcept { return &place_->outcome; }

 private:
  // On a cache line of its own.
  struct alignas(64) Place { Word word = 0, outcome = 0; };
  class Pool;
  explicit StreamWait(Place* place) : place_(place), target_(place->word + 1) {}
  std::atomic_ref<Word> outcome_word() const noexcept { return std::atomic_ref(place_->outcome); }
  static Pool& pool();

  Place* const place_;
  const Word target_;
  std::atomic<bool> ended_{false};
  nvtx::Range range_{"wait in stream", target_};
};

}  // namespace kvxfer
