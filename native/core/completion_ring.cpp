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
  const bool repeated = event.kind == EventKind::kNotification || event.kind == EventKind::kLog;
  if (repeated && events_.size() >= kMaxRepeated) {
    ++num_dropped_;
    return;
  }
  events_.push_back(std::move(event));
  any_.store(true, std::memory_order_release);
  if (!armed_) return;
  armed_ = false;
  signal();
}

std::vector<Event> CompletionRing::drain(std::size_t max_events, bool arm) {
  const std::lock_guard lock(mutex_);
  std::vector<Event> out;
  while (!events_.empty() && out.size() < max_events) {
    out.push_back(std::move(events_.front()));
    events_.pop_front();
  }
  any_.store(!events_.empty(), std::memory_order_release);
  if (signalled_ && events_.empty()) {
    std::uint64_t count;
    signalled_ = ::read(fd_.get(), &count, sizeof count) != sizeof count;
  }
  if (out.empty() && arm) armed_ = true;
  return out;
}

std::uint64_t CompletionRing::num_dropped() const {
  const std::lock_guard lock(mutex_);
  return num_dropped_;
}

void CompletionRing::wake() noexcept {
  const std::lock_guard lock(mutex_);
  signal();
}

}  // namespace kvxfer
