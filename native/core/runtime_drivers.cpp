// Decides which thread drives: the agent's thread, callers that wait or poll, an event loop; and wakes them.
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <utility>

#include "core/runtime.h"
#include "core/system/fork_guard.h"

namespace kvxfer {
namespace {

// While a caller drives progress, the agent's thread keeps out of its way, and for this long after: the
// caller's next wait is usually near, and waking the thread in between costs both of them.
constexpr Time kCallerLinger = 200'000;

// After an event loop that did the short work, the thread keeps away for longer: if the next input woke both
// the thread and the loop, that would cost both. Input that comes while the loop computes waits so long.
constexpr Time kLoopLinger = 1'000'000;

// The thread is not needed while a caller drives; a caller that leaves wakes it. Only a bound, should that
// fail.
constexpr std::chrono::nanoseconds kParked = std::chrono::milliseconds(500);

// A caller's poll goes on for so long while there is work at hand, and one slice more.
constexpr Time kPollNs = 10'000;

// An event loop's poll takes so many rounds in any case: short work is done by then, even if the processor
// was taken away in between.
constexpr int kServeRounds = 4;

// If more work than that was at hand, an event loop leaves the sockets to the thread for so long: long work
// comes in many parts, and the loop would hand each one on.
constexpr Time kLongWork = 100'000'000;

// Rounds of moving between two looks at the sockets: a transfer of one piece needs two, its bytes and
// the source's fence.
constexpr int kMoves = 4;

// The most rounds in a row for which frames through memory may keep the thread from the sockets.
constexpr int kRoundsWithoutSockets = 16;

// A polling caller looks at quiet sockets at least this often.
constexpr Time kLookNs = 5'000;

// Rounds that end by a mistake of ours, before the agent makes no more of them.
constexpr int kMostMistakes = 8;

// A waiting caller wakes at least this often, whatever the deadlines.
constexpr Time kDriverNap = 1'000'000'000;

// A follower looks again at least this often, whichever thread drives.
constexpr auto kFollowerPause = std::chrono::milliseconds(5);

}  // namespace

void Runtime::Waker::on_ready(std::uint32_t) {
  std::uint64_t count;
  (void)!::read(fd.get(), &count, sizeof count);
}

bool Runtime::arm() {
  const bool quiet = connections_.arm_rings();
  return rails_.arm() && quiet;
}

bool Runtime::busy() const { return engine_->wants_pump() || rails_.busy(); }

Time Runtime::next_deadline() const {
  return std::min(
      {engine_->next_deadline(), connections_.next_due(), listeners_.next_due(), rails_.next_due()});
}

bool Runtime::forked() const noexcept { return is_forked(owner_); }

bool Runtime::is_alive() const noexcept { return !closed() && !is_forked(owner_); }

void Runtime::run() {
  // Otherwise the kernel extends a sleep of microseconds by 50 more. For this thread alone.
  ::prctl(PR_SET_TIMERSLACK, 1UL, 0, 0, 0);
  Time moved_at = now();
  while (!stop_) {
    if (num_mistakes_ > kMostMistakes) {
      std::unique_lock lock(wait_mutex_);
      wait_changed_.wait_for(lock, kParked);
      continue;
    }
    // A waiting caller drives: two threads on the same sockets would only wake each other.
    if (driven_ || caller_until_ > now()) {
      std::unique_lock lock(wait_mutex_);
      // Either this sees that the caller has left, or the caller sees parked_ and wakes us.
      parked_ = true;
      const Time lingers = caller_until_ - now();
      if (driven_)
        wait_changed_.wait_for(lock, kParked);
      else if (lingers > 0)
        wait_changed_.wait_for(lock, std::chrono::nanoseconds(lingers));
      parked_ = false;
      continue;
    }
    bool more;
    Time deadline;
    {
      const std::lock_guard lock(gate_);
      more = progress();
      deadline = next_deadline();
      thread_until_ = more || now() - moved_at < options_.spin_ns ? 0 : deadline;
      if (thread_until_ != 0 && !arm()) {
        thread_until_ = 0;
        more = true;
      }
    }
    gate_.yield();
    const Time at = now();
    if (more) {
      moved_at = at;
    } else if (thread_until_ != 0) {
      sleep(deadline, thread_bell_.fd.get());
      thread_until_ = 0;
      thread_bell_.answer();
      moved_at = now();
    }
  }
}

// Sessions for which memory is lacking end. Work of no session is done later, when there is memory.
bool Runtime::progress(bool look) {
  if (num_mistakes_ > kMostMistakes) return left_ = false;
  try {
    return round(look);
  } catch (const std::bad_alloc&) {
    return left_ = true;
  } catch (const std::exception& mistake) {
    give_up(mistake.what());
    return left_ = false;
  }
}

// Peers hear a goodbye. Rounds go on, since works that are under way have to end before memory is given back.
void Runtime::give_up(const char* what) noexcept {
  if (++num_mistakes_ > 1) return;
  try {
    mistake_ = "agent '" + options_.name + "' has ended because of a mistake of kvxfer's (" + what +
               "): make a new agent, and please report this";
    is_broken_.store(true, std::memory_order_release);
    commands_.close_all();
    engine_->close(now(), {Code::kInternal, mistake_});
  } catch (const std::exception&) {  // sockets that end tell the peers, too
    is_broken_.store(true, std::memory_order_release);
    num_mistakes_ = kMostMistakes + 1;
    connections_.close_all();
    rails_.disconnect_all();
  }
  ring_.wake();
  notify_waiting();
}

bool Runtime::round(bool look) {
  bool more = connections_.read_rings();
  // A thread that memory keeps busy saves the system call, most of the time.
  if ((look && !more) || ++rounds_without_sockets_ > kRoundsWithoutSockets) {
    rounds_without_sockets_ = 0;
    sockets_quiet_ = !reactor_.run();
    more = more || !sockets_quiet_;
  }
  const Time at = now();
  connections_.leave_quiet_rings(at);
  if (connections_.has_failed_rails()) connections_.tell_failed_rails(at);
  more = rails_.move(at, *engine_) || more;
  if (!triggers_.empty()) more = triggers_.look(*engine_, at) || more;
  if (!commands_.empty()) more = commands_.look(*engine_, at) || more;
  if (next_deadline() <= at) more = check_deadlines(at) || more;
  engine_->pump(at);
  // Pieces that those frames posted move at once: a page goes from the frame that offers it to the frame
  // that reports it without a system call in between that asks for other input.
  bool still = rails_.busy();
  for (int round = 0; round < kMoves && still && now() - at < kPollNs; ++round) {
    rails_.move(at, *engine_);
    engine_->pump(at);
    still = rails_.busy();
  }
  if (connections_.wants_flush()) {
    flush_sockets();
    still = rails_.busy();
  }
  left_ = still || engine_->wants_pump() || connections_.has_failed_rails();
  serves_.store(connections_.shares_any_memory() && connections_.shares_all_memory(),
                std::memory_order_relaxed);
  return more || left_;
}

// The thread may have stood still between its look at the sockets and `at`, and while memory keeps it busy
// it does not look at them at all. Input that had come by then is read before time is held against a peer.
bool Runtime::check_deadlines(Time at) {
  bool more = connections_.read_rings();
  more = reactor_.run() || more;
  more = rails_.move(at, *engine_, true) || more;
  engine_->on_time(at);
  connections_.expire(at);
  rails_.expire(at, std::to_string(options_.handshake_ns / 1'000'000) + " ms (handshake_timeout_s)",
                *engine_);
  listeners_.wake(at);
  return more;
}

void Runtime::pump_and_flush(Time at) {
  try {
    engine_->pump(at);
    flush_sockets();
  } catch (const std::bad_alloc&) {  // the work of no session: the next round does it
  } catch (const std::exception& mistake) {
    give_up(mistake.what());
  }
}

void Runtime::flush_sockets() {
  if (connections_.flush()) listeners_.descriptors_came();
}

void Runtime::notify_waiting() {
  // Under the mutex: otherwise a thread between its check and its sleep would miss the call.
  { const std::lock_guard lock(wait_mutex_); }
  wait_changed_.notify_all();
}

void Runtime::kick() {
  const Time until = driven_ ? driver_until_ : thread_until_;
  if (until == 0) {
    // The thread keeps away for a loop, which may not be back before something else ends.
    if (loop_lingers_ && busy()) end_linger();
    return;
  }
  // Before it sleeps, the thread asks peers to announce writes to rings that were read meanwhile.
  if (!busy() && !connections_.has_failed_rails() && next_deadline() >= until && arm()) return;
  wake_reactor();
}

void Runtime::Bell::ring() {
  const std::uint64_t one = 1;
  (void)!::write(fd.get(), &one, sizeof one);
  rung = true;  // afterwards: a thread that reads this finds the descriptor readable
}

void Runtime::Bell::answer() {
  if (std::uint64_t count; rung.exchange(false)) (void)!::read(fd.get(), &count, sizeof count);
}

void Runtime::wake_thread() {
  thread_bell_.ring();
  thread_until_ = 0;
}

void Runtime::wake_driver() {
  driver_bell_.ring();
  driver_until_ = 0;
}

void Runtime::wake() {
  if (driven_) wake_driver();
  wake_thread();
  end_linger();
}

void Runtime::end_linger() {
  loop_lingers_ = false;
  caller_until_ = 0;
  if (parked_) notify_waiting();
}

void Runtime::wake_reactor() {
  const std::uint64_t one = 1;
  (void)!::write(waker_.fd.get(), &one, sizeof one);
}

Runtime::CallerTurn::CallerTurn(Runtime& owner) : runtime(owner), now((owner.gate_.lock(), Runtime::now())) {}

Runtime::CallerTurn::~CallerTurn() {
  runtime.pump_and_flush(now);
  runtime.kick();
  runtime.gate_.unlock();
}

bool Runtime::poll() {
  if (!is_alive()) return false;
  bool more = false;
  {
    const std::lock_guard lock(gate_);
    // In one call, short work goes from the frame that asks to the frame that answers.
    const Time start = now(), until = start + kPollNs;
    // If the frames of all sessions come through memory, the sockets tell next to nothing, and asking
    // takes longer than the rest of an idle poll.
    const bool look = !sockets_quiet_ || !connections_.shares_all_memory() || start - looked_at_ >= kLookNs;
    if (look) looked_at_ = start;
    do more = progress(look) || more;
    while (left_ && now() < until);
    // While the thread sleeps, peers would announce over the socket what a polling caller sees at once:
    // wake the thread, so that it waits as it does after every caller.
    if (connections_.shares_any_memory() && thread_until_ != 0 && start < caller_until_) wake_thread();
    kick();
  }
  loop_lingers_ = false;
  caller_until_ = now() + kCallerLinger;
  return ring_.take_news() || more;
}

bool Runtime::serve() {
  if (!is_alive()) return false;
  bool left = true;
  // A sleeping driver waits for more than this call knows of.
  if (!driven_ && gate_.try_lock()) {
    const std::lock_guard lock(gate_, std::adopt_lock);
    const Time start = now();
    int rounds = 0;
    do {
      progress();
      // From now on peers announce their writes over the socket: the loop is about to sleep.
      left = left_ || connections_.has_failed_rails() || !arm();
    } while (left && (++rounds < kServeRounds || now() - start < kPollNs));
    left = left || unannounced();  // such words have to be looked at
    if (left && rails_.busy()) thread_serves_until_ = now() + kLongWork;
    if (left) {
      if (thread_until_ != 0) wake_thread();
    } else {
      kick();
      // A loop that waits on comes back soon, so the thread keeps out of its way, as after every
      // caller. Under the gate: the next thread that posts sees that it may have to end this.
      caller_until_ = now() + kLoopLinger;
      loop_lingers_ = true;
    }
  }
  if (left) end_linger();
  return !left;
}

void Runtime::leave() {
  if (is_alive() && loop_lingers_) end_linger();
}

bool Runtime::wait(const std::function<bool()>& done, Time timeout_ns) {
  const Time deadline = timeout_ns < 0 ? kNever : time_after(now(), timeout_ns);
  while (!done()) {
    if (closed() || is_forked(owner_) || now() >= deadline) return done();
    if (driven_.exchange(true)) {
      // Another thread drives; it wakes this one when something has ended.
      ++num_followers_;
      std::unique_lock lock(wait_mutex_);
      // done() may want the gate, and the gate's holder may want this mutex: so done() is called
      // outside, and an end that is missed in between costs one pause.
      wait_changed_.wait_for(lock, kFollowerPause);
      --num_followers_;
      continue;
    }
    Time moved_at = now();
    while (!done() && !closed()) {
      bool more;
      {
        const std::lock_guard lock(gate_);
        more = progress();
        const bool sleeps = !more && now() - moved_at >= options_.spin_ns;
        driver_until_ = sleeps && arm() ? std::min(next_deadline(), deadline) : 0;
      }
      gate_.yield();
      const Time at = now();
      if (more) moved_at = at;
      if (done() || at >= deadline) break;
      if (driver_until_ != 0) {
        sleep(std::min(driver_until_.load(), at + kDriverNap), driver_bell_.fd.get());
        driver_until_ = 0;
        driver_bell_.answer();
        moved_at = now();
      }
    }
    driver_until_ = 0;
    loop_lingers_ = false;
    caller_until_ = unannounced() ? 0 : now() + kCallerLinger;
    driven_ = false;
    {
      // The work that this caller leaves is the thread's, which may be asleep.
      const std::lock_guard lock(gate_);
      kick();
    }
    if (num_followers_ > 0 || parked_) notify_waiting();
  }
  return true;
}

}  // namespace kvxfer
