#include "gpu/stream_writes.h"

#include <string>
#include <utility>

namespace kvxfer::gpu {
namespace {

// The default streams (0, the legacy one and the per-thread one) belong to the context that is current.
bool is_named_by_number(Stream stream) { return reinterpret_cast<std::uintptr_t>(stream) <= 2; }

}  // namespace

Result<StreamWrites> StreamWrites::create(const Driver& driver, int device_index) {
  Device device = 0;
  if (const int error = driver.device_get(&device, device_index); error != 0)
    return driver.status(error, "cuDeviceGet of GPU " + std::to_string(device_index));
  Result<PrimaryContext> context = PrimaryContext::retain(driver, device_index);
  if (!context.ok()) return context.status();
  int flushes = 0;
  if (const int error = driver.device_attribute(&flushes, kCanFlushRemoteWrites, device); error != 0)
    return driver.status(error, "cuDeviceGetAttribute of GPU " + std::to_string(device_index));
  return StreamWrites(driver, std::move(context).value(), device, flushes != 0);
}

StreamWrites::StreamWrites(StreamWrites&& other) noexcept
    : driver_(other.driver_),
      context_(std::move(other.context_)),
      device_(other.device_),
      flushes_(other.flushes_),
      streams_(std::move(other.streams_)) {}

StreamWrites::~StreamWrites() {
  if (streams_.empty()) return;
  const ContextScope scope(driver_, context_.get());
  for (Stream stream : streams_) driver_.stream_destroy(stream);
}

Status StreamWrites::check_device(Stream stream) const {
  if (is_named_by_number(stream)) return {};
  Context context = nullptr;
  if (const int error = driver_.stream_context(stream, &context); error != 0)
    return driver_.status(error, "cuStreamGetCtx of the caller's stream");
  const ContextScope scope(driver_, context);
  Device device = 0;
  if (const int error = driver_.context_device(&device); error != 0)
    return driver_.status(error, "cuCtxGetDevice of the caller's stream");
  if (device != device_)
    return {Code::kInvalidArgument, "the stream is on GPU " + std::to_string(device) +
                                        ", but the agent's GPU is " + std::to_string(device_) +
                                        ": pass a stream on that GPU"};
  return {};
}

Status StreamWrites::after_stream(Stream stream, std::uint32_t* word, std::uint32_t value) {
  if (Status status = check_device(stream); !status.ok()) return status;
  const ContextScope scope(driver_, context_.get());
  // Flags 0: a barrier before the store, so that the store releases what the stream wrote.
  return driver_.status(driver_.stream_write(stream, reinterpret_cast<Address>(word), value, 0),
                        "cuStreamWriteValue32");
}

Status StreamWrites::once_after_stream(Stream stream, std::uint32_t* word, std::uint32_t value) {
  if (Status status = check_device(stream); !status.ok()) return status;
  const ContextScope scope(driver_, context_.get());
  const Result<bool> capturing = is_capturing(stream);
  if (!capturing.ok()) return capturing.status();
  if (capturing.value())
    return {Code::kInvalidArgument,
            "the stream is being captured into a graph, which runs later or many times: make a trigger with "
            "agent.trigger(), record() it in the stream, and wait for that"};
  return driver_.status(driver_.stream_write(stream, reinterpret_cast<Address>(word), value, 0),
                        "cuStreamWriteValue32");
}

Status StreamWrites::wait_in(Stream stream, const std::uint32_t* word, std::uint32_t value) {
  if (Status status = check_device(stream); !status.ok()) return status;
  const ContextScope scope(driver_, context_.get());
  const Result<bool> capturing = is_capturing(stream);
  if (!capturing.ok()) return capturing.status();
  if (capturing.value())
    return {
        Code::kInvalidArgument,
        "the stream is being captured into a graph, which runs later or many times, and this transfer ends "
        "once: have the stream wait before the graph is launched"};
  const int error = driver_.stream_wait(stream, reinterpret_cast<Address>(word), value,
                                        kWaitForMore | (flushes_ ? kFlushRemoteWrites : 0));
  if (error == kNotSupported)
    return {
        Code::kUnsupported,
        "streams of GPU " + std::to_string(device_) +
            " cannot wait for words of memory (cuStreamWaitValue32: CUDA_ERROR_NOT_SUPPORTED): wait on the "
            "host, with wait() or wait_layer()"};
  return driver_.status(error, "cuStreamWaitValue32");
}

Result<bool> StreamWrites::is_capturing(Stream stream) const {
  int capturing = 0;
  if (const int error = driver_.stream_is_capturing(stream, &capturing); error != 0)
    return driver_.status(error, "cuStreamIsCapturing");
  return capturing != 0;
}

Status StreamWrites::after_event(Event event, std::uint32_t* word, std::uint32_t value) {
  const ContextScope scope(driver_, context_.get());
  // Queried first: to wait for an event of a capture would pull our stream into the capture.
  if (const int error = driver_.event_query(event); error == kCapturedEvent)
    return {
        Code::kInvalidArgument,
        "the event was recorded while a graph was captured, which runs later or many times: make a trigger "
        "with agent.trigger(), record() it in the stream, and wait for that"};
  else if (error != 0 && error != kNotReady)
    return driver_.status(error, "cuEventQuery of the event to wait for");
  const std::lock_guard lock(mutex_);
  const Result<Stream> stream = free_stream();
  if (!stream.ok()) return stream.status();
  if (const int error = driver_.stream_wait_event(stream.value(), event, 0); error != 0)
    return driver_.status(error, "cuStreamWaitEvent");
  return driver_.status(driver_.stream_write(stream.value(), reinterpret_cast<Address>(word), value, 0),
                        "cuStreamWriteValue32");
}

Result<Stream> StreamWrites::free_stream() {
  for (Stream stream : streams_)
    if (driver_.stream_query(stream) == 0) return stream;
  int least = 0, greatest = 0;
  if (const int error = driver_.priority_range(&least, &greatest); error != 0)
    return driver_.status(error, "cuCtxGetStreamPriorityRange");
  Stream made = nullptr;
  if (const int error = driver_.stream_create(&made, kNonBlocking, greatest); error != 0)
    return driver_.status(error, "cuStreamCreateWithPriority");
  streams_.push_back(made);
  return made;
}

}  // namespace kvxfer::gpu
