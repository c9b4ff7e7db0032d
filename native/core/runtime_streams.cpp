// Streams of a GPU that wait for transfers.
#include <string>

#include "core/runtime.h"

namespace kvxfer {

Result<std::shared_ptr<StreamWait>> Runtime::wait_in(gpu::Stream stream, Handle& handle,
                                                     std::optional<std::uint32_t> layer) {
  if (layer && !handle.has_layer(*layer))
    return Status(Code::kOutOfRange, "layer " + std::to_string(*layer) +
                                         " does not arrive here: it is not one of the transfer's");
  std::shared_ptr<gpu::StreamWrites> streams;
  {
    const std::lock_guard lock(streams_mutex_);
    streams = stream_writes_;
  }
  if (closed()) return check_alive();
  if (streams == nullptr)
    return Status(Code::kUnsupported,
                  "agent '" + options_.name + "' has no GPU in whose streams it could wait: name one of " +
                      names_reaching(MemoryKind::kGpu) +
                      " among its transports, or wait on the host, with wait() or wait_layer()");
  Result<std::shared_ptr<StreamWait>> made =
      StreamWait::create(*options_.gpus.front().driver, options_.gpus.front().device);
  if (!made.ok()) return made;
  const StreamWait& wait = *made.value();
  // First the store of the word is arranged, then the wait for it: an error in between leaves no stream
  // waiting.
  handle.add_wait(made.value(), layer);
  if (Status status = streams->wait_in(stream, wait.word(), wait.target()); !status.ok()) return status;
  return made;
}

}  // namespace kvxfer
