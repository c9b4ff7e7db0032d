// A timer that wakes a thread that sleeps on the reactor, at a set time.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "kvxfer/transport.h"

namespace kvxfer {

class Alarm final : public Reactor::Handler {
 public:
  using Clock = std::chrono::steady_clock;
  static Result<std::unique_ptr<Alarm>> create(Reactor& reactor);
  ~Alarm() override;

  void set(Clock::time_point at) noexcept;
  void clear() noexcept;
  // True from when it rings until acknowledge(). The caller looks at the clock to find out what is due.
  bool has_rung() const noexcept { return has_rung_; }
  void acknowledge() noexcept { has_rung_ = false; }

 private:
  Alarm(Reactor& reactor, UniqueFd timer) : reactor_(reactor), timer_(std::move(timer)) {}
  void on_ready(std::uint32_t events) override;

  Reactor& reactor_;
  UniqueFd timer_;
  bool has_rung_ = false;
};

}  // namespace kvxfer
