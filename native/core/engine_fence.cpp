// Fences: what has ended as a right, and may be told to have ended when the last work under it has completed.
//
// Nobody stands in a fence. A rail may need long to stop, or for ever: a kernel that was launched runs, a queue
// pair has to be reset. Its work's completion says that it has, and until then the engine serves everybody else.
#include "core/engine.h"

namespace kvxfer {
namespace {

constexpr std::size_t kMaxEndedLeases = 4096;

}  // namespace

// Asks the rails to end what is posted of a transfer whose end is known.
void Engine::stop_works(Transfer& transfer, TimerKind kind) {
  transfer.draining_since = now_;
  for (const auto& [id, rail] : transfer.posted) {
    host_.cancel(rail, id);
    // Nobody waits for its piece, so it keeps no other from being posted, nor is its rail silent for it. The
    // rail itself bounds what it has under way.
    auto work = works_.find(id);
    if (work == works_.end() || work->second.use == WorkUse::kSend || work->second.draining) continue;
    work->second.draining = true;
    --outstanding_pieces_;
    if (auto found = rails_.find(rail); found != rails_.end()) --found->second.outstanding;
  }
  // A transfer that is done keeps its time, at which streams that wait for it go on.
  if (!transfer.timed) set_timer(transfer, kind, time_after(now_, config_.session.silent_ns));
}

// It has drained for long: somebody is to hear of it, now and whenever that has lasted twice as long.
void Engine::tell_draining(Transfer& transfer, TimerKind kind) {
  if (transfer.handle) transfer.handle->let_streams_go(Outcome::kFailed);
  const Time lasts = now_ - transfer.draining_since;
  set_timer(transfer, kind, time_after(now_, std::max(lasts, config_.session.silent_ns)));
  std::string name, rails;
  if (const auto view = peer(transfer.key.first)) name = view->name;
  for (const auto& [work, id] : transfer.posted) {
    const auto rail = rails_.find(id);
    std::string words = rail == rails_.end() ? "a rail that is down"
                                             : std::string(rail->second.info.capabilities.name) + " (rail " +
                                                   std::to_string(rail->second.info.index) + ")";
    if (rails.find(words) == std::string::npos) rails += (rails.empty() ? "" : ", ") + words;
  }
  std::string pages;
  if (const Region* local = region(transfer.region)) pages = " of region " + quoted(local->name);
  host_.emit(
      {.kind = EventKind::kLog,
       .message = "transfer " + std::to_string(transfer.key.second) + " with peer " + quoted(name) +
                  " has ended, but " + std::to_string(transfer.posted.size()) +
                  " of its copies are still under way after " + std::to_string(lasts / 1'000'000) +
                  " ms, on " + rails + ": until the device has ended them its pages" + pages +
                  " are not given back. A kernel or a stream in front of them may wait for something"});
}

// Nothing of a transfer is under way any more: what has waited for that alone is told.
void Engine::drained(const Transfer& transfer) {
  if (!ending_leases_.empty())
    for (const LeaseId id : transfer.leases)
      if (auto found = ending_leases_.find(id);
          found != ending_leases_.end() && --found->second.num_draining == 0) {
        const EndingLease lease = std::move(found->second);
        ending_leases_.erase(found);
        lease_fenced(id, lease.holder, lease.state, lease.why);
      }
  if (auto found = leaving_regions_.find(transfer.region);
      found != leaving_regions_.end() && --found->second.num_draining == 0) {
    bury(std::move(found->second.region));
    leaving_regions_.erase(found);
    host_.region_fenced(transfer.region);
  }
}

void Engine::lease_fenced(LeaseId id, std::optional<SessionKey> holder, LeaseState state, const Status& why) {
  ended_leases_[id] = state;
  ended_lease_ids_.push_back(id);
  if (ended_lease_ids_.size() > kMaxEndedLeases) {
    ended_leases_.erase(ended_lease_ids_.front());
    ended_lease_ids_.pop_front();
  }
  host_.emit({.kind = EventKind::kLeaseEnded,
              .peer = holder.value_or(0),
              .lease = id,
              .code = why.code(),
              .message = why.message()});
}

void Engine::expectation_fenced(const Expectation& expectation, TransferState state, Status why) {
  end_handle(expectation.handle(), state, std::move(why),
             state == TransferState::kDone ? std::vector<std::uint32_t>{} : expectation.incomplete_blocks());
}

// All of them, before the first rail lets memory go: that may wait for the whole device, and a stream that waits
// for a transfer holds the device up.
void Engine::let_streams_go() {
  for (const auto& [key, source] : sources_)
    if (source->handle) source->handle->let_streams_go(Outcome::kFailed);
  for (const auto& [key, destination] : destinations_) {
    if (destination->handle) destination->handle->let_streams_go(Outcome::kFailed);
    if (destination->expectation) destination->expectation->handle()->let_streams_go(Outcome::kFailed);
  }
}

}  // namespace kvxfer
