// Transfers that have ended while works of them are under way: the fence at this end.
//
// No thread waits in a fence. A rail may take long to stop, or never stop: a launched kernel runs on, a
// queue pair has to be reset. The completion of the work says that it has stopped; until then the engine
// serves all other sessions. When the last work has completed, ended() tells what waits for it: a lease that
// has ended, or a region that leaves.
#pragma once

#include "core/engine/context.h"
#include "core/engine/leases.h"
#include "core/engine/rails.h"
#include "core/engine/regions.h"
#include "core/engine/sessions.h"
#include "core/engine/transfer_end.h"

namespace kvxfer {

class Draining {
 public:
  Draining(Context& context, Sessions& sessions, Rails& rails, Regions& regions, Leases& leases)
      : context_(context), sessions_(sessions), rails_(rails), regions_(regions), leases_(leases) {}

  // Asks the rails to end the posted works of a transfer whose end is known.
  void begin(TransferEnd& transfer);
  // On its timer: it has drained for long. Writes a line to the log now, and again whenever that time has
  // doubled.
  void tell(TransferEnd& transfer);
  // None of its works is under way any more.
  void ended(const TransferEnd& transfer) {
    leases_.drained(transfer);
    regions_.drained(transfer.region);
  }

 private:
  Context& context_;
  Sessions& sessions_;
  Rails& rails_;
  Regions& regions_;
  Leases& leases_;
};

}  // namespace kvxfer
