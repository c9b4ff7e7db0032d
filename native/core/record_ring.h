// The records of what ended last, and the descriptor that says that there are some, or that something else changed.
//
// Who ends a transfer holds the progress gate, who takes records does not: between them stands a lock of its own,
// which is held for as long as a few records take to be copied.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <span>

#include "core/record.h"
#include "core/system/fork_guard.h"
#include "kvxfer/status.h"

namespace kvxfer {

class RecordRing {
 public:
  static constexpr std::size_t kMostCapacity = 1 << 16;  // 24 MiB, of which only what was written is memory

  // Keeps so many, those that are there first, the newest of them. Returns the descriptor, which stays as long as the
  // ring does. With 0 nothing is to be pushed any more: what there is may still be taken.
  Result<int> resize(std::size_t capacity);
  // Has `fill` write the next record where it stays. The oldest gives way where there is no room.
  template <class Fill>
  void push(Fill&& fill) noexcept {
    const std::lock_guard lock(mutex_);
    if (capacity_ == 0) return;
    std::size_t place = first_ + size_;
    fill(records_[place < capacity_ ? place : place - capacity_]);
    if (size_ == capacity_) {
      first_ = first_ + 1 == capacity_ ? 0 : first_ + 1;
      num_dropped_.fetch_add(1, std::memory_order_relaxed);
    } else if (size_++ == 0 && !has_changed_) {
      signal();
    }
  }
  // Something of which there are no records has changed: a peer, a region, a lease. Whoever watches is woken, once
  // until it takes what there is.
  void note_change() noexcept;
  std::uint64_t num_changes() const noexcept { return num_changes_.load(std::memory_order_relaxed); }
  // The oldest, as many as there are and fit. Where that was all, the descriptor is readable no more.
  std::size_t take(std::span<Record> into) noexcept;
  std::size_t size() const noexcept;
  std::uint64_t num_dropped() const noexcept { return num_dropped_.load(std::memory_order_relaxed); }

 private:
  void copy_out(std::span<Record> into) noexcept;
  void signal() noexcept;
  void quiet() noexcept;
  mutable std::mutex mutex_;
  struct Free {
    void operator()(Record* records) const noexcept { std::free(records); }
  };
  std::unique_ptr<Record[], Free> records_;
  std::size_t capacity_ = 0, first_ = 0, size_ = 0;
  bool has_changed_ = false;  // since records were taken, and the descriptor says so
  std::atomic<std::uint64_t> num_dropped_{0}, num_changes_{0};
  GuardedFd fd_;  // once somebody watches
};

}  // namespace kvxfer
