// Turns requests of our callers into transfers: checks them, cuts them into pieces, numbers them, and tells
// the peer as soon as the session has room. A write becomes a Source here, a read a Destination.
#pragma once

#include <cstdint>
#include <memory>

#include "core/engine/admission.h"
#include "core/engine/destinations.h"
#include "core/engine/handles.h"
#include "core/engine/peer_limits.h"
#include "core/engine/peer_regions.h"
#include "core/engine/programs.h"
#include "core/engine/rails.h"
#include "core/engine/regions.h"
#include "core/engine/sessions.h"
#include "core/engine/sources.h"

namespace kvxfer {

class Posting {
 public:
  Posting(Context& context, Sessions& sessions, const PeerLimits& limits, Rails& rails, Regions& regions,
          PeerRegions& peer_regions, Programs& programs, Leases& leases, Handles& handles,
          Admission& admission, Sources& sources, Destinations& destinations)
      : context_(context),
        sessions_(sessions),
        limits_(limits),
        rails_(rails),
        regions_(regions),
        peer_regions_(peer_regions),
        programs_(programs),
        leases_(leases),
        handles_(handles),
        admission_(admission),
        sources_(sources),
        destinations_(destinations) {}

  Result<std::shared_ptr<Handle>> post(TransferRequest request);
  // Tells peers of the transfers that waited for room.
  void serve_backlog();

 private:
  std::uint32_t pairs_per_piece(const TransferRequest& request, const CopyProgram& copies,
                                const Region& local, const PeerRegion& remote) const;
  std::uint32_t eager_nbytes(const Peer& peer, const Source& source) const;
  bool announce(Peer& peer, TransferKey key, bool is_source);

  Context& context_;
  Sessions& sessions_;
  const PeerLimits& limits_;
  Rails& rails_;
  Regions& regions_;
  PeerRegions& peer_regions_;
  Programs& programs_;
  Leases& leases_;
  Handles& handles_;
  Admission& admission_;
  Sources& sources_;
  Destinations& destinations_;
};

}  // namespace kvxfer
