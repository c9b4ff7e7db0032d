// The limits of peers, by their names: for sessions that are open, and for those that come.
//
// A rate limits what this agent takes from a peer, since the owner of the destination decides when a piece
// moves. All sessions with peers of one name share one bucket. Bytes that come unasked (pages of a small
// write in its OFFER) cannot be held back: they are counted, and the following pieces wait for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/pace.h"
#include "core/engine/sessions.h"

namespace kvxfer {

class PeerLimits {
 public:
  static constexpr std::size_t kMostNames = 4096;

  PeerLimits(Context& context, Sessions& sessions) : context_(context), sessions_(sessions) {}

  // Replaces the limit of that name. Returns its sessions; their turns are to be judged anew.
  Result<std::vector<SessionKey>> set(const std::string& name, const PeerLimit& limit);
  PeerLimit of(const std::string& name) const;
  std::vector<std::pair<std::string, PeerLimit>> all() const;
  void has_opened(const Peer& peer);  // from now on it is found by its name
  void remove_session(SessionKey session);

  std::uint8_t least_priority(const Peer& peer) const {
    return names_.empty() ? 0 : of(peer.name()).least_priority;
  }

  // ---- pieces
  bool has_paced() const noexcept { return !paced_.empty(); }  // some session; where not, ask no more
  bool is_paced(SessionKey session) const { return has_paced() && paced_.contains(session); }
  // May the session post a piece? If not, the session's timer kPace is armed.
  bool may_post(SessionKey session);
  void took(SessionKey session, std::uint64_t nbytes);
  void on_timer(SessionKey session);
  // Added to the reason why a transfer was late: the session's rate. "" if it has no limit.
  std::string in_words(SessionKey session) const;

 private:
  struct OfName {
    PeerLimit limit;
    Pace pace;
  };
  struct Paced {
    OfName* of_name;
    Timers::Timer timer;
  };

  Context& context_;
  Sessions& sessions_;
  std::map<std::string, OfName> names_;
  std::map<SessionKey, Paced> paced_;  // open sessions that have a rate
};

}  // namespace kvxfer
