#include "core/completion_ring.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

namespace kvxfer {

CompletionRing::CompletionRing() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void CompletionRing::signal() noexcept {
  const std::uint64_t one = 1;
  signalled_ = ::write(fd_.get(), &one, sizeof one) == sizeof one || signalled_;
}

void CompletionRing::push(Event event) {
  const std::lock_guard lock(mutex_);
  if (num_waiters_ == 0 && (event.kind == EventKind::kEnded || event.kind == EventKind::kLayer ||
                            event.kind == EventKind::kCommands)) {
    news_.store(true, std::memory_order_release);
    return;
  }
  if (event.kind == EventKind::kLog && events_.size() >= kMaxLogs) {
    ++num_events_dropped_;
    return;
  }
  if (event.kind == EventKind::kPeerLost) session_ended(event.peer);
  push_locked(std::move(event));
}

// A peer that connects again and again must not leave more each time. What is told of its regions is over with it.
void CompletionRing::session_ended(SessionKey peer) {
  const auto is_lost = [](const Event& event) { return event.kind == EventKind::kPeerLost; };
  std::erase_if(events_, [&](const Event& event) {
    return event.peer == peer && (event.kind == EventKind::kRegion || event.kind == EventKind::kRegionGone);
  });
  if (std::count_if(events_.begin(), events_.end(), is_lost) >= static_cast<std::ptrdiff_t>(kMaxLeft)) {
    const SessionKey oldest = std::find_if(events_.begin(), events_.end(), is_lost)->peer;
    num_events_dropped_ += std::erase_if(events_, [&](const Event& event) {
      return event.peer == oldest && (is_lost(event) || event.kind == EventKind::kPeerUp);
    });
  }
  std::size_t num_left = 0;
  for (Notification& each : notifications_) {
    each.was_lost = each.was_lost || each.peer == peer;
    num_left += each.was_lost ? 1 : 0;
  }
  if (num_left <= kMaxLeft) return;
  const std::size_t num_dropped = std::erase_if(notifications_, [&](const Notification& each) {
    return each.was_lost && num_left > kMaxLeft && num_left-- != 0;
  });
  if (std::exchange(num_notifications_dropped_, num_notifications_dropped_ + num_dropped) == 0)
    push_locked(
        {.kind = EventKind::kLog,
         .message = "more than " + std::to_string(kMaxLeft) +
                    " notifications of peers that are gone were not read, the oldest are dropped from now "
                    "on: iterate agent.notifications(), or use agent.expect()"});
}

void CompletionRing::notify(Notification notification) {
  const std::lock_guard lock(mutex_);
  notifications_.push_back(std::move(notification));
  any_notifications_.store(true, std::memory_order_release);
  news_.store(true, std::memory_order_release);
  if (num_waiters_ == 0 || told_) return;
  told_ = true;
  push_locked({.kind = EventKind::kNotification});
}

void CompletionRing::add_waiters(int change) {
  const std::lock_guard lock(mutex_);
  num_waiters_ += change;
}

void CompletionRing::push_locked(Event event) {
  events_.push_back(std::move(event));
  any_events_.store(true, std::memory_order_release);
  news_.store(true, std::memory_order_release);
  if (!armed_) return;
  armed_ = false;
  signal();
}

std::vector<Event> CompletionRing::drain(std::size_t max_events, bool arm) {
  const std::lock_guard lock(mutex_);
  std::vector<Event> out;
  while (!events_.empty() && out.size() < max_events) {
    told_ = told_ && events_.front().kind != EventKind::kNotification;
    out.push_back(std::move(events_.front()));
    out.back().charge.release();
    events_.pop_front();
  }
  any_events_.store(!events_.empty(), std::memory_order_release);
  if (signalled_ && events_.empty()) {
    std::uint64_t count;
    signalled_ = ::read(fd_.get(), &count, sizeof count) != sizeof count;
  }
  if (out.empty() && arm) armed_ = true;
  return out;
}

std::optional<Notification> CompletionRing::take_notification() {
  if (!any_notifications_.load(std::memory_order_acquire)) return std::nullopt;
  const std::lock_guard lock(mutex_);
  if (notifications_.empty()) return std::nullopt;  // another thread took it meanwhile
  std::optional<Notification> taken(std::move(notifications_.front()));
  taken->charge.release();
  notifications_.pop_front();
  any_notifications_.store(!notifications_.empty(), std::memory_order_release);
  return taken;
}

std::uint64_t CompletionRing::num_events_dropped() const {
  const std::lock_guard lock(mutex_);
  return num_events_dropped_;
}

std::uint64_t CompletionRing::num_notifications_dropped() const {
  const std::lock_guard lock(mutex_);
  return num_notifications_dropped_;
}

void CompletionRing::wake() noexcept {
  const std::lock_guard lock(mutex_);
  signal();
}

}  // namespace kvxfer
