// Nodes that were erased from a map or set and wait for the next entry: entries that come and go with every
// transfer then take no new memory.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "core/in_room.h"

namespace kvxfer {

template <class Container>
class SpareNodes {
 public:
  SpareNodes() { nodes_.reserve(kMost); }

  void erase(Container& from, typename Container::const_iterator entry) {
    if (nodes_.size() == kMost)
      from.erase(entry);
    else
      add_in_room(nodes_, from.extract(entry));
  }

  // What the container's insert of a node returns.
  auto insert(Container& into, typename Container::key_type key, auto... mapped) {
    static_assert(sizeof...(mapped) <= 1, "a set has keys alone, a map one value for each");
    typename Container::node_type node;
    if (nodes_.empty()) {
      Container one;
      one.emplace(std::move(key), std::move(mapped)...);
      node = one.extract(one.begin());
    } else {
      node = std::move(nodes_.back());
      nodes_.pop_back();
      if constexpr (sizeof...(mapped) == 0)
        node.value() = std::move(key);
      else
        node.key() = std::move(key), ((node.mapped() = std::move(mapped)), ...);
    }
    return into.insert(std::move(node));
  }

 private:
  static constexpr std::size_t kMost = 128;
  std::vector<typename Container::node_type> nodes_;
};

}  // namespace kvxfer
