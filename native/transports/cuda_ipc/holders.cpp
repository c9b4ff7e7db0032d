#include "transports/cuda_ipc/holders.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace kvxfer::cuda_ipc {
namespace {

constexpr std::size_t kMaxPartings = 64;  // a descriptor each; bounds peers that come and never unmap

}  // namespace

struct Holders::Parting final : Reactor::Handler {
  Parting(Holders& holders, std::string peer_name, GuardedFd ending, std::set<MemoryId> memories)
      : owner(holders), name(std::move(peer_name)), socket(std::move(ending)), held(std::move(memories)) {}
  void on_ready(std::uint32_t) override {
    std::array<std::byte, 4096> unread;  // the kernel closes descriptors in it
    const ssize_t received = ::recv(socket.get(), unread.data(), unread.size(), MSG_DONTWAIT);
    if (received > 0 || (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))) return;
    held.clear();
    owner.forget_partings();
  }

  Holders& owner;
  const std::string name;
  const GuardedFd socket;
  std::set<MemoryId> held;
};

Holders::Holders(Reactor& reactor) : reactor_(reactor) {}

Holders::~Holders() {
  for (const Parting& parting : partings_) reactor_.remove(parting.socket.get());
}

void Holders::may_hold(PeerId peer, MemoryId memory) { held_[peer].insert(memory); }

void Holders::wait_for(Exports::Regions::node_type region) noexcept {
  leaving_.insert(std::move(region));
  forget_unheld();
}

bool Holders::unmapped(PeerId peer, MemoryId memory) {
  const auto held = held_.find(peer);
  if (held == held_.end() || !any_leaves({memory}, kEveryRegion) || held->second.erase(memory) == 0)
    return false;
  forget_unheld();
  return true;
}

void Holders::part(PeerId peer, std::string name, GuardedFd socket) {
  std::set<MemoryId> held;
  if (auto its = held_.extract(peer)) held = std::move(its.mapped());
  ::shutdown(socket.get(), SHUT_WR);
  Parting& parting = partings_.emplace_back(*this, std::move(name), std::move(socket), std::move(held));
  static_cast<void>(reactor_.add(parting.socket.get(), EPOLLIN, parting));  // if it fails, given up later
  if (partings_.size() > kMaxPartings) partings_.front().held.clear();
  forget_partings();
}

void Holders::forget(PeerId peer) noexcept {
  held_.erase(peer);
  forget_unheld();
}

bool Holders::hold(RegionId region) const noexcept {
  return region == kEveryRegion ? !leaving_.empty() || !partings_.empty() : leaving_.contains(region);
}

bool Holders::holds(PeerId peer, RegionId region) const noexcept {
  const auto held = held_.find(peer);
  return held != held_.end() && any_leaves(held->second, region);
}

std::vector<std::string> Holders::give_up_parted(RegionId region) {
  std::vector<std::string> names;
  for (Parting& parting : partings_) {
    if (region == kEveryRegion ? parting.held.empty() : !any_leaves(parting.held, region)) continue;
    names.push_back(parting.name);
    parting.held.clear();  // we no longer wait for its other mappings, either
  }
  forget_partings();
  return names;
}

bool Holders::is_held(MemoryId memory) const noexcept {
  return std::any_of(held_.begin(), held_.end(),
                     [memory](const auto& held) { return held.second.contains(memory); }) ||
         std::any_of(partings_.begin(), partings_.end(),
                     [memory](const Parting& parting) { return parting.held.contains(memory); });
}

bool Holders::any_leaves(const std::set<MemoryId>& held, RegionId region) const noexcept {
  return std::any_of(leaving_.begin(), leaving_.end(), [&](const auto& leaving) {
    return (region == kEveryRegion || region == leaving.first) &&
           std::any_of(leaving.second.begin(), leaving.second.end(),
                       [&](MemoryId id) { return held.contains(id); });
  });
}

void Holders::forget_unheld() noexcept {
  for (auto& [region, memories] : leaving_)
    std::erase_if(memories, [this](MemoryId id) { return !is_held(id); });
  std::erase_if(leaving_, [](const auto& entry) { return entry.second.empty(); });
}

void Holders::forget_partings() {
  for (const Parting& parting : partings_)
    if (parting.held.empty()) reactor_.remove(parting.socket.get());
  std::erase_if(partings_, [](const Parting& parting) { return parting.held.empty(); });
  forget_unheld();
}

}  // namespace kvxfer::cuda_ipc
