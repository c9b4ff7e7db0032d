// What every part of the engine is given: its limits, its host, the time of the present call, timers and
// counters. It holds no state of any one part.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "core/copy/copy_workers.h"
#include "core/engine/timers.h"
#include "core/engine_host.h"
#include "core/in_room.h"

namespace kvxfer {

inline constexpr SessionKey kNobody = 0;  // sessions are numbered from 1

class Context {
 public:
  Context(EngineConfig its_config, EngineHost& its_host, std::shared_ptr<CopyWorkers> its_workers)
      : config(std::move(its_config)), host(its_host), workers(std::move(its_workers)) {}

  const EngineConfig config;
  EngineHost& host;
  std::shared_ptr<CopyWorkers> workers;  // null: the thread that calls the engine computes alone
  Time now = 0;  // Engine sets it with every call
  Timers timers;
  EngineStats stats;
  bool pump_again = false;  // a rail said "again" and will not announce that it can

  // Runs work that one session needs. If memory is lacking for it, the session is marked to end, and
  // Engine ends it once the part has returned; work for other sessions goes on. Work for kNobody is left
  // undone.
  template <class Work>
  void serve(SessionKey session, Work&& work) {
    try {
      work();
    } catch (const std::bad_alloc&) {
      starve(session);
    }
  }
  // Remembers at most kMaxStarved sessions at a time. The next call of any other one fails likewise.
  void starve(SessionKey session) noexcept {
    pump_again = true;
    const auto end = starved_.begin() + static_cast<std::ptrdiff_t>(num_starved_);
    if (num_starved_ != kMaxStarved && std::find(starved_.begin(), end, session) == end)
      starved_[num_starved_++] = session;
  }
  bool has_starved() const noexcept { return num_starved_ != 0; }
  // Calls `end` once for each of them. Those that it marks again are left for another call.
  template <class End>
  void take_starved(End&& end) {
    const auto starved = starved_;
    const std::size_t num = std::exchange(num_starved_, 0);
    for (std::size_t i = 0; i < num; ++i) end(starved[i]);
  }

  // Keeps an ended object until the next round, since a caller up the stack may still hold a reference to
  // it. After make_room() keeping one cannot fail: there is room for a transfer and for the region that
  // waited for it.
  void make_room() {
    if (ended_.capacity() - ended_.size() < 2) ended_.reserve(2 * ended_.capacity() + 2);
  }
  template <class T>
  void keep_for_this_round(std::unique_ptr<T> owned) noexcept {
    add_in_room(ended_, owned.release(), [](void* dead) { delete static_cast<T*>(dead); });
  }
  void begin_round() {
    ended_.clear();
    pump_again = false;
  }

 private:
  static constexpr std::size_t kMaxStarved = 64;
  std::array<SessionKey, kMaxStarved> starved_{};  // sessions for which memory was lacking
  std::size_t num_starved_ = 0;
  std::vector<std::unique_ptr<void, void (*)(void*)>> ended_;
};

}  // namespace kvxfer
