#include "core/system/epoll_reactor.h"

#include <poll.h>
#include <sys/epoll.h>

#include <cerrno>
#include <ctime>

#include "core/system/fork_guard.h"

namespace kvxfer {

EpollReactor::EpollReactor() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) { guard_fd(epoll_.get()); }

EpollReactor::~EpollReactor() { unguard_fd(epoll_.get()); }

Status EpollReactor::add(int fd, std::uint32_t events, Handler& handler) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    return Status::from_errno("epoll_ctl(ADD)", errno);
  entries_[fd] = {&handler, ++generation_};
  return {};
}

void EpollReactor::modify(int fd, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void EpollReactor::remove(int fd) noexcept {
  if (entries_.erase(fd) != 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

bool EpollReactor::run() {
  epoll_event events[64];
  const int count = ::epoll_wait(epoll_.get(), events, 64, 0);
  const std::uint64_t round = generation_;
  for (int i = 0; i < count; ++i) {
    const auto found = entries_.find(events[i].data.fd);
    if (found == entries_.end() || found->second.generation > round) continue;
    found->second.handler->on_ready(events[i].events);
  }
  return count > 0;
}

bool EpollReactor::wait(std::int64_t timeout_ns, int also) const noexcept {
  // An epoll descriptor is readable while one of its own is; ppoll counts in nanoseconds.
  pollfd set[] = {{epoll_.get(), POLLIN, 0}, {also, POLLIN, 0}};  // a negative one is passed over
  const timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  return ::ppoll(set, 2, &timeout, nullptr) != 0;
}

}  // namespace kvxfer
