// Events on their way to a caller, and the descriptor that says so to an event loop.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <mutex>
#include <vector>

#include "core/event.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// What ends a wait is always kept: there are as many as handles, peers and leases. What a peer can
// repeat at will (notifications, refused connections) is dropped beyond kMaxRepeated, and counted.
class CompletionRing {
 public:
  static constexpr std::size_t kMaxRepeated = 1 << 17;

  CompletionRing();

  int fd() const noexcept { return fd_.get(); }
  void push(Event event);
  // Oldest first. Returning none with `arm` arms the descriptor: the next push makes it readable.
  // Who polls does without, and spares itself and the pusher a system call each.
  std::vector<Event> drain(std::size_t max_events, bool arm);
  bool empty() const noexcept { return !any_.load(std::memory_order_acquire); }
  std::uint64_t num_dropped() const;
  // Makes the descriptor readable whatever is in the ring, for a consumer that is to go.
  void wake() noexcept;

 private:
  void signal() noexcept;
  mutable std::mutex mutex_;
  std::deque<Event> events_;
  std::atomic<bool> any_{false};  // events: who polls asks without the lock
  std::uint64_t num_dropped_ = 0;
  bool armed_ = true;      // the next push signals
  bool signalled_ = false;  // the descriptor is readable
  UniqueFd fd_;
};

}  // namespace kvxfer
