#include "core/record_ring.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace kvxfer {
namespace {

// Records that are copied in one hold of the lock: 12 KiB, about a microsecond.
constexpr std::size_t kOfAHold = 32;

// Less than 2 KiB: from there on the C library may copy with one instruction that counts as many.
constexpr std::size_t kOfACopy = 5;

}  // namespace

Result<int> RecordRing::resize(std::size_t capacity) {
  if (capacity > kMostCapacity)
    return Status(Code::kInvalidArgument, "up to " + std::to_string(kMostCapacity) +
                                              " records are kept, not " + std::to_string(capacity));
  // All zero, by the kernel when a page is first written: records leave the process, with whatever bytes
  // were there.
  decltype(records_) records(
      static_cast<Record*>(std::calloc(std::max<std::size_t>(capacity, 1), sizeof(Record))));
  if (records == nullptr)
    return Status(Code::kExhausted, "there is no memory for " + std::to_string(capacity) + " records");
  const std::lock_guard lock(mutex_);
  if (!fd_) {
    UniqueFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!fd) return Status(Code::kSystem, "eventfd: " + words_of(errno));
    fd_ = GuardedFd(std::move(fd));
  }
  if (capacity == 0 || capacity == capacity_) return fd_.get();
  const std::size_t num_lost = size_ - std::min(size_, capacity);
  first_ = capacity_ == 0 ? 0 : (first_ + num_lost) % capacity_;
  size_ -= num_lost;
  num_dropped_.fetch_add(num_lost, std::memory_order_relaxed);
  copy_out({records.get(), size_});
  std::swap(records_, records);
  capacity_ = capacity;
  first_ = 0;
  return fd_.get();
}

void RecordRing::copy_out(std::span<Record> into) noexcept {
  for (std::size_t done = 0, place = first_; done != into.size();) {
    const std::size_t num = std::min({into.size() - done, capacity_ - place, kOfACopy});
    std::memcpy(&into[done], &records_[place], num * sizeof(Record));
    done += num;
    place = place + num == capacity_ ? 0 : place + num;
  }
}

std::size_t RecordRing::take(std::span<Record> into) noexcept {
  std::size_t num_taken = 0;
  do {
    const std::lock_guard lock(mutex_);
    const std::size_t num = std::min({into.size() - num_taken, size_, kOfAHold});
    if (num != 0) {
      copy_out(into.subspan(num_taken, num));
      num_taken += num;
      first_ = first_ + num < capacity_ ? first_ + num : first_ + num - capacity_;
      size_ -= num;
    }
    if (size_ != 0) continue;
    if (num != 0 || has_changed_) quiet();
    break;
  } while (num_taken != into.size());
  return num_taken;
}

void RecordRing::note_change() noexcept {
  num_changes_.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  if (capacity_ == 0 || has_changed_) return;
  has_changed_ = true;
  if (size_ == 0) signal();
}

std::size_t RecordRing::size() const noexcept {
  const std::lock_guard lock(mutex_);
  return size_;
}

void RecordRing::quiet() noexcept {
  has_changed_ = false;
  std::uint64_t count;
  [[maybe_unused]] const ssize_t done = ::read(fd_.get(), &count, sizeof count);
}

void RecordRing::signal() noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t done = ::write(fd_.get(), &one, sizeof one);
}

}  // namespace kvxfer
