// Counts what one peer, or all strangers together, make an agent hold, from the moment an amount is taken to
// the moment it is given back. The limits stand in core/budgets.h. A peer that asks for more is refused, or
// its session ends, with the reason in words; no other peer notices.
//
// A session has one budget, and its rails charge the same one (ConnectInfo::budget). Amounts are taken under
// the progress gate alone. Any thread may read a budget or give an amount back, since callers take events
// without the gate.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace kvxfer {

enum class Resource : std::uint8_t {
  kBytes,  // of our memory: programs, tables, frames that the peer does not read
  kMapped,  // bytes of the peer's memory in our address space
  kDescriptors,  // sockets, and descriptors that the peer passed
  kFenceSlots,  // of the fence table
  kEvents,  // that wait for our caller: regions and notifications
  kMessages,  // bytes of messages that wait for our caller, as core/control/wire.h counts them
};
inline constexpr std::size_t kNumResources = 6;

inline std::string_view name_of(Resource resource) noexcept {
  constexpr std::array<std::string_view, kNumResources> names = {
      "bytes", "mapped bytes", "descriptors", "fence slots", "events", "message bytes"};
  return names[static_cast<std::size_t>(resource)];
}

class Budget {
 public:
  using Amounts = std::array<std::uint64_t, kNumResources>;
  explicit Budget(const Amounts& limits) noexcept : limits_(limits) {}
  Budget(const Budget& other) noexcept : limits_(other.limits_) {  // a snapshot of its counts
    for (std::size_t i = 0; i < kNumResources; ++i) used_[i] = other.used(static_cast<Resource>(i));
  }
  Budget& operator=(const Budget&) = delete;

  // Returns false, and takes nothing, if the total would exceed the limit.
  [[nodiscard]] bool take(Resource resource, std::uint64_t amount) noexcept {
    std::atomic<std::uint64_t>& used = used_[index(resource)];
    const std::uint64_t limit = limits_[index(resource)];
    if (amount > limit || used.load(std::memory_order_relaxed) > limit - amount) return false;
    used.fetch_add(amount, std::memory_order_relaxed);
    return true;
  }
  void give_back(Resource resource, std::uint64_t amount) noexcept {
    used_[index(resource)].fetch_sub(amount, std::memory_order_relaxed);
  }

  std::uint64_t used(Resource resource) const noexcept {
    return used_[index(resource)].load(std::memory_order_relaxed);
  }
  std::uint64_t limit(Resource resource) const noexcept { return limits_[index(resource)]; }
  // "it may hold 64 descriptors here, and holds 64"
  std::string in_words(Resource resource) const {
    return "it may hold " + std::to_string(limit(resource)) + " " + std::string(name_of(resource)) +
           " here, and holds " + std::to_string(used(resource));
  }

 private:
  static std::size_t index(Resource resource) noexcept { return static_cast<std::size_t>(resource); }
  Amounts limits_;
  std::array<std::atomic<std::uint64_t>, kNumResources> used_{};
};

// An amount taken from a budget, given back when this ends.
class Charge {
 public:
  Charge() = default;
  // Empty if the budget has no room. A null budget (tests, loopback) has room for everything.
  static Charge take(std::shared_ptr<Budget> budget, Resource resource, std::uint64_t amount) {
    Charge charge;
    if (budget != nullptr && !budget->take(resource, amount)) return charge;
    charge.budget_ = std::move(budget);
    charge.resource_ = resource;
    charge.amount_ = amount;
    charge.held_ = true;
    return charge;
  }
  Charge(Charge&& other) noexcept { *this = std::move(other); }
  Charge& operator=(Charge&& other) noexcept {
    if (this == &other) return *this;
    release();
    budget_ = std::move(other.budget_);
    resource_ = other.resource_;
    amount_ = other.amount_;
    held_ = std::exchange(other.held_, false);
    return *this;
  }
  ~Charge() { release(); }
  explicit operator bool() const noexcept { return held_; }
  void release() noexcept {
    if (std::exchange(held_, false) && budget_ != nullptr) budget_->give_back(resource_, amount_);
    budget_.reset();
  }

 private:
  std::shared_ptr<Budget> budget_;
  Resource resource_ = Resource::kBytes;
  std::uint64_t amount_ = 0;
  bool held_ = false;
};

}  // namespace kvxfer
