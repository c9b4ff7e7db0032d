// Memory of a region as a device or a library reaches it: spans, each under a key.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

namespace kvxfer {

// Bytes [offset, end) of a region, from its base, which are reached at `address` under `key`.
template <class Key>
struct KeyedSpanOf {
  std::uint64_t offset, end, address;
  Key key;

  bool contains(std::uint64_t at) const noexcept { return at - offset < end - offset; }  // wraps below offset
};

// Ascending, apart from each other.
template <class Key>
class KeyedSpansOf {
 public:
  void push_back(const KeyedSpanOf<Key>& span) { spans_.push_back(span); }
  const std::vector<KeyedSpanOf<Key>>& all() const noexcept { return spans_; }
  // Null: no span has that byte.
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
