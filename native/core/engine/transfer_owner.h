// What Sources and Destinations do alike: they own the ends of transfers, give them their time, and tell what
// waits for one that has ended.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/engine/admission.h"
#include "core/engine/draining.h"
#include "core/engine/handles.h"
#include "core/engine/leases.h"
#include "core/engine/programs.h"
#include "core/engine/rails.h"
#include "core/engine/records.h"
#include "core/engine/sessions.h"
#include "core/engine/transfer_end.h"
#include "core/engine/transfer_table.h"

namespace kvxfer {

template <class End>
class TransferOwner {
 public:
  // Ours: queued; the peer is told of it later.
  End& add(std::unique_ptr<End> owned) {
    owned->posted_at = context_.now;
    End& added = ends_.add(std::move(owned));
    try {
      added.set_timer(context_.timers, time_after(context_.now, added.timeout_ns));
    } catch (...) {
      withdraw(added.key);
      throw;
    }
    return added;
  }
  // No peer has heard of it, and nothing of it was posted.
  void withdraw(TransferKey key) {
    End& end = *ends_.find(key);
    give_back(end);
    context_.timers.clear(end.timer);
    ends_.take(key);
  }
  void abandon() {  // gives up posted works: they complete no more
    while (!ends_.empty()) {
      End& end = *ends_.begin()->second;
      end.posted.clear();
      drained(end);
    }
  }

  const TransferTable<End>& all() const noexcept { return ends_; }  // draining ones included
  std::size_t size() const noexcept { return ends_.size(); }

 protected:
  TransferOwner(Context& context, Sessions& sessions, Rails& rails, Programs& programs, Leases& leases,
                Admission& admission, Handles& handles, Records& records, Draining& draining)
      : context_(context),
        sessions_(sessions),
        rails_(rails),
        programs_(programs),
        leases_(leases),
        admission_(admission),
        handles_(handles),
        records_(records),
        draining_(draining) {}
  ~TransferOwner() = default;

  // Gives back what an end holds besides its place in the table.
  virtual void give_back(End& end) = 0;
  // Works of it are posted, or the peer owes word of it.
  virtual bool is_under_way(const End& end) const { return !end.posted.empty(); }
  // The only way out: it is done, or it is not under way any more.
  virtual void drained(End& end) = 0;

  // If memory was lacking for its end, the end goes on where it stopped (Engine::lose).
  void end_again(End& end) {
    if (outcome_of(end.state) == Outcome::kPending) return;
    if (!is_under_way(end)) return drained(end);
    if (end.draining_since == 0) draining_.begin(end);
  }
  // Of an end that has drained: to its caller, or to the caller here to whom its notification goes.
  void report(End& end, std::uint32_t num_pieces, bool notifies, std::vector<std::uint32_t> failed_blocks) {
    const bool done = end.state == TransferState::kDone;
    give_back(end);
    context_.timers.clear(end.timer);
    if (end.ours && !done) admission_.forget(end);
    admission_.closed(end);
    records_.ended(end, num_pieces);
    if (done && notifies && !end.ours && !end.notify.empty() && sessions_.find(end.key.first) != nullptr)
      context_.host.emit({.kind = EventKind::kNotification,
                          .peer = end.key.first,
                          .payload = std::move(end.notify),
                          .context = std::move(end.context),
                          .charge = std::move(end.event)});
    ++(done ? context_.stats.transfers_done : context_.stats.transfers_failed);
    handles_.end(end.handle, end.state, end.reason, std::move(failed_blocks));
  }
  // A caller up the stack may hold it until the round is over.
  void retire(End& end) {
    context_.keep_for_this_round(ends_.take(end.key));
    draining_.ended(end);
  }

  Context& context_;
  Sessions& sessions_;
  Rails& rails_;
  Programs& programs_;
  Leases& leases_;
  Admission& admission_;
  Handles& handles_;
  Records& records_;
  Draining& draining_;
  TransferTable<End> ends_;
};

}  // namespace kvxfer
