// Rounds of progress, and what the drivers (core/runtime/drivers.h) ask of the agent.
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <utility>

#include "core/runtime.h"
#include "core/system/fork_guard.h"

namespace kvxfer {
namespace {

// For how long a round goes on moving what it posted itself.
constexpr Time kMovesNs = 10'000;

// Rounds of moving between two looks at the sockets.
constexpr int kMoves = 4;

// The most rounds in a row for which frames through memory may keep the thread from the sockets.
constexpr int kRoundsWithoutSockets = 16;

// A polling caller looks at quiet sockets at least this often.
constexpr Time kLookNs = 5'000;

// Rounds that end by a mistake of ours, before the agent makes no more of them.
constexpr int kMostMistakes = 8;

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
  drivers_.run();
}

bool Runtime::gave_up() const noexcept { return num_mistakes_ > kMostMistakes; }

// Sessions for which memory is lacking end. Work of no session is done later, when there is memory.
bool Runtime::progress(bool look) {
  if (gave_up()) return left_ = false;
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
  drivers_.notify();
}

bool Runtime::round(bool look) {
  bool more = connections_.read_rings();
  // A thread that memory keeps busy saves the system call, most of the time.
  if ((look && !more) || ++rounds_without_sockets_ > kRoundsWithoutSockets) {
    rounds_without_sockets_ = 0;
    sockets_quiet_ = !reactor_.run();
    more = more || !sockets_quiet_;
  }
  Time at = now();
  connections_.leave_quiet_rings(at);
  if (connections_.has_failed_rails()) connections_.tell_failed_rails(at);
  more = rails_.poll(at, *engine_) || more;
  if (!triggers_.empty() && triggers_.look(*engine_, at)) {
    more = true;
    at = now();  // what a store let go begins after that store
  }
  if (!commands_.empty()) more = commands_.look(*engine_, at) || more;
  if (next_deadline() <= at) more = check_deadlines(at) || more;
  engine_->pump(at);
  // Pieces that those frames posted move at once: a page goes from the frame that offers it to the frame
  // that reports it without a system call in between that asks for other input.
  bool still = rails_.busy();
  for (int round = 0; round < kMoves && still && (round == 0 || now() - at < kMovesNs); ++round) {
    rails_.poll(at, *engine_);
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
  more = rails_.poll(at, *engine_, true) || more;
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

bool Runtime::has_work() const { return busy() || connections_.has_failed_rails(); }

// If the frames of all sessions come through memory, the sockets tell next to nothing, and asking takes longer
// than the rest of an idle poll.
bool Runtime::polls_sockets(Time at) {
  const bool look = !sockets_quiet_ || !connections_.shares_all_memory() || at - looked_at_ >= kLookNs;
  if (look) looked_at_ = at;
  return look;
}

void Runtime::wake_reactor() {
  const std::uint64_t one = 1;
  (void)!::write(waker_.fd.get(), &one, sizeof one);
}

Runtime::CallerTurn::CallerTurn(Runtime& owner) : runtime(owner), now((owner.gate_.lock(), Runtime::now())) {}

Runtime::CallerTurn::~CallerTurn() {
  runtime.pump_and_flush(now);
  runtime.drivers_.kick();
  runtime.gate_.unlock();
}

bool Runtime::poll() {
  if (!is_alive()) return false;
  const bool more = drivers_.poll();
  return ring_.take_news() || more;
}

bool Runtime::serve() { return is_alive() && drivers_.serve(); }

void Runtime::leave() {
  if (is_alive()) drivers_.leave();
}

bool Runtime::wait(const std::function<bool()>& done, Time timeout_ns) {
  return drivers_.wait(done, timeout_ns < 0 ? kNever : time_after(now(), timeout_ns));
}

}  // namespace kvxfer
