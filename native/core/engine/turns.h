// Whose turn it is to post a piece: sessions one after the other, and of a session's destinations with pieces to
// post the one of the lowest priority number that was listed first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <vector>

#include "core/event.h"
#include "kvxfer/transport.h"

namespace kvxfer {

class Turns {
 public:
  void list(SessionKey session, std::uint8_t priority, TransferId transfer) {
    ready_[session][priority].push_back(transfer);
  }
  std::optional<TransferId> first(SessionKey session) const {
    auto found = ready_.find(session);
    return found == ready_.end() ? std::nullopt : std::optional(found->second.begin()->second.front());
  }
  void drop_first(SessionKey session) {
    auto found = ready_.find(session);
    auto level = found->second.begin();
    level->second.pop_front();
    if (!level->second.empty()) return;
    found->second.erase(level);
    if (found->second.empty()) ready_.erase(found);
  }
  void remove_session(SessionKey session) { ready_.erase(session); }

  // Has each session in turn post one piece, until none of them does. bool post_one(SessionKey): it did.
  template <class PostOne>
  void serve(PostOne post_one) {
    for (bool progressed = !ready_.empty(); progressed;) {
      progressed = false;
      order_.clear();
      for (const auto& [session, levels] : ready_) order_.push_back(session);
      std::rotate(order_.begin(), std::upper_bound(order_.begin(), order_.end(), last_served_), order_.end());
      for (const SessionKey session : order_)
        if (post_one(session)) {
          progressed = true;
          last_served_ = session;
        }
    }
  }

 private:
  // No level and no session is empty, so the cost of a round does not grow with peers that are idle.
  std::map<SessionKey, std::map<std::uint8_t, std::list<TransferId>>> ready_;
  std::vector<SessionKey> order_;  // kept, as making it costs
  SessionKey last_served_ = 0;
};

}  // namespace kvxfer
