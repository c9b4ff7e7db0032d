// What a caller sees of one end of a transfer, or of an expectation. The engine writes it under
// the progress gate, callers read it from any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/commands/stream_wait.h"
#include "core/control/session.h"
#include "core/outcome.h"
#include "core/system/nvtx.h"
#include "kvxfer/status.h"

namespace kvxfer {

class Handle {
  // Deduced return types must be known before their use below.
  template <class F>
  auto locked(F&& f) const {
    const std::lock_guard lock(mutex_);
    return f();
  }

 public:
  // `first_layer` and `num_layers`: the layers whose arrival a caller can ask for.
  Handle(std::uint64_t id, Time posted_at, std::uint32_t first_layer, std::uint32_t num_layers,
         wire::Bytes context = {})
      : id_(id),
        has_own_context_(!context.empty()),
        posted_at_(posted_at),
        first_layer_(first_layer),
        context_(std::move(context)),
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
  // Whose request it is: as its own caller says, else as the other end said last.
  wire::Bytes context() const {
    return locked([&] { return context_; });
  }
  bool has_own_context() const noexcept { return has_own_context_; }
  std::vector<std::uint32_t> failed_blocks() const {
    return locked([&] { return failed_blocks_; });
  }
  std::vector<std::string> rails() const {
    return locked([&] { return rails_; });
  }
  // Calls f(context, rails), and copies neither.
  template <class F>
  void read(F&& f) const {
    locked([&] { f(context_, rails_); });
  }

  bool has_layer(std::uint32_t layer) const noexcept { return layer - first_layer_ < arrived_.size(); }
  bool layer_arrived(std::uint32_t layer) const {
    return locked([&] { return arrived_.at(layer - first_layer_) != 0; });
  }
  // True: the layer has arrived already. False: the engine will emit one event for it.
  bool watch_layer(std::uint32_t layer) {
    return locked([&] {
      if (arrived_.at(layer - first_layer_) != 0) return true;
      watched_[layer - first_layer_] = 1;
      return false;
    });
  }

  // Ends a stream's wait when the handle has ended, or when a layer has arrived; at once if that has
  // happened already.
  void add_wait(std::shared_ptr<StreamWait> wait, std::optional<std::uint32_t> layer) {
    locked([&] {
      if (layer && arrived_.at(*layer - first_layer_) != 0)
        wait->end(Outcome::kDone);
      else if (let_go_ != Outcome::kPending)
        wait->end(let_go_);
      else
        waits_.push_back({std::move(wait), layer});
    });
  }

  // The engine's side.
  // For a handle that will end in this way. Streams go on before its fence: the fence waits for work of
  // the device, and those streams may hold up the device.
  void release_streams(Outcome outcome) {
    locked([&] { go_on(outcome); });
  }
  void set_other_context(const wire::Bytes& context) {
    if (!has_own_context_) locked([&] { context_ = context; });
  }
  void set_first_piece(Time now) noexcept {
    Time unset = 0;
    first_piece_at_.compare_exchange_strong(unset, now, std::memory_order_relaxed);
  }
  void add_rail(std::string_view name) {
    locked([&] {
      if (std::find(rails_.begin(), rails_.end(), name) == rails_.end()) rails_.emplace_back(name);
    });
  }
  // True if a caller watches the layer.
  bool set_layer(std::uint32_t layer) {
    return locked([&] {
      arrived_[layer - first_layer_] = 1;
      std::erase_if(waits_, [layer](const Waiting& waiting) {
        if (waiting.layer != layer) return false;
        waiting.wait->end(Outcome::kDone);
        return true;
      });
      return watched_[layer - first_layer_] != 0;
    });
  }
  void end(Time now, Outcome outcome, Status status, std::vector<std::uint32_t> failed_blocks) {
    locked([&] {
      status_ = std::move(status);
      failed_blocks_ = std::move(failed_blocks);
      ended_at_.store(now, std::memory_order_relaxed);
      outcome_.store(outcome, std::memory_order_release);
      go_on(outcome);
    });
    range_.end();
  }

 private:
  void go_on(Outcome outcome) {  // wakes streams that wait; call it locked
    if (let_go_ != Outcome::kPending) return;
    let_go_ = outcome;
    for (const Waiting& waiting : waits_) waiting.wait->end(outcome);
    waits_.clear();
  }

  const std::uint64_t id_;
  const bool has_own_context_;
  const Time posted_at_;
  const std::uint32_t first_layer_;
  std::atomic<Outcome> outcome_{Outcome::kPending};
  std::atomic<Time> first_piece_at_{0};
  std::atomic<Time> ended_at_{0};
  mutable std::mutex mutex_;
  Status status_;
  wire::Bytes context_;
  std::vector<std::uint32_t> failed_blocks_;
  std::vector<std::string> rails_;
  std::vector<std::uint8_t> arrived_, watched_;
  struct Waiting {
    std::shared_ptr<StreamWait> wait;
    std::optional<std::uint32_t> layer;  // none: for the end
  };
  std::vector<Waiting> waits_;
  Outcome let_go_ = Outcome::kPending;  // the outcome with which streams went on
  nvtx::Range range_{"transfer", id_};
};

}  // namespace kvxfer
