#include "transports/common/alarm.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>

namespace kvxfer {

Result<std::unique_ptr<Alarm>> Alarm::create(Reactor& reactor) {
  UniqueFd timer(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!timer) return Status::from_errno("timerfd_create", errno);
  std::unique_ptr<Alarm> alarm(new Alarm(reactor, std::move(timer)));
  if (Status added = reactor.add(alarm->timer_.get(), EPOLLIN, *alarm); !added.ok()) {
    alarm->timer_.reset();
    return added;
  }
  return alarm;
}

Alarm::~Alarm() {
  if (timer_) reactor_.remove(timer_.get());
}

void Alarm::set(Clock::time_point at) noexcept {
  const auto since = std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
  itimerspec when{};
  when.it_value.tv_sec = since / 1'000'000'000;
  when.it_value.tv_nsec = since % 1'000'000'000;
  ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr);  // steady_clock is CLOCK_MONOTONIC
}

void Alarm::clear() noexcept {
  const itimerspec never{};
  ::timerfd_settime(timer_.get(), 0, &never, nullptr);
}

void Alarm::on_ready(std::uint32_t) {
  std::uint64_t times;
  if (::read(timer_.get(), &times, sizeof times) > 0) has_rung_ = true;
}

}  // namespace kvxfer
