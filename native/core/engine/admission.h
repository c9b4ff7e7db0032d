// Limits how many transfers of a session are open, and keeps those of ours that wait for room.
//
// Counts the transfers that either end began, and their block pairs. A transfer is open from the frame that
// announces it until both ends know that it has ended.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/sessions.h"
#include "core/engine/transfer_end.h"

namespace kvxfer {

class Admission {
 public:
  explicit Admission(const EngineConfig& config) : config_(config) {}

  // The next number for a transfer of ours.
  TransferId number(const Peer& peer);

  bool has_room(SessionKey session, bool ours, std::uint64_t num_pairs) const;
  // May so many more bytes go with an OFFER? A slow peer may leave all such bytes unread.
  bool has_eager_room(SessionKey session, std::uint32_t nbytes) const;
  // May a peer begin this transfer? Charges the peer for its tables, and for the notification that it may
  // become.
  Status admit(const Peer& peer, TransferEnd& transfer) const;
  void opened(TransferEnd& transfer);
  void closed(TransferEnd& transfer);  // call it once, if the transfer was open

  // ---- ours, in the order in which they were posted
  struct Waiting {
    TransferKey key;
    bool is_source;
    std::uint64_t num_pairs;
  };
  bool has_backlog(SessionKey session) const { return backlogged_.contains(session); }
  void wait(const TransferEnd& transfer);
  std::optional<Waiting> next(SessionKey session) const;  // while there is room for one
  void told(SessionKey session);  // the one from next()
  void forget(const TransferEnd& transfer);  // the transfer ended before the peer was told
  std::vector<SessionKey> backlogged() const { return {backlogged_.begin(), backlogged_.end()}; }
  bool has_any_backlog() const noexcept { return !backlogged_.empty(); }

  void remove_session(SessionKey session);

 private:
  struct Open {
    std::uint32_t transfers = 0;
    std::uint64_t pairs = 0;
    std::uint64_t eager_nbytes = 0;
  };
  struct OfSession {
    Open ours, theirs;  // by who posted them
    // By number, which is the order of posting, so that cancelling finds one among any number of others.
    std::map<TransferId, Waiting> backlog;
    TransferId next_number = 0;
  };

  const EngineConfig& config_;
  std::map<SessionKey, OfSession> sessions_;
  // Sessions with a backlog, so that a round costs nothing for the others.
  std::set<SessionKey> backlogged_;
};

}  // namespace kvxfer
