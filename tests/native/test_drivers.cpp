// The drivers of an agent (core/runtime/drivers.h), by every order of their steps in small cases: the agent's
// thread beside callers that wait, poll and post, an event loop, and a peer that writes. What is shared is read and
// written one step at a time, and between two steps any other may go on; the clock moves by itself, and when all
// sleep. Work that comes is done soon: by a thread that was woken, and not by a bound that saves it.
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "core/runtime/drivers.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace drivers_test {
namespace {

using namespace kvxfer;

constexpr Time kForEver = std::numeric_limits<Time>::max();

// Actors, each on a stack of its own, and an order of their steps. An order is a list of choices; the next one
// differs from it in its last choice that has an alternative, until there is none. Who is running goes on, but for
// kMostSwitches times in an order: what goes wrong at all goes wrong with few.
class Orders {
 public:
  explicit Orders(int most_switches) : most_switches_(most_switches) {}

  // True while there is an order that was not tried.
  bool begin() {
    if (num_begun_ != 0 && !next()) return false;
    ++num_begun_;
    at_ = 0;
    num_switches_ = 0;
    time = 0;
    current_ = 0;
    actors_.clear();
    return true;
  }
  void add(std::function<void()> body) {
    if (actors_.size() == stacks_.size()) stacks_.emplace_back(new char[kStackNbytes]);
    actors_.push_back(std::make_unique<Actor>(std::move(body), stacks_[actors_.size()].get()));
  }

  // False if they stand still before all have come to their end; then they stay so.
  bool run() {
    while (const auto next = choose()) {
      current_ = *next;
      resume(*actors_[current_]);
    }
    return std::ranges::all_of(actors_, [](const auto& each) { return each->over; });
  }

  // By an actor: others may go on here.
  void step() {
    if (const auto next = choose(); next != current_) {
      next_ = next;
      leave();
    }
  }
  // By an actor: goes on when it is so, or at that time.
  void block(std::function<bool()> is_so, Time until = kForEver) {
    Actor& actor = *actors_[current_];
    actor.awaits = std::move(is_so);
    actor.until = until;
    step();
    actor.awaits = nullptr;
  }

  Time time = 0;
  std::uint64_t num_begun() const { return num_begun_; }

 private:
  static constexpr std::size_t kStackNbytes = 128 * 1024;

  struct Actor {
    Actor(std::function<void()> what, char* memory) : body(std::move(what)), stack(memory) {}
    std::function<void()> body;
    char* stack;
    ucontext_t context{};
    std::function<bool()> awaits;
    Time until = kForEver;
    bool begun = false, over = false;
  };
  struct Choice {
    std::vector<std::size_t> others;  // that were not tried yet
    std::size_t chosen;
  };

  bool next() {
    while (!choices_.empty() && choices_.back().others.empty()) choices_.pop_back();
    if (choices_.empty()) return false;
    choices_.back().chosen = choices_.back().others.back();
    choices_.back().others.pop_back();
    return true;
  }

  // Who goes on; nobody if nobody can. When all sleep, the clock goes on to the first who is to wake.
  std::optional<std::size_t> choose() {
    if (next_) return std::exchange(next_, std::nullopt);
    ready_.clear();
    Time soonest = kForEver;
    for (std::size_t i = 0; i < actors_.size(); ++i) {
      const Actor& actor = *actors_[i];
      if (actor.over) continue;
      if (!actor.awaits || actor.awaits() || time >= actor.until)
        ready_.push_back(i);
      else
        soonest = std::min(soonest, actor.until);
    }
    if (ready_.empty()) {
      if (soonest == kForEver) return std::nullopt;
      time = soonest;
      return choose();
    }
    const bool goes_on = std::ranges::find(ready_, current_) != ready_.end();
    if (at_ == choices_.size()) {
      Choice choice{.others = {}, .chosen = goes_on ? current_ : ready_.front()};
      if (!goes_on || num_switches_ < most_switches_)
        std::ranges::copy_if(ready_, std::back_inserter(choice.others),
                             [&](std::size_t each) { return each != choice.chosen; });
      choices_.push_back(std::move(choice));
    }
    const std::size_t chosen = choices_[at_++].chosen;
    if (goes_on && chosen != current_) ++num_switches_;
    return chosen;
  }

  void resume(Actor& actor) {
    if (!actor.begun) {
      actor.begun = true;
      ::getcontext(&actor.context);
      actor.context.uc_stack = {.ss_sp = actor.stack, .ss_flags = 0, .ss_size = kStackNbytes};
      actor.context.uc_link = nullptr;
      running_ = this;
      ::makecontext(&actor.context, &Orders::enter, 0);
    }
    told_before(actor.stack, kStackNbytes);
    ::swapcontext(&own_, &actor.context);
    told_after();
  }
  void leave() {
    Actor& actor = *actors_[current_];
    told_before(own_stack_, own_nbytes_, actor.over);
    ::swapcontext(&actor.context, &own_);
    told_after();
  }
  static void enter() {
    Orders& orders = *running_;
#if defined(__SANITIZE_ADDRESS__)
    ::__sanitizer_finish_switch_fiber(nullptr, &orders.own_stack_, &orders.own_nbytes_);
#endif
    Actor& actor = *orders.actors_[orders.current_];
    actor.body();
    actor.over = true;
    orders.leave();
  }

  // AddressSanitizer has to be told of each change of stacks.
#if defined(__SANITIZE_ADDRESS__)
  void told_before(const void* stack, std::size_t nbytes, bool for_ever = false) {
    void*& kept = stack == own_stack_ ? current_fake_ : own_fake_;
    ::__sanitizer_start_switch_fiber(for_ever ? nullptr : &kept, stack, nbytes);
  }
  void told_after() { ::__sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr); }
  void *own_fake_ = nullptr, *current_fake_ = nullptr;
#else
  void told_before(const void*, std::size_t, bool = false) {}
  void told_after() {}
#endif
  const void* own_stack_ = nullptr;
  std::size_t own_nbytes_ = 0;

  static inline Orders* running_ = nullptr;
  const int most_switches_;
  std::vector<std::unique_ptr<char[]>> stacks_;
  std::vector<std::unique_ptr<Actor>> actors_;
  std::size_t current_ = 0;
  std::optional<std::size_t> next_;  // chosen already
  std::vector<std::size_t> ready_;
  ucontext_t own_{};
  std::vector<Choice> choices_;
  std::size_t at_ = 0;
  int num_switches_ = 0;
  std::uint64_t num_begun_ = 0;
};

Orders* orders = nullptr;  // of the case that runs

// What threads share, a step at a time.
struct Steps {
  template <class T>
  class Atomic {
   public:
    Atomic(T value) : value_(value) {}
    operator T() const { return orders->step(), value_; }
    T operator=(T value) { return orders->step(), value_ = value; }
    T exchange(T value) { return orders->step(), std::exchange(value_, value); }
    T operator++() { return orders->step(), ++value_; }
    T operator--() { return orders->step(), --value_; }

   private:
    T value_;
  };

  class Mutex {
   public:
    void lock() {
      orders->step();
      orders->block([this] { return !held_; });
      held_ = true;
    }
    bool try_lock() {
      orders->step();
      return !std::exchange(held_, true);
    }
    void unlock() { held_ = false; }
    void yield() {}

   private:
    bool held_ = false;
  };

  class Condition {
   public:
    template <class Lock>
    void wait_for(Lock& lock, std::chrono::nanoseconds most) {
      const std::uint64_t before = num_calls_;
      lock.unlock();
      orders->block([this, before] { return num_calls_ != before; }, orders->time + most.count());
      lock.lock();
    }
    void notify_all() {
      orders->step();
      ++num_calls_;
    }

   private:
    std::uint64_t num_calls_ = 0;
  };

  struct Bell {
    void ring() {
      orders->step();
      rung = true;
    }
    void answer() {
      orders->step();
      rung = false;
    }
    bool rung = false;
  };
};

// An agent without bytes. What a peer asks for comes by a ring of memory, or by a socket; a round takes it in, and
// the next one ends it. Who sleeps has asked for announcements, since a ring wakes nobody.
class Agent {
 public:
  using Operation = std::size_t;

  // -- What drivers ask of their host
  Time now() const { return orders->time; }
  Steps::Mutex& gate() { return gate_; }
  Time spin_ns() const { return 0; }
  bool gave_up() const { return false; }
  bool is_alive() const { return !closed_; }
  bool closed() const { return closed_; }
  bool left() const { return left_; }
  bool has_work() const { return !moves_.empty(); }
  bool moves_bytes() const { return !moves_.empty(); }
  bool shares_any_memory() const { return true; }
  bool unannounced() const { return num_words_ > 0; }
  Time next_deadline() const { return due_.empty() ? kForEver : due_.begin()->first; }
  bool polls_sockets(Time) { return polls_sockets_ = !polls_sockets_; }
  void wake_reactor() { told_ = true; }
  bool arm() {
    armed_ = true;
    return ring_.empty();
  }
  bool progress(bool look = true) {
    armed_ = false;
    const Moves before = std::exchange(moves_, {});
    bool more = take(ring_);
    if (look) {
      told_ = false;
      more = take(sockets_) || more;
    }
    num_words_ -= stored_.size();
    more = take(stored_) || more;
    for (; next_deadline() <= now(); due_.erase(due_.begin())) end(due_.begin()->second);
    for (const auto& [operation, num_rounds] : before)
      if (num_rounds > 1)
        moves_[operation] = num_rounds - 1;
      else
        end(operation);
    left_ = !moves_.empty();
    return left_ || more || !before.empty();
  }
  void sleep(Time until, const Steps::Bell& bell) {
    constexpr Time kPause = 20'000;  // between two looks at words that nobody announces
    const auto hears = [&] { return !sockets_.empty() || told_ || bell.rung; };
    while (now() < until && !hears() && stored_.empty())
      orders->block(hears, unannounced() ? std::min(until, now() + kPause) : until);
  }

  // -- What others do
  void post(Operation operation) {
    const std::lock_guard lock(gate_);
    moves_[operation] = 1;
    drivers.kick();
  }
  void post_until(Operation operation, Time due) {
    const std::lock_guard lock(gate_);
    due_.emplace(due, operation);
    drivers.kick();
  }
  // A transfer that waits for a word, which a GPU stores.
  void post_after(Operation operation) {
    {
      const std::lock_guard lock(gate_);
      ++num_words_;
      drivers.kick();
    }
    drivers.wake();
    orders->step();
    stored_.emplace(operation, 1);
  }
  void write_to_ring(Operation operation) {
    orders->step();
    ring_.emplace(operation, 1);
    orders->step();
    if (armed_) told_ = true;  // an empty header over the socket
  }
  void write_to_socket(Operation operation, int num_rounds = 1) {
    orders->step();
    sockets_.emplace(operation, num_rounds);
  }
  // Waits for what has to end before.
  void close(Operation operation) {
    closed_ = true;
    {
      const std::lock_guard lock(gate_);
      drivers.tell_ended();
      drivers.kick();
    }
    CHECK(drivers.wait([&] { return has_ended(operation); }, kForEver, true));
    drivers.stop();
  }
  bool has_ended(Operation operation) const { return ended_.contains(operation); }
  bool is_idle() const {
    return ring_.empty() && sockets_.empty() && stored_.empty() && moves_.empty() && due_.empty();
  }

  Drivers<Agent, Steps> drivers{*this};

 private:
  using Moves = std::map<Operation, int>;  // and how many rounds each takes

  bool take(Moves& from) {
    const bool any = !from.empty();
    moves_.merge(from);
    return any;
  }
  void end(Operation operation) {
    ended_.insert(operation);
    drivers.tell_ended();
  }

  Steps::Mutex gate_;
  Moves ring_, sockets_, stored_, moves_;
  std::multimap<Time, Operation> due_;
  std::set<Operation> ended_;
  std::size_t num_words_ = 0;
  bool closed_ = false, armed_ = false, told_ = false, left_ = false, polls_sockets_ = false;
};

// What one does beside the agent's thread. It may begin an operation of its own, and wait for the other's.
struct Role {
  const char* name;
  void (*play)(Agent& agent, Agent::Operation own, Agent::Operation others);
  bool begins = true;
  // For how long work may stand because of this one: pauses of those who follow, a loop that computes, the clock.
  Time costs = 0;
  bool serves = false;  // a loop, of which there is one
};

void wait_for(Agent& agent, Agent::Operation operation) {
  CHECK(agent.drivers.wait([&] { return agent.has_ended(operation); }, kForEver) || agent.closed());
}

using Operation = Agent::Operation;
constexpr Time kPauses = 6'000'000, kLoop = 1'000'000, kMoment = 100'000, kTick = 150'000;

constexpr Role kRoles[] = {
    {"waits for what it posted",
     [](Agent& agent, Operation own, Operation) {
       agent.post(own);
       wait_for(agent, own);
     },
     true, kPauses},
    {"waits for what a ring brings",
     [](Agent& agent, Operation own, Operation) {
       agent.write_to_ring(own);
       wait_for(agent, own);
     },
     true, kPauses},
    {"waits for the other's", [](Agent& agent, Operation, Operation others) { wait_for(agent, others); },
     false},
    {"waits in vain",
     [](Agent& agent, Operation, Operation) {
       CHECK(!agent.drivers.wait([] { return false; }, agent.now() + kMoment));
     },
     false, kPauses},
    {"posts", [](Agent& agent, Operation own, Operation) { agent.post(own); }},
    {"posts until later",
     [](Agent& agent, Operation own, Operation) { agent.post_until(own, agent.now() + kMoment); }, true,
     kMoment},
    {"posts after a word", [](Agent& agent, Operation own, Operation) { agent.post_after(own); }},
    {"polls",
     [](Agent& agent, Operation own, Operation) {
       agent.drivers.poll();
       agent.post(own);
       agent.drivers.poll();
     }},
    {"serves a loop",
     [](Agent& agent, Operation, Operation) {
       agent.drivers.serve();
       agent.drivers.serve();
     },
     false, 0, true},
    {"serves a loop and leaves",
     [](Agent& agent, Operation own, Operation) {
       agent.drivers.serve();
       agent.write_to_ring(own);
       agent.drivers.leave();
     },
     true, 0, true},
    {"is a peer with a ring", [](Agent& agent, Operation own, Operation) { agent.write_to_ring(own); }, true,
     kLoop},
    {"is a peer with a socket", [](Agent& agent, Operation own, Operation) { agent.write_to_socket(own); },
     true, kLoop},
    {"is a peer that asks for much",
     [](Agent& agent, Operation own, Operation) { agent.write_to_socket(own, 7); }, true, kLoop},
    {"closes when what a ring brings has ended",
     [](Agent& agent, Operation own, Operation) {
       agent.write_to_ring(own);
       agent.close(own);
     },
     true, kPauses},
    {"is the clock",
     [](Agent&, Operation, Operation) {
       for (int i = 0; i < 2; ++i) {
         orders->step();
         orders->time += kTick;
       }
     },
     false, 2 * kTick},
};

// Of lingers of callers. What saves a thread that nobody woke takes 500 ms.
constexpr Time kSoon = 900'000;

// In an order, how often one gives way that could go on (2: well, too, in minutes).
constexpr int kMostSwitches = 1;

// Tries the roles beside the agent's thread. False if an order does not end, or late.
bool try_orders(const std::vector<const Role*>& roles, int most_switches) {
  Orders tried(most_switches);
  orders = &tried;
  Time soon = kSoon;
  for (const Role* each : roles) soon += each->costs;
  while (tried.begin()) {
    Agent agent;
    std::size_t num_over = 0;
    tried.add([&] { agent.drivers.run(); });
    for (std::size_t i = 0; i < roles.size(); ++i)
      tried.add([&, i] {
        roles[i]->play(agent, i, 1 - i);
        ++num_over;
      });
    tried.add([&] {
      tried.block([&] { return num_over == roles.size() && (agent.is_idle() || agent.closed()); });
      agent.drivers.stop();
    });
    const bool came_to_end = tried.run();
    if (came_to_end && tried.time <= soon) continue;
    for (const Role* each : roles) std::printf("  beside one who %s\n", each->name);
    std::printf("  order %llu: %s after %.3f ms\n", static_cast<unsigned long long>(tried.num_begun()),
                came_to_end ? "ended" : "all stand", static_cast<double>(tried.time) / 1e6);
    CHECK(came_to_end);
    CHECK(tried.time <= soon);
    if (!came_to_end) std::exit(1);  // their stacks cannot be unwound
    return false;
  }
  return true;
}

TEST(in_every_order_work_is_done_soon_beside_one_other_or_two) {
  for (const Role& first : kRoles) {
    if (first.begins) try_orders({&first}, kMostSwitches + 1);
    for (const Role& second : kRoles) {
      if (&second < &first || !(first.begins || second.begins) || (first.serves && second.serves)) continue;
      try_orders({&first, &second}, kMostSwitches);
    }
  }
}

}  // namespace
}  // namespace drivers_test
