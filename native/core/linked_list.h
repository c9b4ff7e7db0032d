// A list whose links lie in its entries. An entry is added, and removed from any place, without taking
// memory. A type that is in two lists at a time derives from two links.
#pragma once

#include <cstddef>

namespace kvxfer {

template <class Entry>
class LinkedList;

template <class Entry>
class Linked {
 protected:
  Linked() = default;
  ~Linked() = default;
  Linked(const Linked&) = delete;
  Linked& operator=(const Linked&) = delete;

 private:
  friend class LinkedList<Entry>;
  Entry *before_ = nullptr, *after_ = nullptr;
};

template <class Entry>
class LinkedList {
 public:
  bool empty() const noexcept { return first_ == nullptr; }
  Entry* first() const noexcept { return first_; }
  static Entry* after(const Entry& entry) noexcept { return link(entry).after_; }

  void push_back(Entry& entry) noexcept {
    link(entry).before_ = last_;
    link(entry).after_ = nullptr;
    (last_ == nullptr ? first_ : link(*last_).after_) = &entry;
    last_ = &entry;
  }
  // Removes an entry that is in this list.
  void remove(Entry& entry) noexcept {
    Entry *const before = link(entry).before_, *const after = link(entry).after_;
    (before == nullptr ? first_ : link(*before).after_) = after;
    (after == nullptr ? last_ : link(*after).before_) = before;
  }

 private:
  static Linked<Entry>& link(Entry& entry) noexcept { return entry; }
  static const Linked<Entry>& link(const Entry& entry) noexcept { return entry; }
  Entry *first_ = nullptr, *last_ = nullptr;
};

}  // namespace kvxfer
