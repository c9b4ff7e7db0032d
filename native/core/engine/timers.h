// What the engine has to be woken for, in the order of time. It never looks at a clock: Engine::on_time
// passes the time, takes what is due and hands it to the part that armed it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "core/control/session.h"
#include "core/spare_nodes.h"

namespace kvxfer {

enum class TimerKind : std::uint8_t {
  kSession,  // session: heartbeats, silence, the handshake's limit
  kNewcomer,  // session: the older session of its name did not answer
  kSource,  // session, transfer: its deadline; when it drains, a line for the log
  kDestination,  // the same
  kLease,  // lease
  kExpectation,  // handle
  kRail,  // rail: pieces are due on it
  kRedial,  // session, rail index: it is dialled again
  kPath,  // session: checks some time after a rail went down
  kPace,  // session: it may post pieces again
};

class Timers {
 public:
  struct Due {
    TimerKind kind;
    std::uint64_t a, b;  // as TimerKind says
  };

 private:
  using Queue = std::multimap<Time, Due>;

 public:
  // A timer that is armed. Its owner resets it when it is due.
  using Timer = std::optional<Queue::iterator>;

  void arm(Time at, TimerKind kind, std::uint64_t a, std::uint64_t b = 0) {
    spare_.insert(queue_, at, Due{kind, a, b});
  }
  // Replaces the timer's former time; kNever arms nothing.
  void set(Timer& timer, Time at, TimerKind kind, std::uint64_t a, std::uint64_t b = 0) {
    clear(timer);
    if (at != kNever) timer = spare_.insert(queue_, at, Due{kind, a, b});
  }
  void clear(Timer& timer) noexcept {
    if (timer) spare_.erase(queue_, *timer);
    timer.reset();
  }
  static Time at(const Timer& timer) { return timer ? (*timer)->first : kNever; }

  Time next() const { return queue_.empty() ? kNever : queue_.begin()->first; }
  std::optional<Due> take_due(Time now) {
    if (next() > now) return std::nullopt;
    const Due due = queue_.begin()->second;
    spare_.erase(queue_, queue_.begin());
    return due;
  }
  std::size_t size() const noexcept { return queue_.size(); }

 private:
  Queue queue_;
  SpareNodes<Queue> spare_;
};

}  // namespace kvxfer
