// Whose turn it is to post a piece: sessions one after the other, and of a session's destinations with pieces to
// post the one of the lowest priority number that was listed first.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "core/event.h"
#include "core/spare_nodes.h"
#include "kvxfer/transport.h"

namespace kvxfer {

class Turns {
 public:
  void list(SessionKey session, std::uint8_t priority, TransferId transfer) {
    spare_.insert(ready_, Turn{session, priority, num_listed_++, transfer});
  }
  // Of those of this priority number or a higher one.
  std::optional<TransferId> first(SessionKey session, std::uint8_t from = 0) const {
    const auto found = first_of(session, from);
    return found == ready_.end() || found->session != session ? std::nullopt : std::optional(found->transfer);
  }
  void drop_first(SessionKey session, std::uint8_t from = 0) {
    spare_.erase(ready_, first_of(session, from));
  }
  bool empty() const noexcept { return ready_.empty(); }
  void remove_session(SessionKey session) { ready_.erase(first_of(session), first_of(session + 1)); }

  // Has each session in turn post one piece, until none of them does. bool post_one(SessionKey): it did.
  template <class PostOne>
  void serve(PostOne post_one) {
    for (bool progressed = !ready_.empty(); progressed;) {
      progressed = false;
      order_.clear();
      for (auto turn = ready_.begin(); turn != ready_.end(); turn = first_of(turn->session + 1))
        order_.push_back(turn->session);
      std::rotate(order_.begin(), std::upper_bound(order_.begin(), order_.end(), last_served_), order_.end());
      for (const SessionKey session : order_)
        if (post_one(session)) {
          progressed = true;
          last_served_ = session;
        }
    }
  }

 private:
  struct Turn {
    SessionKey session;
    std::uint8_t priority;
    std::uint64_t order;  // in which they were listed
    TransferId transfer;
    auto operator<=>(const Turn&) const = default;
  };
  std::set<Turn>::const_iterator first_of(SessionKey session, std::uint8_t from = 0) const {
    return ready_.lower_bound(Turn{session, from, 0, 0});
  }

  std::set<Turn> ready_;  // so the cost of a round does not grow with peers that are idle
  SpareNodes<std::set<Turn>> spare_;
  std::vector<SessionKey> order_;  // kept, as making it costs
  SessionKey last_served_ = 0;
  std::uint64_t num_listed_ = 0;
};

}  // namespace kvxfer
