// Has streams of a GPU store to a word when the work enqueued so far has ended, and wait for a word.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "gpu/driver.h"
#include "kvxfer/status.h"

namespace kvxfer::gpu {

// Words lie in pinned memory; the caller keeps them for as long as a store or a wait may access them.
// Callable from any thread.
class StreamWrites {
 public:
  static Result<StreamWrites> create(const Driver& driver, int device);
  StreamWrites(StreamWrites&& other) noexcept;
  StreamWrites& operator=(StreamWrites&&) = delete;
  ~StreamWrites();  // does not wait for enqueued work

  // The stream stores the value after all work enqueued before; a thread that acquires the word sees what
  // that work wrote. A stream that is being captured stores it whenever the graph runs. kInvalidArgument for
  // a stream of another GPU.
  Status after_stream(Stream stream, std::uint32_t* word, std::uint32_t value);
  // As after_stream, but kInvalidArgument also for a stream that is being captured, since the graph may run
  // at any time.
  Status once_after_stream(Stream stream, std::uint32_t* word, std::uint32_t value);
  // Stores the value when the work before the event has ended. One of our own streams stores it. Each event
  // that is waited for at the same time has its own stream; in a single stream they would wait for each
  // other.
  Status after_event(Event event, std::uint32_t* word, std::uint32_t value);
  // Work enqueued in the stream from now on begins when the word has reached the value, and sees what was
  // written before the value was stored. The caller ensures that the word is stored, also after errors:
  // otherwise the stream waits without end. kInvalidArgument as for once_after_stream; kUnsupported if the
  // device's streams cannot wait for words.
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
  bool flushes_;  // a wait's end flushes remote writes
  std::mutex mutex_;
  std::vector<Stream> streams_;  // under the mutex
};

}  // namespace kvxfer::gpu
