// Events and mail on their way to a caller, and the descriptor that announces them to an event loop.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "core/event.h"
#include "core/mailbox.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// The ring keeps events until a caller takes them, and bounds those that a peer can repeat at will. Regions
// and mail of a peer are charged to its budget before they come here. An event that only wakes a waiter,
// which then looks at something else (a transfer's handle, room, a lease), is kept only while there is a
// waiter. Events that no open session is charged for are bounded where they are dropped: logs of refused
// connections, while kMaxLogs events wait; of what ended sessions leave behind, the oldest mail (Mailbox)
// and the oldest ends beyond kMaxLeft.
class CompletionRing {
 public:
  static constexpr std::size_t kMaxLogs = 1 << 14;
  static constexpr std::size_t kMaxLeft = Mailbox::kMaxLeft;

  CompletionRing();

  int fd() const noexcept { return fd_.get(); }
  void push(Event&& event);
  void deliver(MailKind kind, Mail mail);
  // `change` more waiters wait for events of transfers (kEnded, kLayer, kCommands), kRoom, kLeaseAcknowledged, or
  // mail (one kNotification or kMessage, without payload, for as many as came). A waiter first announces
  // itself here, and then looks once more at what it waits for: it gets no event for what came before its
  // announcement.
  void add_waiters(int change);
  // The same for one kind of mail alone: nothing else wakes such a waiter.
  void add_mail_waiters(MailKind kind, int change);
  // Oldest first. If it returns none and `arm` is set, the descriptor is armed: the next push makes it
  // readable. A caller that polls does not arm it, which saves the caller and the pusher a system call
  // each.
  std::vector<Event> drain(std::size_t max_events, bool arm);
  bool has_events() const noexcept { return any_events_.load(std::memory_order_acquire); }
  // The oldest unread mail. `keeps_charge`: it counts against its sender's budget until it is destroyed.
  std::optional<Mail> take(MailKind kind, bool keeps_charge = false);
  // True if anything came since the last call.
  bool take_news() noexcept {
    return news_.load(std::memory_order_relaxed) && news_.exchange(false, std::memory_order_acquire);
  }
  std::uint64_t num_events_dropped() const;
  std::uint64_t num_dropped(MailKind kind) const;
  // Makes the descriptor readable whatever the ring holds, for a consumer that is to leave.
  void wake() noexcept;

 private:
  void push_locked(Event&& event);
  void session_ended(SessionKey peer);
  void signal() noexcept;
  mutable std::mutex mutex_;
  std::deque<Event> events_;
  struct Box {
    Mailbox mail;
    std::atomic<bool> any{false};
    bool told = false;  // an event says that some came
    int num_waiters = 0;  // waiters for this kind alone
    std::uint64_t num_dropped = 0;
  };
  static constexpr EventKind event_of(MailKind kind) noexcept {
    return kind == MailKind::kMessage ? EventKind::kMessage : EventKind::kNotification;
  }
  Box& box(MailKind kind) noexcept { return boxes_[static_cast<std::size_t>(kind)]; }
  std::array<Box, kNumMailKinds> boxes_;
  // A caller that polls reads these without the lock.
  std::atomic<bool> any_events_{false}, news_{false};
  int num_waiters_ = 0;
  std::uint64_t num_events_dropped_ = 0;
  bool armed_ = true;  // the next push signals
  bool signalled_ = false;  // the descriptor is readable
  UniqueFd fd_;
};

}  // namespace kvxfer
