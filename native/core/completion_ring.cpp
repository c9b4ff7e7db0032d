#include "core/completion_ring.h"

#include <sys/eventfd.h>
#include <unistd.h>

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
    ++num_logs_dropped_;
    return;
  }
  push_locked(std::move(event));
}

void CompletionRing::notify(Notification notification) {
  const std::lock_guard lock(mutex_);
  if (notifications_.size() >= kMaxNotifications) {
    notifications_.pop_front();
    if (num_notifications_dropped_++ == 0)
      push_locked({.kind = EventKind::kLog,
                   .message = std::to_string(kMaxNotifications) +
                              " notifications were not read, the oldest are dropped from now on: iterate "
                              "agent.notifications(), or use agent.expect()"});
  }
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
  notifications_.pop_front();
  any_notifications_.store(!notifications_.empty(), std::memory_order_release);
  return taken;
}

std::uint64_t CompletionRing::num_logs_dropped() const {
  const std::lock_guard lock(mutex_);
  return num_logs_dropped_;
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
