// The sockets that an agent listens on: TCP, and the unix name beside it. They rest while the process has no
// descriptor left for callers.
#pragma once

#include <string>

#include "core/control/session.h"
#include "core/system/epoll_reactor.h"
#include "kvxfer/transport.h"

namespace kvxfer {

class Listeners {
 public:
  class Host {
   public:
    virtual ~Host() = default;
    virtual void take_in(UniqueFd socket) = 0;
    virtual bool close_oldest_stranger() = 0;  // false if there is none
    virtual void log(std::string text) = 0;
  };

  Listeners(EpollReactor& reactor, Host& host) : reactor_(reactor), host_(host) {}
  ~Listeners() { close(); }
  Listeners(const Listeners&) = delete;
  Listeners& operator=(const Listeners&) = delete;

  Status open(const std::string& where, bool has_secret);
  void close() noexcept;
  const std::string& address() const noexcept { return address_; }
  const std::string& unix_name() const noexcept { return unix_name_; }

  Time next_due() const noexcept { return due_at_; }
  void wake(Time now);  // the listeners whose rest is over
  void descriptors_came() {  // some descriptors were given back: pauses end
    if (due_at_ != kNever) wake(kNever - 1);
  }

 private:
  struct Listener final : Reactor::Handler {
    Listeners* all = nullptr;
    UniqueFd fd;
    Time pause_ns = 0, paused_until = kNever;
    void on_ready(std::uint32_t) override { all->accept(*this); }
  };
  Status add(Listener& listener, UniqueFd fd);
  void accept(Listener& listener);
  void pause(Listener& listener, int error);

  EpollReactor& reactor_;
  Host& host_;
  Listener tcp_, unix_;
  std::string address_, unix_name_;
  UniqueFd reserve_;  // a descriptor for turning callers away when none is left
  Time due_at_ = kNever;
  bool is_short_ = false;  // of descriptors, since a caller was last accepted
};

}  // namespace kvxfer
