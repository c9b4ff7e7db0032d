// The core's Reactor: one epoll instance.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "kvxfer/transport.h"

namespace kvxfer {

class EpollReactor final : public Reactor {
 public:
  EpollReactor();
  ~EpollReactor() override;

  Status add(int fd, std::uint32_t events, Handler& handler) override;
  void modify(int fd, std::uint32_t events) override;
  void remove(int fd) noexcept override;

  int fd() const noexcept { return epoll_.get(); }  // readable while one of its descriptors is
  // False: the process had no descriptor left for it.
  bool usable() const noexcept { return static_cast<bool>(epoll_); }

  // Calls the handlers that are ready, without waiting; false if none was.
  bool run();
  // Waits at most this long until one of its descriptors, or `also`, is ready. Calls no handlers. May run
  // beside the gate's holder. False if the time ran out.
  bool wait(std::int64_t timeout_ns, int also = -1) const noexcept;

 private:
  struct Entry {
    Handler* handler;
    std::uint64_t generation;  // tells a descriptor number that was closed and reused in one round
  };
  UniqueFd epoll_;
  std::unordered_map<int, Entry> entries_;
  std::uint64_t generation_ = 0;
};

}  // namespace kvxfer
