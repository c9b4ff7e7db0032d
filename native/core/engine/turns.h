// Decides whose turn it is to post a piece. Sessions take turns. Within a session the destination with the
// lowest priority number goes first; among equals, the one that was listed first.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <map>
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
    Apart* const apart = find_apart(session);
    spare_.insert(apart == nullptr ? ready_ : apart->ready, Turn{session, priority, num_listed_++, transfer});
    if (apart != nullptr) note_due(session, *apart);
  }
  // The first destination of the session with this priority number or a higher one.
  std::optional<TransferId> first(SessionKey session, std::uint8_t from = 0) {
    const std::set<Turn>& ready = of(session);
    const auto found = first_of(ready, session, from);
    return found == ready.end() || found->session != session ? std::nullopt : std::optional(found->transfer);
  }
  void drop_first(SessionKey session, std::uint8_t from = 0) {
    std::set<Turn>& ready = of(session);
    spare_.erase(ready, first_of(ready, session, from));
    if (Apart* const apart = find_apart(session)) note_due(session, *apart);
  }
  bool empty() const noexcept { return ready_.empty() && due_.empty(); }  // apart from held sessions
  void remove_session(SessionKey session) {
    ready_.erase(first_of(ready_, session), first_of(ready_, session + 1));
    apart_.erase(session);
    due_.erase(session);
  }

  // ---- a session that may have to wait: its list stands apart, so that holding it costs the same however
  // long it is
  void set_apart(SessionKey session, bool is_apart) {
    Apart* const before = find_apart(session);
    if (is_apart == (before != nullptr)) return;
    if (is_apart) {
      Apart& apart = apart_[session];
      move_turns(ready_, apart.ready, session);
      note_due(session, apart);
    } else {
      move_turns(before->ready, ready_, session);
      apart_.erase(session);
      due_.erase(session);
    }
  }
  // A session that stands apart has no turn, and costs a round nothing, until it is released.
  void hold(SessionKey session) { set_held(session, true); }
  void release(SessionKey session) { set_held(session, false); }

  // Lets each session in turn post one piece, until none can. bool post_one(SessionKey): true if it
  // posted.
  template <class PostOne>
  void serve(PostOne post_one) {
    for (bool progressed = !empty(); progressed;) {
      progressed = false;
      order_.clear();
      for (auto turn = ready_.begin(); turn != ready_.end(); turn = first_of(ready_, turn->session + 1))
        order_.push_back(turn->session);
      if (!due_.empty()) {
        order_.insert(order_.end(), due_.begin(), due_.end());
        std::sort(order_.begin(), order_.end());
      }
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
    std::uint64_t order;  // the order in which they were listed
    TransferId transfer;
    auto operator<=>(const Turn&) const = default;
  };
  struct Apart {
    std::set<Turn> ready;
    bool is_held = false;
  };
  static std::set<Turn>::const_iterator first_of(const std::set<Turn>& ready, SessionKey session,
                                                 std::uint8_t from = 0) {
    return ready.lower_bound(Turn{session, from, 0, 0});
  }
  static void move_turns(std::set<Turn>& from, std::set<Turn>& to, SessionKey session) {
    for (auto turn = first_of(from, session); turn != from.end() && turn->session == session;)
      to.insert(from.extract(turn++));
  }
  Apart* find_apart(SessionKey session) {
    if (apart_.empty()) [[likely]]
      return nullptr;
    const auto found = apart_.find(session);
    return found == apart_.end() ? nullptr : &found->second;
  }
  std::set<Turn>& of(SessionKey session) {
    Apart* const apart = find_apart(session);
    return apart == nullptr ? ready_ : apart->ready;
  }
  void set_held(SessionKey session, bool is_held) {
    Apart* const apart = find_apart(session);
    if (apart == nullptr) return;
    apart->is_held = is_held;
    note_due(session, *apart);
  }
  void note_due(SessionKey session, const Apart& apart) {
    if (apart.is_held || apart.ready.empty())
      due_.erase(session);
    else
      due_.insert(session);
  }

  std::set<Turn> ready_;  // so the cost of a round does not grow with the number of idle peers
  std::map<SessionKey, Apart> apart_;
  std::set<SessionKey> due_;  // of the sessions apart: those with something listed, and not held
  SpareNodes<std::set<Turn>> spare_;
  std::vector<SessionKey> order_;  // kept, as making it costs
  SessionKey last_served_ = 0;
  std::uint64_t num_listed_ = 0;
};

}  // namespace kvxfer
