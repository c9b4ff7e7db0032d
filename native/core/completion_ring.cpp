#include "core/completion_ring.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

namespace kvxfer {
namespace {

// Events after which a waiter looks at something else.
bool only_wakes(EventKind kind) noexcept {
  switch (kind) {
    case EventKind::kEnded:
    case EventKind::kLayer:
    case EventKind::kCommands:
    case EventKind::kRoom:
    case EventKind::kLeaseAcknowledged: return true;
    default: return false;
  }
}

constexpr MailKind kMailKinds[] = {MailKind::kNotification, MailKind::kMessage};

const char* plural_of(MailKind kind) noexcept {
  return kind == MailKind::kMessage ? "messages" : "notifications";
}

}  // namespace

CompletionRing::CompletionRing() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void CompletionRing::signal() noexcept {
  const std::uint64_t one = 1;
  signalled_ = ::write(fd_.get(), &one, sizeof one) == sizeof one || signalled_;
}

void CompletionRing::push(Event&& event) {
  const std::lock_guard lock(mutex_);
  if (num_waiters_ == 0 && only_wakes(event.kind)) {
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

// A peer that connects again and again must not leave more each time. News of its regions end with its
// session.
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
  for (const MailKind kind : kMailKinds) {
    Box& each = box(kind);
    const std::size_t num_dropped = each.mail.session_ended(peer);
    if (num_dropped == 0) continue;
    each.any.store(!each.mail.empty(), std::memory_order_release);
    if (std::exchange(each.num_dropped, each.num_dropped + num_dropped) != 0) continue;
    push_locked(
        {.kind = EventKind::kLog,
         .message = std::string("too many ") + plural_of(kind) +
                    " of lost peers are unread, and the oldest are dropped from now on: iterate agent." +
                    plural_of(kind) + "()"});
  }
}

void CompletionRing::deliver(MailKind kind, Mail mail) {
  const std::lock_guard lock(mutex_);
  Box& into = box(kind);
  into.mail.add(std::move(mail));
  into.any.store(true, std::memory_order_release);
  news_.store(true, std::memory_order_release);
  if (num_waiters_ + into.num_waiters == 0 || into.told) return;
  into.told = true;
  push_locked({.kind = event_of(kind)});
}

void CompletionRing::add_waiters(int change) {
  const std::lock_guard lock(mutex_);
  num_waiters_ += change;
}

void CompletionRing::add_mail_waiters(MailKind kind, int change) {
  const std::lock_guard lock(mutex_);
  box(kind).num_waiters += change;
}

void CompletionRing::push_locked(Event&& event) {
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
    for (const MailKind kind : kMailKinds)
      if (events_.front().kind == event_of(kind)) box(kind).told = false;
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

std::optional<Mail> CompletionRing::take(MailKind kind, bool keeps_charge) {
  Box& from = box(kind);
  if (!from.any.load(std::memory_order_acquire)) return std::nullopt;
  const std::lock_guard lock(mutex_);
  std::optional<Mail> taken = from.mail.take(keeps_charge);  // none where another thread took it meanwhile
  from.any.store(!from.mail.empty(), std::memory_order_release);
  return taken;
}

std::uint64_t CompletionRing::num_events_dropped() const {
  const std::lock_guard lock(mutex_);
  return num_events_dropped_;
}

std::uint64_t CompletionRing::num_dropped(MailKind kind) const {
  const std::lock_guard lock(mutex_);
  return boxes_[static_cast<std::size_t>(kind)].num_dropped;
}

void CompletionRing::wake() noexcept {
  const std::lock_guard lock(mutex_);
  signal();
}

}  // namespace kvxfer
