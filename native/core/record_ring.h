// The records of what ended last, and the descriptor that announces records, or another change.
//
// The thread that ends a transfer holds the progress gate; the thread that takes records does not. Between
// them is a lock of its own, held only for as long as copying a few records takes.
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

  // Keeps at most `capacity` records, present ones first, the newest of them. Returns the descriptor,
  // which lives as long as the ring. With 0 no more are pushed; present ones may still be taken.
  Result<int> resize(std::size_t capacity);
  // Lets `fill` write the next record in place. Without room the oldest record gives way.
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
  // Something without records has changed: a peer, a region, a lease. The watcher is woken once, until it
  // takes the records that are there.
  void note_change() noexcept;
  std::uint64_t num_changes() const noexcept { return num_changes_.load(std::memory_order_relaxed); }
  // Takes the oldest records, as many as there are and fit. If none is left, the descriptor is readable no
  // more.
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
  bool has_changed_ = false;  // since records were last taken, and the descriptor shows it
  std::atomic<std::uint64_t> num_dropped_{0}, num_changes_{0};
  GuardedFd fd_;  // made when the first watcher comes
};

}  // namespace kvxfer
