#include "core/engine/draining.h"

#include <algorithm>

namespace kvxfer {

void Draining::begin(TransferEnd& transfer) {
  transfer.draining_since = context_.now;
  rails_.stop(transfer);
  // A transfer that is done keeps its time: at that time, streams that wait for it go on.
  if (!transfer.timer)
    transfer.set_timer(context_.timers, time_after(context_.now, context_.config.session.silent_ns));
}

void Draining::tell(TransferEnd& transfer) {
  if (transfer.handle) transfer.handle->release_streams(Outcome::kFailed);
  const Time lasts = context_.now - transfer.draining_since;
  transfer.set_timer(context_.timers,
                     time_after(context_.now, std::max(lasts, context_.config.session.silent_ns)));
  std::string name, names;
  const auto say = [&](const std::string& what) {
    context_.host.emit(
        {.kind = EventKind::kLog,
         .message = transfer.name() + " with peer " + quoted(name) + " has ended, but " + what});
  };
  if (const auto view = sessions_.view(transfer.key.first)) name = view->name;
  for (const auto& [work, id] : transfer.posted) {
    const Rail* rail = rails_.find(id);
    std::string words = rail == nullptr ? "a rail that is down"
                                        : std::string(rail->capabilities().name) + " (rail " +
                                              std::to_string(rail->info().name.index) + ")";
    if (names.find(words) == std::string::npos) names += (names.empty() ? "" : ", ") + words;
  }
  const std::string after = " after " + std::to_string(lasts / 1'000'000) + " ms";
  if (transfer.posted.empty())
    return say("the peer has not said" + after +
               " that none of its bytes can land there any more: its device may be waiting for a kernel or a "
               "stream. The transfer's caller waits for that");
  std::string pages;
  if (const Region* local = regions_.find(transfer.region)) pages = " of region " + quoted(local->name);
  say(std::to_string(transfer.posted.size()) + " of its copies are still under way" + after + ", on " +
      names + ": until the device has ended them, its pages" + pages +
      " are not given back. A kernel or stream ahead of these copies may be waiting");
}

}  // namespace kvxfer
