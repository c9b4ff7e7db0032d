// Events on their way to a caller, and the descriptor that says so to an event loop.
#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <vector>

#include "core/event.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Not bounded itself: what fills it is (open transfers, undelivered notifications of a peer).
class CompletionRing {
 public:
  CompletionRing();

  int fd() const noexcept { return fd_.get(); }
  void push(Event event);
  // Oldest first. Returning none arms the descriptor: the next push makes it readable.
  std::vector<Event> drain(std::size_t max_events);
  bool empty() const;
  // Makes the descriptor readable whatever is in the ring, for a consumer that is to go.
  void wake() noexcept;

 private:
  void signal() noexcept;
  mutable std::mutex mutex_;
  std::deque<Event> events_;
  bool armed_ = true;      // the next push signals
  bool signalled_ = false;  // the descriptor is readable
  UniqueFd fd_;
};

}  // namespace kvxfer
