// Copy programs between a region of ours and one of a peer's: those that this end compiled and told, and those
// that peers told us, which are checked before anything is moved by them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/engine/peer_regions.h"
#include "core/engine/regions.h"
#include "core/engine/sessions.h"

namespace kvxfer {

class Programs {
 public:
  struct Program {
    std::shared_ptr<const CopyProgram> copies;
    RegionId src = 0, dst = 0;
    bool write = false;  // of ours alone: our region is the source
    // A peer's: what was found of it for OFFERs, for REQUESTs. Region ids are each agent's own, so the two uses
    // of one program name different regions, and what holds for one says nothing about the other.
    std::optional<Status> for_offers, for_requests;
    Charge charge;  // of the peer's budget
  };
  // Both regions of a transfer that a peer begins, and the program between them.
  struct Use {
    Program* program;
    const Region* local;
    const PeerRegion* remote;
  };

  Programs(Sessions& sessions, Regions& regions, PeerRegions& peer_regions)
      : sessions_(sessions), regions_(regions), peer_regions_(peer_regions) {}

  // Checks one of ours and tells the peer of it.
  Result<std::uint32_t> install(Peer& peer, bool write, RegionId src, RegionId dst, CopyProgram program);
  const Program* find_ours(SessionKey session, std::uint32_t id) const;
  // One of ours by which no transfer is told any more. The peer keeps it until its number names another.
  void forget(SessionKey session, std::uint32_t id) noexcept;

  // A peer told one. An error: it breaks the protocol.
  Status told(Peer& peer, wire::Program& program);
  // What a transfer that a peer begins is between. Cheap: it comes before the transfer's right is looked for.
  Result<Use> find(const Peer& peer, const wire::TransferSpec& spec, Side ours);
  // Checks its program against both regions, once for the pair, and its ids.
  Status check(const Use& use, const Move& move, Side ours) const;

  // Ours from or to a region that is gone, ours or the peer's.
  void forget(SessionKey session, RegionId gone, bool of_peer);
  void remove_session(SessionKey session) { sessions_programs_.erase(session); }

 private:
  struct OfSession {
    std::map<std::uint32_t, Program> ours, theirs;  // by who compiled it
    std::uint32_t next = 1;
    std::vector<std::uint32_t> free;  // numbers below it, of programs that were forgotten
  };

  Sessions& sessions_;
  Regions& regions_;
  PeerRegions& peer_regions_;
  std::map<SessionKey, OfSession> sessions_programs_;
};

}  // namespace kvxfer
