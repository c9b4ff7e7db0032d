// Which thread drives an agent (its own, a caller that waits or polls, an event loop), and who is woken when.
//
//   who             state      what it does, and what ends that
//   agent's thread  awake      rounds under the gate, until nothing is to be done
//                   asleep     on the sockets until `thread_until_`: input, its bell, a kick
//                   parked     while a caller drives or lingers: notify(), the end of the linger
//   caller          driving    rounds in wait(), one caller at a time: `driven_`
//                   asleep     likewise until `driver_until_`, with its own bell
//                   following  in wait(), while another drives: notify(), a short pause
//                   lingering  away until `caller_until_`; as likely as not it comes back by then
//   event loop      lingering  likewise, and longer: `loop_lingers_`
//
// Whoever leaves work under the gate kicks, and then it holds that
//
//   a caller drives, awake       that caller does the work: it looks once more before it sleeps or leaves
//   a caller drives, asleep      it is woken, unless peers announce what comes and no deadline is nearer
//   the thread is awake          it does the work
//   the thread is asleep         as for the caller
//   the thread is parked         after a caller: it is back after the linger, which is short
//                                after a loop: the linger ends now
//
// The text is a template, so that a test runs this very code with words, locks and a clock of its own, and
// tries every order of its steps (tests/native/test_drivers.cpp).
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "core/control/session.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// What drivers share, in a program.
struct SystemThreads {
  template <class T>
  using Atomic = std::atomic<T>;
  using Mutex = std::mutex;
  using Condition = std::condition_variable;

  // Wakes the one thread that sleeps on the sockets with this bell, and no other. Certain, unlike a word to the
  // sockets, which another thread may consume first.
  struct Bell {
    UniqueFd fd;
    std::atomic<bool> rung{false};
    void ring() {
      const std::uint64_t one = 1;
      (void)!::write(fd.get(), &one, sizeof one);
      rung = true;  // afterwards: a thread that reads this finds the descriptor readable
    }
    void answer() {
      if (std::uint64_t count; rung.exchange(false)) (void)!::read(fd.get(), &count, sizeof count);
    }
  };
};

// `Host` is the Runtime: its gate, its rounds, its clock.
template <class Host, class Os = SystemThreads>
class Drivers {
 public:
  using Bell = typename Os::Bell;

  explicit Drivers(Host& host) : host_(host) {}

  std::array<Bell*, 2> bells() noexcept { return {&thread_bell_, &driver_bell_}; }

  // The agent's thread, until stop().
  void run() {
    Time moved_at = host_.now();
    while (!stop_) {
      // A waiting caller drives: two threads on the same sockets would only wake each other.
      if (driven_ || caller_until_ > host_.now() || host_.gave_up()) {
        park();
        continue;
      }
      bool more;
      Time deadline;
      {
        const std::lock_guard lock(host_.gate());
        more = host_.progress();
        deadline = host_.next_deadline();
        thread_until_ = more || host_.now() - moved_at < host_.spin_ns() ? 0 : deadline;
        if (thread_until_ != 0 && !host_.arm()) {
          thread_until_ = 0;
          more = true;
        }
        // A caller that began meanwhile, and sleeps already, has to do what this round leaves.
        if (driven_) kick();
      }
      host_.gate().yield();
      const Time at = host_.now();
      if (more) {
        moved_at = at;
      } else if (thread_until_ != 0) {
        host_.sleep(deadline, thread_bell_);
        thread_until_ = 0;
        thread_bell_.answer();
        moved_at = host_.now();
      }
    }
  }

  // run() returns soon. From any thread, without the gate.
  void stop() {
    stop_ = true;
    thread_bell_.ring();
    notify();
  }

  bool poll() {
    bool more = false;
    {
      const std::lock_guard lock(host_.gate());
      // In one call, short work goes from the frame that asks to the frame that answers.
      const Time start = host_.now(), until = start + kPollNs;
      const bool look = host_.polls_sockets(start);
      do more = host_.progress(look) || more;
      while (host_.left() && host_.now() < until);
      // While the thread sleeps, peers would announce over the socket what a polling caller sees at once:
      // wake the thread, so that it waits as it does after every caller.
      if (host_.shares_any_memory() && thread_until_ != 0 && start < caller_until_) wake_thread();
      kick();
    }
    // A loop's linger stays one, which ends as soon as the loop leaves or something has to be done.
    if (!loop_lingers_) caller_until_ = host_.now() + kCallerLinger;
    return more;
  }

  bool serve() {
    bool left = true;
    // A sleeping driver waits for more than this call knows of.
    if (!driven_ && host_.gate().try_lock()) {
      const std::lock_guard lock(host_.gate(), std::adopt_lock);
      const Time start = host_.now();
      int rounds = 0;
      do {
        host_.progress();
        // From now on peers announce their writes over the socket: the loop is about to sleep.
        left = host_.left() || host_.has_work() || !host_.arm();
      } while (left && (++rounds < kServeRounds || host_.now() - start < kPollNs));
      left = left || host_.unannounced();  // such words have to be looked at
      if (left && host_.moves_bytes()) thread_serves_until_ = host_.now() + kLongWork;
      if (left) {
        if (thread_until_ != 0) wake_thread();
      } else {
        kick();
        // A loop that waits on comes back soon, so the thread keeps out of its way, as after every
        // caller. Under the gate: the next thread that posts sees that it may have to end this.
        caller_until_ = host_.now() + kLoopLinger;
        loop_lingers_ = true;
      }
    }
    if (left) end_linger();
    return !left;
  }

  // False while others are to do what a loop would.
  bool serves() const noexcept { return !driven_ && host_.now() >= thread_serves_until_; }

  void leave() {
    if (loop_lingers_) end_linger();
  }

  // `closes`: the caller closes the agent, or waits for what its close ends. Waits of others are over then.
  template <class Done>
  bool wait(const Done& done, Time deadline, bool closes = false) {
    while (!done()) {
      if (!(closes || host_.is_alive()) || host_.now() >= deadline) return done();
      if (driven_.exchange(true)) {
        follow();
        continue;
      }
      drive(done, deadline, closes);
      driver_until_ = 0;
      loop_lingers_ = false;
      caller_until_ = host_.unannounced() ? 0 : host_.now() + kCallerLinger;
      driven_ = false;
      {
        // The work that this caller leaves is the thread's, which may be asleep.
        const std::lock_guard lock(host_.gate());
        kick();
      }
      if (num_followers_ > 0 || parked_) notify();
    }
    return true;
  }

  // Under the gate, after anything that may have left work.
  void kick() {
    // The thread keeps away for a loop, which may not be back before something else ends.
    if (loop_lingers_ && host_.has_work()) end_linger();
    const Time until = driven_ ? driver_until_ : thread_until_;
    if (until == 0) return;
    // Before it sleeps, the thread asks peers to announce writes to rings that were read meanwhile.
    if (!host_.has_work() && host_.next_deadline() >= until && host_.arm()) return;
    host_.wake_reactor();
  }

  // Under the gate, when something has ended: it may be what another caller waits for.
  void tell_ended() {
    if (num_followers_ > 0) notify();
    if (driver_until_ != 0) wake_driver();
  }

  // Wakes the thread that drives or is to drive. From any thread, without the gate.
  void wake() {
    if (driven_) wake_driver();
    wake_thread();
    end_linger();
  }

  // Followers, and the agent's thread if it is parked.
  void notify() {
    // Under the mutex: otherwise a thread between its check and its sleep would miss the call.
    { const std::lock_guard lock(wait_mutex_); }
    wait_changed_.notify_all();
  }

 private:
  // While a caller drives progress, the agent's thread keeps out of its way, and for this long after: the
  // caller's next wait is usually near, and waking the thread in between costs both of them.
  static constexpr Time kCallerLinger = 200'000;

  // After an event loop that did the short work, the thread keeps away for longer: if the next input woke both
  // the thread and the loop, that would cost both. Input that comes while the loop computes waits so long.
  static constexpr Time kLoopLinger = 1'000'000;

  // The thread is not needed while a caller drives; a caller that leaves wakes it. Only a bound, should that
  // fail.
  static constexpr std::chrono::nanoseconds kParked = std::chrono::milliseconds(500);

  // A caller's poll goes on for so long while there is work at hand, and one slice more.
  static constexpr Time kPollNs = 10'000;

  // An event loop's poll takes so many rounds in any case: short work is done by then, even if the processor
  // was taken away in between.
  static constexpr int kServeRounds = 4;

  // If more work than that was at hand, an event loop leaves the sockets to the thread for so long: long work
  // comes in many parts, and the loop would hand each one on.
  static constexpr Time kLongWork = 100'000'000;

  // A waiting caller wakes at least this often, whatever the deadlines.
  static constexpr Time kDriverNap = 1'000'000'000;

  // A follower looks again at least this often, whichever thread drives.
  static constexpr std::chrono::nanoseconds kFollowerPause = std::chrono::milliseconds(5);

  // Of the agent's thread. Either this sees that the caller has left, or the caller sees parked_ and notifies.
  void park() {
    std::unique_lock lock(wait_mutex_);
    parked_ = true;
    const Time lingers = caller_until_ - host_.now();
    if (stop_) {
      // stop() may have come before the lock.
    } else if (driven_ || host_.gave_up()) {
      wait_changed_.wait_for(lock, kParked);
    } else if (lingers > 0) {
      wait_changed_.wait_for(lock, std::chrono::nanoseconds(lingers));
    }
    parked_ = false;
  }

  // Another caller drives; it notifies when something has ended. done() may want the gate, and the gate's
  // holder may want this mutex: so done() is called outside, and an end that is missed in between costs one
  // pause.
  void follow() {
    ++num_followers_;
    {
      std::unique_lock lock(wait_mutex_);
      wait_changed_.wait_for(lock, kFollowerPause);
    }
    --num_followers_;
  }

  template <class Done>
  void drive(const Done& done, Time deadline, bool closes) {
    Time moved_at = host_.now();
    while (!done() && (closes || !host_.closed())) {
      bool more;
      {
        const std::lock_guard lock(host_.gate());
        more = host_.progress();
        const bool sleeps = !more && host_.now() - moved_at >= host_.spin_ns();
        driver_until_ = sleeps && host_.arm() ? std::min(host_.next_deadline(), deadline) : 0;
      }
      host_.gate().yield();
      const Time at = host_.now();
      if (more) moved_at = at;
      if (done() || at >= deadline) return;
      if (driver_until_ != 0) {
        host_.sleep(std::min<Time>(driver_until_, at + kDriverNap), driver_bell_);
        driver_until_ = 0;
        driver_bell_.answer();
        moved_at = host_.now();
      }
    }
  }

  // The bell last: a sleep that begins in between ends at once. The other way round, this would call a thread
  // awake that has woken up and gone to sleep again, and nobody would wake it.
  void wake_thread() {
    thread_until_ = 0;
    thread_bell_.ring();
  }

  void wake_driver() {
    driver_until_ = 0;
    driver_bell_.ring();
  }

  // The agent's thread looks for work.
  void end_linger() {
    loop_lingers_ = false;
    caller_until_ = 0;
    if (parked_) notify();
  }

  Host& host_;
  Bell thread_bell_, driver_bell_;
  typename Os::template Atomic<bool> stop_{false};
  // Until when the agent's thread, and a driving caller, sleep on the sockets. 0: awake.
  typename Os::template Atomic<Time> thread_until_{0}, driver_until_{0};
  typename Os::template Atomic<Time> caller_until_{0};  // the caller that drove last may be back by then
  typename Os::template Atomic<bool> loop_lingers_{false};  // and that caller is an event loop
  typename Os::template Atomic<bool> driven_{false};  // a caller is driving now
  typename Os::template Atomic<bool> parked_{false};  // the agent's thread waits for that to end
  typename Os::template Atomic<int> num_followers_{0};
  typename Os::template Atomic<Time> thread_serves_until_{0};
  typename Os::Mutex wait_mutex_;
  typename Os::Condition wait_changed_;
};

}  // namespace kvxfer
