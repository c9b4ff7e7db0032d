// Events and notifications on their way to a caller, and the descriptor that says so to an event loop.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "core/event.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// A peer's payload, kept until somebody reads it.
struct Notification {
  SessionKey peer = 0;
  wire::Bytes payload;
  Charge charge = {};  // of the peer's budget
  bool was_lost = false;  // its peer
  wire::Bytes context = {};  // whose request it is of
};

// Events are kept until a caller takes them, and what a peer can repeat at will is bounded. Its regions and
// notifications are charged to its budget, before they come here. What becomes of a transfer can be read off its
// handle, so it is kept only while somebody waits to be woken by it. What no open session answers for is counted
// where it is dropped: logs of refused connections, while kMaxLogs events wait; of what sessions leave that have
// ended, the oldest notifications and ends beyond kMaxLeft.
class CompletionRing {
 public:
  static constexpr std::size_t kMaxLogs = 1 << 14;
  static constexpr std::size_t kMaxLeft = 1
                                          << 14;  // as many as one open session may have wait (peer_budget.h)

  CompletionRing();

  int fd() const noexcept { return fd_.get(); }
  void push(Event event);
  void notify(Notification notification);
  // `change` more wait for events of transfers (kEnded, kLayer, kCommands) or of notifications (one kNotification,
  // without payload, for as many as came). Whoever is to wait says so, and then looks once more at what
  // it waits for: what came before its word is not told.
  void add_waiters(int change);
  // Oldest first. Returning none with `arm` arms the descriptor: the next push makes it readable.
  // Who polls does without, and spares itself and the pusher a system call each.
  std::vector<Event> drain(std::size_t max_events, bool arm);
  bool has_events() const noexcept { return any_events_.load(std::memory_order_acquire); }
  // The oldest that nobody has read.
  std::optional<Notification> take_notification();
  // Whether anything came since the last call.
  bool take_news() noexcept {
    return news_.load(std::memory_order_relaxed) && news_.exchange(false, std::memory_order_acquire);
  }
  std::uint64_t num_events_dropped() const;
  std::uint64_t num_notifications_dropped() const;
  // Makes the descriptor readable whatever is in the ring, for a consumer that is to go.
  void wake() noexcept;

 private:
  void push_locked(Event event);
  void session_ended(SessionKey peer);
  void signal() noexcept;
  mutable std::mutex mutex_;
  std::deque<Event> events_;
  std::deque<Notification> notifications_;
  // Who polls asks without the lock.
  std::atomic<bool> any_events_{false}, any_notifications_{false}, news_{false};
  int num_waiters_ = 0;
  bool told_ = false;  // a kNotification is among the events
  std::uint64_t num_events_dropped_ = 0, num_notifications_dropped_ = 0;
  bool armed_ = true;  // the next push signals
  bool signalled_ = false;  // the descriptor is readable
  UniqueFd fd_;
};

}  // namespace kvxfer
