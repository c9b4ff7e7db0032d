// The regions that peers told us of, the rails that reach each, and whether bytes can go between one of them
// and ours.
//
// A rail reaches memory of some kinds at each of its ends, and a region is registered only with the
// transports of its kind. So the keys that a REGION carries say how its bytes can leave and enter. This end
// need not know in what memory the region lies there.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/rails.h"
#include "core/engine/sessions.h"
#include "core/region.h"

namespace kvxfer {

struct PeerRegion {
  wire::Region region;
  std::vector<Rail*> reach;  // rails that its bytes can come over
  // Of those, rails that proved unable to reach it from memory of that kind here.
  std::vector<std::pair<Rail*, MemoryKind>> unable;
  std::vector<std::string> notes;  // each kept once, however often a rail failed in that way
  Charge charge;  // to the peer's budget: what it told

  void note(std::string words);
  // Can bytes go between the region and memory of that kind here, over this rail; over any? `converts`: by
  // a program that converts.
  bool comes_over(const Rail& rail, MemoryKind memory, bool converts) const;
  bool is_reached_from(MemoryKind memory, bool converts) const;
};

class PeerRegions {
 public:
  PeerRegions(Context& context, Sessions& sessions, Rails& rails)
      : context_(context), sessions_(sessions), rails_(rails) {}

  // A peer told a new region, and callers hear of it; or it told more keys of a known one. An error: the
  // peer breaks the protocol, or tells more than its budget has room for.
  Status add(const Peer& peer, wire::Region& region);
  PeerRegion* find(SessionKey session, RegionId id);
  const PeerRegion* find(SessionKey session, RegionId id) const;
  void remove(SessionKey session, RegionId id);
  void remove_session(SessionKey session) { sessions_regions_.erase(session); }
  Result<std::vector<RemoteRegionView>> views(SessionKey session) const;

  // ---- rails
  // Returns the regions that the new rail reaches.
  std::vector<RegionId> rail_up(Rail& rail);
  void rail_down(const Rail& rail);
  // The rail cannot reach that region from memory of that kind after all.
  void rail_failed(PeerRegion& region, Rail* rail, MemoryKind memory);
  // Is there another rail that reaches everything that this one reaches?
  bool others_replace(const Rail& rail) const;

  // ---- ways between regions
  // All rails to its peer: first the rails over which bytes can come from it to ours, in the order of
  // choice, then the others. `converts`: as below.
  std::vector<RailWay> ways(SessionKey session, const Region& local, const PeerRegion& remote,
                            bool converts) const;
  // Ok if bytes can go between the two, or if a rail may still come up on which they could.
  // `fetched_here`: the bytes become ours. `converts`: by a program that converts, which not every rail
  // runs.
  Status check_path(const Peer& peer, const Region& local, const PeerRegion& remote, bool fetched_here,
                    bool converts) const;

 private:
  bool attach(PeerRegion& remote, Rail& rail);
  Status add_keys(const Peer& peer, PeerRegion& remote, std::vector<wire::TransportKeys> told);
  static Status charge(const Peer& peer, PeerRegion& remote);

  Context& context_;
  Sessions& sessions_;
  Rails& rails_;
  std::map<SessionKey, std::map<RegionId, PeerRegion>> sessions_regions_;
};

// The processor computes checksums, and cannot read memory of a GPU.
Status check_integrity(const Region& local);

}  // namespace kvxfer
