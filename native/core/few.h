// A list of plain items, of which there are few: the first ones lie in the list itself, so that it allocates
// for more only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <type_traits>

namespace kvxfer {

template <class T, std::size_t kFew>
class Few {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Few() = default;
  Few(const Few&) = delete;
  Few& operator=(const Few&) = delete;

  T* begin() noexcept { return items_; }
  T* end() noexcept { return items_ + size_; }
  const T* begin() const noexcept { return items_; }
  const T* end() const noexcept { return items_ + size_; }
  T& operator[](std::size_t index) noexcept { return items_[index]; }
  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }

  void push_back(T item) {
    if (size_ == room_) grow(2 * room_);
    items_[size_++] = item;
  }
  void pop_back() noexcept { --size_; }
  void erase(T* from, T* to) noexcept {
    size_ = static_cast<std::size_t>(std::move(to, end(), from) - items_);
  }
  void erase(T* at) noexcept { erase(at, at + 1); }
  void clear() noexcept { size_ = 0; }
  void assign(std::size_t num, const T& item) {
    if (num > room_) grow(num);
    std::fill_n(items_, num, item);
    size_ = num;
  }

 private:
  [[gnu::noinline, gnu::cold]] void grow(std::size_t room) {
    auto larger = std::make_unique_for_overwrite<T[]>(room);
    std::copy_n(items_, size_, larger.get());
    more_ = std::move(larger);
    items_ = more_.get();
    room_ = room;
  }

  std::unique_ptr<T[]> more_;
  T* items_ = first_;
  std::size_t size_ = 0, room_ = kFew;
  T first_[kFew];
};

}  // namespace kvxfer
