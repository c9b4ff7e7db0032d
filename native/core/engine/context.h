// What every part of the engine is given: its limits, its host, the time of the call that is being served, timers
// and counters. No part's own state stands here.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "core/engine/timers.h"
#include "core/engine_host.h"

namespace kvxfer {

class Context {
 public:
  Context(EngineConfig its_config, EngineHost& its_host) : config(std::move(its_config)), host(its_host) {}

  const EngineConfig config;
  EngineHost& host;
  Time now = 0;  // Engine sets it with every call
  Timers timers;
  EngineStats stats;
  bool pump_again = false;  // a rail said "again" and will not announce that it can

  // A caller up the stack may still hold a reference to what ended in this round: it lives until the next.
  template <class T>
  void keep_for_this_round(std::unique_ptr<T> owned) {
    ended_.emplace_back(owned.release(), [](void* dead) { delete static_cast<T*>(dead); });
  }
  void begin_round() {
    ended_.clear();
    pump_again = false;
  }

 private:
  std::vector<std::unique_ptr<void, void (*)(void*)>> ended_;
};

}  // namespace kvxfer
