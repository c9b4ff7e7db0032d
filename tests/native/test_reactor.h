// A minimal Reactor: epoll without a thread, driven by the test.
#pragma once

#include <sys/epoll.h>

#include <cerrno>
#include <chrono>
#include <unordered_map>

#include "kvxfer/transport.h"

namespace kvxfer::testing {

class TestReactor final : public Reactor {
 public:
  TestReactor() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {}

  Status add(int fd, std::uint32_t events, Handler& handler) override {
    epoll_event event = event_for(fd, events);
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
      return Status::from_errno("epoll_ctl(ADD)", errno);
    handlers_[fd] = {&handler, ++generation_};
    return {};
  }
  void modify(int fd, std::uint32_t events) override {
    epoll_event event = event_for(fd, events);
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
  }
  void remove(int fd) noexcept override {
    handlers_.erase(fd);
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  }

  // Waits for at most timeout_ms (0: not at all), and calls the handlers that are ready. Returns how many. A
  // handler that another one has removed in the same round is not called.
  int run_once(int timeout_ms = 0) {
    epoll_event events[32];
    const int count = ::epoll_wait(epoll_.get(), events, 32, timeout_ms);
    if (count <= 0) return 0;
    const std::uint64_t round_start = generation_;
    int called = 0;
    for (int i = 0; i < count; ++i) {
      const auto found = handlers_.find(events[i].data.fd);
      // A number that was closed and added again in this round is another descriptor.
      if (found == handlers_.end() || found->second.generation > round_start) continue;
      found->second.handler->on_ready(events[i].events);
      ++called;
    }
    return called;
  }

  // Runs rounds, with `step()` after each, until done() holds; false if it never did.
  template <class Step, class Done>
  bool run_until(Step&& step, Done&& done, std::chrono::milliseconds limit = std::chrono::seconds(60)) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    for (;;) {
      run_once(0);
      step();
      if (done()) return true;
      if (std::chrono::steady_clock::now() > deadline) return false;
      run_once(1);
    }
  }

  std::size_t num_handlers() const noexcept { return handlers_.size(); }

 private:
  struct Entry {
    Handler* handler;
    std::uint64_t generation;
  };
  static epoll_event event_for(int fd, std::uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    return event;
  }

  UniqueFd epoll_;
  std::unordered_map<int, Entry> handlers_;
  std::uint64_t generation_ = 0;
};

}  // namespace kvxfer::testing
