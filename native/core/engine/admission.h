// How many transfers of a session may be open, and which of ours wait until there is room.
//
// Counts what both ends began, in block pairs too. A transfer is open from the frame that tells of it until both
// ends know of its end.
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

  // The next number of ours.
  TransferId number(const Peer& peer);

  bool has_room(SessionKey session, bool ours, std::uint64_t num_pairs) const;
  // May so many bytes more go with an OFFER? What does is unread at worst, by a peer that is slow.
  bool has_eager_room(SessionKey session, std::uint32_t nbytes) const;
  // May a peer begin it? Its tables are charged to the peer, and the notification that it may become.
  Status admit(const Peer& peer, TransferEnd& transfer) const;
  void opened(TransferEnd& transfer);
  void closed(TransferEnd& transfer);  // only once, where it was open

  // ---- ours, in the order in which they were posted
  struct Waiting {
    TransferKey key;
    bool is_source;
    std::uint64_t num_pairs;
  };
  bool has_backlog(SessionKey session) const { return backlogged_.contains(session); }
  void wait(const TransferEnd& transfer);
  std::optional<Waiting> next(SessionKey session) const;  // while there is room for it
  void told(SessionKey session);  // that one
  void forget(const TransferEnd& transfer);  // it ended before it was told
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
    // By number, which is the order of posting: one that is cancelled is found among any number of others.
    std::map<TransferId, Waiting> backlog;
    TransferId next_number = 0;
  };

  const EngineConfig& config_;
  std::map<SessionKey, OfSession> sessions_;
  std::set<SessionKey> backlogged_;  // those with a backlog, so that a round costs nothing for the others
};

}  // namespace kvxfer
