// Transfers that wait for a word of memory, and how sleeping threads hear of it.
#include <algorithm>
#include <utility>

#include "core/runtime.h"

namespace kvxfer {
namespace {

// A store by a GPU or another process is not announced. A sleeping thread looks at those words this often at
// first, and later after a fraction of the time already slept. So a wait is a hundredth or so longer, and a
// long wait costs little of a processor (DESIGN.md has the measurements).
constexpr Time kLeastPause = 20'000, kMostPause = 1'000'000;
constexpr Time kPausePart = 64;

constexpr Time kLongest = 3'600'000'000'000;  // as ppoll takes it

}  // namespace

void Runtime::sleep(Time until, const SystemThreads::Bell& bell) {
  const Time began = now();
  for (Time at = began; at < until;) {
    const Time pause =
        unannounced() ? std::clamp<Time>((at - began) / kPausePart, kLeastPause, kMostPause) : kLongest;
    if (reactor_.wait(std::min(until - at, pause), bell.fd.get()) || triggers_.has_news() ||
        commands_.has_news())
      return;
    at = now();
  }
}

bool Runtime::unannounced() const noexcept { return triggers_.unannounced() || commands_.any_open(); }

Result<std::shared_ptr<Handle>> Runtime::post_after(TransferRequest request, After after) {
  triggers_.free_ended();
  const std::uint32_t num_layers = request.num_layers, ready = after.layers_ready(num_layers);
  request.layers_ready = ready;
  std::optional<Result<std::shared_ptr<Handle>>> post = with_open_engine([&](Engine& engine, Time at) {
    Result<std::shared_ptr<Handle>> handle = engine.post(at, std::move(request));
    if (handle.ok() && ready < num_layers) triggers_.add(handle.value(), std::move(after), num_layers, ready);
    return handle;
  });
  if (!post) return check_alive();
  Result<std::shared_ptr<Handle>> posted = std::move(*post);
  // A sleeping thread does not look at words yet; and one may have been stored to since.
  if (posted.ok() && ready < num_layers && (triggers_.unannounced() || triggers_.has_news())) wake();
  return posted;
}

Result<std::shared_ptr<Trigger>> Runtime::make_trigger() const {
  if (options_.gpus.empty()) return Trigger::create();
  return Trigger::create_pinned(*options_.gpus.front().driver, options_.gpus.front().device);
}

Result<std::shared_ptr<gpu::StreamWrites>> Runtime::streams() const {
  const std::lock_guard lock(streams_mutex_);
  if (closed()) return check_alive();
  if (stream_writes_ != nullptr) return stream_writes_;
  return Status(Code::kUnsupported, "agent '" + options_.name +
                                        "' has no GPU whose streams it could wait for: name one of " +
                                        names_reaching(MemoryKind::kGpu) +
                                        " among its transports, or wait for a trigger that the host fires");
}

Status Runtime::record(Trigger& trigger, gpu::Stream stream, Trigger::Word value) {
  const auto writes = streams();
  if (!writes.ok()) return writes.status();
  return writes.value()->after_stream(stream, trigger.share(), value);
}

Result<After> Runtime::after_stream(gpu::Stream stream) {
  return once([&](gpu::StreamWrites& writes, Trigger::Word* word) {
    return writes.once_after_stream(stream, word, 1);
  });
}

Result<After> Runtime::after_event(gpu::Event event) {
  return once(
      [&](gpu::StreamWrites& writes, Trigger::Word* word) { return writes.after_event(event, word, 1); });
}

// A trigger for one store, which `write` enqueues.
Result<After> Runtime::once(const std::function<Status(gpu::StreamWrites&, Trigger::Word*)>& write) {
  const auto writes = streams();
  if (!writes.ok()) return writes.status();
  Result<std::shared_ptr<Trigger>> trigger = make_trigger();
  if (!trigger.ok()) return trigger.status();
  if (Status status = write(*writes.value(), trigger.value()->share_once()); !status.ok()) return status;
  return After{std::move(trigger).value()};
}

}  // namespace kvxfer
