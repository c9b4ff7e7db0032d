// Transfers of one kind, sources or destinations. Finds them by key, by session, and by the regions that
// they are between, at the cost of what it finds.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/engine/transfer_end.h"
#include "core/linked_list.h"
#include "core/spare_nodes.h"

namespace kvxfer {

// The route of a transfer: its session, the region at this end, and the region at the other end.
struct TransferRoute {
  SessionKey session;
  RegionId local, remote;
  auto operator<=>(const TransferRoute&) const = default;
};

template <class End>
class TransferTable {
  using Ends = std::map<TransferKey, std::unique_ptr<End>>;
  using Routes = std::map<TransferRoute, LinkedList<TransferEnd>>;

 public:
  End* find(TransferKey key) const {
    const auto found = ends_.find(key);
    return found == ends_.end() ? nullptr : found->second.get();
  }
  bool contains(TransferKey key) const { return ends_.contains(key); }
  bool empty() const noexcept { return ends_.empty(); }
  std::size_t size() const noexcept { return ends_.size(); }
  auto begin() const { return ends_.begin(); }
  auto end() const { return ends_.end(); }
  // The first transfer after a key; the key need not exist.
  auto after(TransferKey key) const { return ends_.upper_bound(key); }

  // Adds it under its key; no other transfer has that key.
  End& add(std::unique_ptr<End> owned) {
    End& added = *owned;
    LinkedList<TransferEnd>& list = list_of(route_of(added));
    spare_.insert(ends_, added.key, std::move(owned));
    num_used_ += list.empty() ? 1 : 0;
    list.push_back(added);
    return added;
  }
  std::unique_ptr<End> take(TransferKey key) {
    const auto found = ends_.find(key);
    std::unique_ptr<End> taken = std::move(found->second);
    spare_.erase(ends_, found);
    LinkedList<TransferEnd>& list = routes_.find(route_of(*taken))->second;
    list.remove(*taken);
    num_used_ -= list.empty() ? 1 : 0;
    return taken;
  }

  std::vector<TransferKey> of_session(SessionKey session) const {
    std::vector<TransferKey> keys;
    for (auto each = ends_.lower_bound({session, 0}); each != ends_.end() && each->first.first == session;
         ++each)
      keys.push_back(each->first);
    return keys;
  }
  // Transfers of a region at this end.
  std::vector<TransferKey> of_region(RegionId local) const {
    std::vector<TransferKey> keys;
    for (const auto& [route, list] : routes_)
      if (route.local == local) append(keys, list);
    return keys;
  }
  // Transfers of a region of the peer's.
  std::vector<TransferKey> of_remote(SessionKey session, RegionId remote) const {
    std::vector<TransferKey> keys;
    for (const TransferRoute& route : routes(session))
      if (route.remote == remote) append(keys, routes_.at(route));
    return keys;
  }
  std::vector<TransferKey> of_route(const TransferRoute& route) const {
    std::vector<TransferKey> keys;
    append(keys, routes_.at(route));
    return keys;
  }
  // Routes of a session that have transfers, or had some.
  std::vector<TransferRoute> routes(SessionKey session) const {
    std::vector<TransferRoute> routes;
    for (auto each = routes_.lower_bound({session, 0, 0});
         each != routes_.end() && each->first.session == session; ++each)
      routes.push_back(each->first);
    return routes;
  }

 private:
  static TransferRoute route_of(const TransferEnd& end) {
    return {end.key.first, end.region, end.remote_region()};
  }
  static void append(std::vector<TransferKey>& keys, const LinkedList<TransferEnd>& list) {
    for (const TransferEnd* each = list.first(); each != nullptr;
         each = LinkedList<TransferEnd>::after(*each))
      keys.push_back(each->key);
  }

  // A route stays when its last transfer ends, since mostly another follows. There are at most as many
  // unused routes as used ones, and a few more.
  LinkedList<TransferEnd>& list_of(const TransferRoute& route) {
    if (const auto found = routes_.find(route); found != routes_.end()) return found->second;
    if (routes_.size() >= 2 * num_used_ + kFewRoutes)
      std::erase_if(routes_, [](const auto& each) { return each.second.empty(); });
    return routes_[route];
  }

  static constexpr std::size_t kFewRoutes = 64;
  Ends ends_;
  SpareNodes<Ends> spare_;
  Routes routes_;
  std::size_t num_used_ = 0;  // the number of used routes
};

}  // namespace kvxfer
