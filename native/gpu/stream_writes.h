// Words that streams of a GPU store to when what is enqueued there so far has ended, and words that they wait
// for.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "gpu/driver.h"
#include "kvxfer/status.h"

namespace kvxfer::gpu {

// Words are pinned, and theirs for as long as the store may come. From any thread.
class StreamWrites {
 public:
  static Result<StreamWrites> create(const Driver& driver, int device);
  StreamWrites(StreamWrites&& other) noexcept;
  StreamWrites& operator=(StreamWrites&&) = delete;
  ~StreamWrites();  // does not wait for what was enqueued

  // The stream stores the value after everything that it was given before, and whoever acquires the word sees
  // what that wrote. A stream that is being captured does so whenever the graph runs. kInvalidArgument for a
  // stream of another GPU.
  Status after_stream(Stream stream, std::uint32_t* word, std::uint32_t value);
  // As after_stream, but kInvalidArgument for a stream that is being captured: nobody knows when it runs.
  Status once_after_stream(Stream stream, std::uint32_t* word, std::uint32_t value);
  // When what the event was recorded behind has ended. Stored to by a stream of our own, one for each event
  // that is waited for at the same time: one stream alone would have them wait for each other.
  Status after_event(Event event, std::uint32_t* word, std::uint32_t value);
  // What is enqueued from now on begins when the word has come to the value, and sees what was written before
  // it was stored. The word is pinned, and stays; somebody stores it, whatever happens. kInvalidArgument as
  // once_after_stream, kUnsupported where the device does not wait for words.
  Status wait_in(Stream stream, const std::uint32_t* word, std::uint32_t value);

 private:
  StreamWrites(const Driver& driver, PrimaryContext context, int device, bool flushes)
      : driver_(driver), context_(std::move(context)), device_(device), flushes_(flushes) {}
  Status check_device(Stream stream) const;
  Result<bool> is_capturing(Stream stream) const;
  Result<Stream> free_stream();

  const Driver& driver_;
  PrimaryContext context_;
  int device_;
  bool flushes_;  // remote writes, when a wait ends
  std::mutex mutex_;
  std::vector<Stream> streams_;  // under the mutex
};

}  // namespace kvxfer::gpu
