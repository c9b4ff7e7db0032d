// What a caller sees of one end of a transfer, or of an expectation. The engine writes it under
// the progress gate, callers read it from any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/session.h"
#include "kvxfer/status.h"

namespace kvxfer {

enum class Outcome : std::uint8_t { kPending, kDone, kFailed, kCancelled };

class Handle {
  // Deduced return types must be known before their use below.
  template <class F>
  auto locked(F&& f) const {
    const std::lock_guard lock(mutex_);
    return f();
  }

 public:
  // `first_layer` and `num_layers` are those whose arrival can be asked for.
  Handle(std::uint64_t id, Time posted_at, std::uint32_t first_layer, std::uint32_t num_layers)
      : id_(id),
        posted_at_(posted_at),
        first_layer_(first_layer),
        arrived_(num_layers),
        watched_(num_layers) {}

  std::uint64_t id() const noexcept { return id_; }
  Time posted_at() const noexcept { return posted_at_; }
  Outcome outcome() const noexcept { return outcome_.load(std::memory_order_acquire); }
  Time first_piece_at() const noexcept { return first_piece_at_.load(std::memory_order_relaxed); }
  Time ended_at() const noexcept { return ended_at_.load(std::memory_order_relaxed); }
  Status status() const {
    return locked([&] { return status_; });
  }
  std::vector<std::uint32_t> failed_blocks() const {
    return locked([&] { return failed_blocks_; });
  }
  std::vector<std::string> rails() const {
    return locked([&] { return rails_; });
  }

  bool has_layer(std::uint32_t layer) const noexcept { return layer - first_layer_ < arrived_.size(); }
  bool layer_arrived(std::uint32_t layer) const {
    return locked([&] { return arrived_.at(layer - first_layer_) != 0; });
  }
  // True: it is in already. False: the engine will emit one event for it.
  bool watch_layer(std::uint32_t layer) {
    return locked([&] {
      if (arrived_.at(layer - first_layer_) != 0) return true;
      watched_[layer - first_layer_] = 1;
      return false;
    });
  }

  // The engine's side.
  void set_first_piece(Time now) noexcept {
    Time unset = 0;
    first_piece_at_.compare_exchange_strong(unset, now, std::memory_order_relaxed);
  }
  void add_rail(std::string_view name) {
    locked([&] {
      if (std::find(rails_.begin(), rails_.end(), name) == rails_.end()) rails_.emplace_back(name);
    });
  }
  // True where somebody watches it.
  bool set_layer(std::uint32_t layer) {
    return locked([&] {
      arrived_[layer - first_layer_] = 1;
      return watched_[layer - first_layer_] != 0;
    });
  }
  void end(Time now, Outcome outcome, Status status, std::vector<std::uint32_t> failed_blocks) {
    locked([&] {
      status_ = std::move(status);
      failed_blocks_ = std::move(failed_blocks);
    });
    ended_at_.store(now, std::memory_order_relaxed);
    outcome_.store(outcome, std::memory_order_release);
  }

 private:
  const std::uint64_t id_;
  const Time posted_at_;
  const std::uint32_t first_layer_;
  std::atomic<Outcome> outcome_{Outcome::kPending};
  std::atomic<Time> first_piece_at_{0};
  std::atomic<Time> ended_at_{0};
  mutable std::mutex mutex_;
  Status status_;
  std::vector<std::uint32_t> failed_blocks_;
  std::vector<std::string> rails_;
  std::vector<std::uint8_t> arrived_, watched_;
};

}  // namespace kvxfer
