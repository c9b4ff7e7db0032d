// A region's memory as a device or a library reaches it: spans, each with a key.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

namespace kvxfer {

// Bytes [offset, end) of a region, counted from its base. A device reaches them at `address` with `key`.
template <class Key>
struct KeyedSpanOf {
  std::uint64_t offset, end, address;
  Key key;

  bool contains(std::uint64_t at) const noexcept { return at - offset < end - offset; }  // wraps below offset
};

// Spans in ascending order that do not touch.
template <class Key>
class KeyedSpansOf {
 public:
  void push_back(const KeyedSpanOf<Key>& span) { spans_.push_back(span); }
  const std::vector<KeyedSpanOf<Key>>& all() const noexcept { return spans_; }
  // The span that holds this byte; null: none.
  const KeyedSpanOf<Key>* find(std::uint64_t offset) const noexcept {
    const auto after =
        std::upper_bound(spans_.begin(), spans_.end(), offset,
                         [](std::uint64_t at, const KeyedSpanOf<Key>& span) { return at < span.offset; });
    if (after == spans_.begin() || !std::prev(after)->contains(offset)) return nullptr;
    return &*std::prev(after);
  }

 private:
  std::vector<KeyedSpanOf<Key>> spans_;
};

}  // namespace kvxfer
