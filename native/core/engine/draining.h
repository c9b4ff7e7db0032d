// Transfers that have ended while works of them are under way: the fence at this end.
//
// Nothing waits in a fence. A rail may need long to stop, or for ever: a kernel that was launched runs, a queue pair
// has to be reset. Its work's completion says that it has, and until then the engine serves everybody else. What
// waits for the last of them, a lease that has ended or a region that leaves, is told by ended().
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

  // The rails are to end what is posted of a transfer whose end is known.
  void begin(TransferEnd& transfer);
  // On its timer: it has drained for long, and the log says so now and whenever that has lasted twice as long.
  void tell(TransferEnd& transfer);
  // Nothing of it is under way any more.
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
