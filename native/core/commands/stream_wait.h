// What a stream of a GPU waits for: a word in pinned memory, and beside it what came of it.
//
// The stream goes on once the word has come to `target`; whoever lets it go has stored the outcome before. So
// what runs behind the wait, and whoever sees that it ran, may read the outcome.
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
  // Nobody may be left waiting: who was not told how it ended goes on, as failed. The word is another wait's
  // then. Streams that have not come to it yet pass: values of a word only grow.
  ~StreamWait();

  // Lets the stream go. Only the first call counts. What was written before is seen by what runs behind.
  void end(Outcome outcome) noexcept;
  Outcome outcome() const noexcept { return static_cast<Outcome>(outcome_word().load()); }

  // For cuStreamWaitValue32: greater or equal.
  Word* word() const noexcept { return &place_->word; }
  Word target() const noexcept { return target_; }
  // 4 bytes that hold an Outcome, for kernels; as long as this object is there.
  const Word* outcome_address() const noexcept { return &place_->outcome; }

 private:
  // Alone on its cache line.
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
