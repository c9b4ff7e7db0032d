// A clock and a network that run from a seed. They drive the engine in tests that need every interleaving and
// every fault, and have to be repeatable.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "core/control/session.h"

namespace simulation {

using kvxfer::Time;
namespace wire = kvxfer::wire;

inline constexpr Time kMicrosecond = 1'000, kMillisecond = 1'000'000, kSecond = 1'000'000'000;

// Runs calls in the order of their times; calls for the same time in the order in which they were made.
class Clock {
 public:
  Time now() const { return now_; }
  void after(Time delay, std::function<void()> run) {
    events_.emplace(std::pair(now_ + std::max<Time>(delay, 0), next_++), std::move(run));
  }
  // False if nothing is due up to `until`; the time is then `until`.
  bool step(Time until) {
    if (events_.empty() || events_.begin()->first.first > until) {
      now_ = std::max(now_, until);
      return false;
    }
    auto event = events_.extract(events_.begin());
    now_ = event.key().first;
    event.mapped()();
    return true;
  }

  // Keeps the last lines of what happened, for the reader of a failure.
  void note(std::string line) {
    lines_.push_back(std::to_string(now_ / kMicrosecond) + " us  " + std::move(line));
    if (lines_.size() > kMaxLines) lines_.pop_front();
  }
  const std::deque<std::string>& lines() const { return lines_; }

 private:
  static constexpr std::size_t kMaxLines = 150;
  Time now_ = kSecond;  // not 0, so that it differs from a time that was never set
  std::uint64_t next_ = 0;
  std::map<std::pair<Time, std::uint64_t>, std::function<void()>> events_;
  std::deque<std::string> lines_;
};

// Connections between numbered places. A blocked direction keeps its frames, and delivers them in order once
// it is open again, as TCP does.
class Network {
 public:
  Network(Clock& clock, check::Random& random) : clock_(clock), random_(random) {}

  Time latency() { return static_cast<Time>(random_.between(min_latency, max_latency)); }
  void block(int from, int to) { ways_[{from, to}].blocked = true; }
  bool is_blocked(int from, int to) const {
    const auto way = ways_.find({from, to});
    return way != ways_.end() && way->second.blocked;
  }
  void unblock(int from, int to) {
    Way& way = ways_[{from, to}];
    way.blocked = false;
    for (auto& arrive : std::exchange(way.held, {})) arrive();
  }
  void carry(int from, int to, Time delay, std::function<void()> arrive) {
    clock_.after(delay, [this, from, to, arrive = std::move(arrive)]() mutable {
      Way& way = ways_[{from, to}];
      if (way.blocked)
        way.held.push_back(std::move(arrive));
      else
        arrive();
    });
  }

  Clock& clock() { return clock_; }
  check::Random& random() { return random_; }
  std::uint64_t min_latency = 20 * kMicrosecond, max_latency = 200 * kMicrosecond;
  // How many of ten thousand control frames it happens to.
  unsigned lose = 0, repeat = 0, swap = 0, flip = 0;

 private:
  struct Way {
    bool blocked = false;
    std::vector<std::function<void()>> held;
  };
  Clock& clock_;
  check::Random& random_;
  std::map<std::pair<int, int>, Way> ways_;
};

// One connection: whole frames, in order, both ways. Side 0 called side 1.
class Pipe : public std::enable_shared_from_this<Pipe> {
 public:
  struct End {
    int place = 0;
    std::function<void(std::uint32_t key, wire::Bytes)> on_frame;
    std::function<void(std::uint32_t key, std::string)> on_end;
  };
  Pipe(Network& network, End caller, End called)
      : network_(network), ends_{std::move(caller), std::move(called)} {}

  // The end's own number for the connection.
  void set_key(int side, std::uint32_t key) { keys_[side] = key; }
  std::uint32_t key(int side) const { return keys_[side]; }

  void send(int from, wire::Bytes frame) {
    if (!open_[from]) return;
    check::Random& random = network_.random();
    const auto meets = [&](unsigned of_ten_thousand) {
      return of_ten_thousand != 0 && random.below(10'000) < of_ten_thousand;
    };
    if (meets(network_.lose)) return;
    if (meets(network_.flip)) frame[random.below(frame.size())] ^= std::byte{1} << random.below(8);
    if (meets(network_.repeat)) pass(from, frame);
    if (!kept_[from].empty()) {
      pass(from, std::move(frame));
      pass(from, std::exchange(kept_[from], {}));
    } else if (meets(network_.swap)) {
      kept_[from] = std::move(frame);  // until the next has overtaken it
    } else {
      pass(from, std::move(frame));
    }
  }
  // Bytes that the far end does not take: none while frames arrive.
  std::size_t num_unsent(int from) const {
    return network_.is_blocked(ends_[from].place, ends_[1 - from].place) ? under_way_[from] : 0;
  }
  // Closes after what was sent. The far end hears of it; this end hears nothing more.
  void close(int from, std::string why = "closed") {
    open_[1 - from] = false;
    half_close(from, std::move(why));
  }
  // This end sends nothing more, but still listens.
  void half_close(int from, std::string why = "half closed") {
    if (!std::exchange(open_[from], false)) return;
    arrive(from, [this, from, why = std::move(why)](End& to) { to.on_end(keys_[1 - from], why); });
  }
  // Neither end hears anything more, nor hears of the cut.
  void cut() {
    open_[0] = open_[1] = false;
    cut_ = true;
  }

 private:
  void pass(int from, wire::Bytes frame) {
    under_way_[from] += frame.size();
    arrive(from, [this, from, frame = std::move(frame)](End& to) {
      under_way_[from] -= frame.size();
      to.on_frame(keys_[1 - from], frame);
    });
  }
  void arrive(int from, std::function<void(End&)> call) {
    Time& last = last_at_[from];
    last = std::max(last, network_.clock().now() + network_.latency());
    network_.carry(ends_[from].place, ends_[1 - from].place, last - network_.clock().now(),
                   [self = shared_from_this(), from, call = std::move(call)] {
                     if (!self->cut_) call(self->ends_[1 - from]);
                   });
  }

  Network& network_;
  End ends_[2];
  bool open_[2] = {true, true};  // for sending from that side
  bool cut_ = false;
  std::uint32_t keys_[2] = {0, 0};
  wire::Bytes kept_[2];
  std::size_t under_way_[2] = {0, 0};
  Time last_at_[2] = {0, 0};
};

}  // namespace simulation
