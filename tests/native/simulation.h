// A seeded world of simulated agents, and the functions in which scenarios are written.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "simulated_node.h"

namespace simulation {

class World {
 public:
  explicit World(std::uint64_t seed, EngineConfig of_agents = {})
      : limits(std::move(of_agents)), random_(seed), network_(clock_, random_) {}
  ~World() {
    if (check::state().num_failures == 0) return;
    for (const std::string& line : clock_.lines()) std::printf("    %s\n", line.c_str());
  }

  EngineConfig limits;  // of agents that are added
  Node& add(const std::string& name, const std::string& secret = "secret") {
    EngineConfig config = limits;
    config.session.secret = secret;
    nodes_.push_back(std::make_unique<Node>(network_, static_cast<int>(nodes_.size()), name, config));
    return *nodes_.back();
  }
  // Waits until both agents know each other, and every rail is up at both ends.
  void connect(Node& a, Node& b, std::vector<RailPlan> rails = {one_sided_rail()}) {
    const std::size_t num_rails = rails.size();
    a.call(b, std::move(rails));
    REQUIRE(until([&] {
      const SessionKey there = b.session_with(a.name()), here = a.session_with(b.name());
      return here != 0 && there != 0 && a.rails_with(here).size() == num_rails &&
             b.rails_with(there).size() == num_rails;
    }));
  }

  void run_for(Time duration) {
    const Time end = clock_.now() + duration;
    while (clock_.step(end))
      if (after_step) after_step();
  }
  template <class Condition>
  bool until(Condition&& condition, Time limit = 30 * kSecond) {
    const Time end = clock_.now() + limit;
    while (!condition()) {
      if (!clock_.step(end)) return condition();
      if (after_step) after_step();
    }
    return true;
  }
  void partition(Node& a, Node& b, bool both_ways = true) {
    clock_.note(a.name() +
                (both_ways ? " and " + b.name() + " are cut off" : " is not heard by " + b.name()));
    network_.block(a.place(), b.place());
    if (both_ways) network_.block(b.place(), a.place());
  }
  void heal(Node& a, Node& b) {
    clock_.note(a.name() + " and " + b.name() + " hear each other");
    network_.unblock(a.place(), b.place());
    network_.unblock(b.place(), a.place());
  }

  Clock& clock() { return clock_; }
  Network& network() { return network_; }
  check::Random& random() { return random_; }
  Time now() const { return clock_.now(); }
  std::vector<std::unique_ptr<Node>>& nodes() { return nodes_; }
  std::function<void()> after_step;

 private:
  check::Random random_;
  Clock clock_;
  Network network_;
  std::vector<std::unique_ptr<Node>> nodes_;
};

}  // namespace simulation
