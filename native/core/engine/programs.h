// Copy programs between a region of ours and one of a peer's: those that this end compiled and told to the
// peer, and those that peers told us. The latter are checked before any bytes move by them.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>

#include "core/engine/peer_regions.h"
#include "core/engine/regions.h"
#include "core/engine/sessions.h"
#include "core/engine/transfer_end.h"

namespace kvxfer {

class Programs {
 public:
  struct Program {
    std::shared_ptr<const CopyProgram> copies;
    RegionId src = 0, dst = 0;
    bool write = false;  // of ours only: our region is the source
    // Of a peer's: the result of its check for OFFERs, and for REQUESTs. Region ids are each agent's
    // own, so the two uses of one program name different regions, and the result for one says nothing
    // about the other.
    std::optional<Status> for_offers, for_requests;
  };
  // Both regions of a transfer that a peer begins, and the program between them.
  struct Use {
    Program* program;
    const Region* local;
    const PeerRegion* remote;
  };

  Programs(Sessions& sessions, Regions& regions, PeerRegions& peer_regions)
      : sessions_(sessions), regions_(regions), peer_regions_(peer_regions) {}

  // Checks a program of ours and tells the peer of it. Our callers bound how many they have installed.
  Result<std::uint32_t> install(Peer& peer, bool write, RegionId src, RegionId dst, CopyProgram program);
  const Program* find_ours(SessionKey session, std::uint32_t id) const;
  // Forgets a program of ours that no new transfer will name. Transfers that were posted keep theirs. The
  // peer keeps it until its number names another one.
  void forget(SessionKey session, std::uint32_t id) noexcept;
  // The number by which the peer knows the program of a transfer of ours, which is told next. Tells the peer
  // the program first, if it has had to make room for others since it was used last.
  std::uint32_t number(Peer& peer, const TransferEnd& transfer);

  // A peer told us a program. An error: it breaks the protocol. A program that is one too many is not kept,
  // and transfers that name it are refused in words.
  Status told(Peer& peer, wire::Program& program);
  // The regions and the program of a transfer that a peer begins. Cheap: it runs before the search for the
  // transfer's right.
  Result<Use> find(const Peer& peer, const wire::TransferSpec& spec, Side ours);
  // Checks the program against both regions, once for the pair, and the transfer's ids.
  Status check(const Use& use, const Move& move, Side ours) const;

  // Forgets programs of ours from or to a region that is gone, ours or the peer's.
  void forget(SessionKey session, RegionId gone, bool of_peer);
  void remove_session(SessionKey session) { sessions_programs_.erase(session); }

 private:
  // A number under which a peer keeps a program of ours.
  struct Number {
    std::uint32_t number;
    std::uint64_t nbytes;  // of what the peer keeps under it
    std::shared_ptr<const CopyProgram> copies;  // null: no transfer will name it, so it may name another
  };
  using Numbers = std::list<Number>;
  struct OfSession {
    std::map<std::uint32_t, Program> ours, theirs;  // by who compiled it
    std::uint32_t next = 1;  // never given again, so that an id of a forgotten program names no other
    // What the peer keeps of ours: those without a program first, then by their last use, oldest first.
    Numbers numbers;
    std::unordered_map<const CopyProgram*, Numbers::iterator> numbered;
    std::uint64_t nbytes = 0;  // of all numbers
    Status unkept;  // why the newest program of theirs that found no room was not kept
  };
  std::uint32_t number(Peer& peer, const std::shared_ptr<const CopyProgram>& copies, RegionId src,
                       RegionId dst);
  void make_room(Peer& peer, OfSession& session, std::uint64_t nbytes);
  static void vacate(OfSession& session, const CopyProgram* copies) noexcept;

  Sessions& sessions_;
  Regions& regions_;
  PeerRegions& peer_regions_;
  std::map<SessionKey, OfSession> sessions_programs_;
};

}  // namespace kvxfer
