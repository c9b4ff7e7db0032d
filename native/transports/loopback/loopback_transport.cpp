#include "transports/loopback/loopback_transport.h"

#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "core/executor.h"
#include "core/pack.h"
#include "transports/common/peer_fences.h"

namespace kvxfer {
namespace {

constexpr std::uint64_t kPollNbytes = 1024 * 1024;

// What each end says once. It names the sender's exposure, which only code of the same process
// can look up; the token proves that this is one process, and one copy of this library in it.
struct Hello {
  std::array<char, 8> magic{'k', 'v', 'x', 'l', 'o', 'o', 'p', '1'};
  std::array<std::byte, 16> process{};
  std::uint64_t exposure = 0;
};
static_assert(sizeof(Hello) == 32);

const std::array<std::byte, 16>& process_token() {
  static const auto token = [] {
    std::array<std::byte, 16> bytes{};
    static_cast<void>(::getrandom(bytes.data(), bytes.size(), 0));  // 16 bytes are never cut short
    return bytes;
  }();
  return token;
}

}  // namespace

// Peers hold it shared while they read a piece; the owner takes it alone to withdraw something.
// So memory may be unmapped when deregister_memory has returned: nobody is reading it.
struct LoopbackTransport::Exposure {
  struct Reachable {
    const std::byte* base;
    std::uint64_t end;
  };

  std::uint64_t number = 0;
  std::shared_mutex mutex;
  std::unordered_map<RegionId, Reachable> regions;
  const FenceTable* fences = nullptr;  // null once the owner is gone

  // Every exposure of this process, by number.
  struct Directory {
    std::mutex mutex;
    std::unordered_map<std::uint64_t, std::weak_ptr<Exposure>> exposures;
    std::uint64_t next_number = 1;
  };
  static Directory& directory() {
    static auto* const the_directory = new Directory();  // outlives every agent
    return *the_directory;
  }

  static std::shared_ptr<Exposure> open(const FenceTable& fences) {
    auto exposure = std::make_shared<Exposure>();
    exposure->fences = &fences;
    Directory& all = directory();
    const std::lock_guard lock(all.mutex);
    exposure->number = all.next_number++;
    all.exposures[exposure->number] = exposure;
    return exposure;
  }
  static std::shared_ptr<Exposure> find(std::uint64_t number) {
    Directory& all = directory();
    const std::lock_guard lock(all.mutex);
    const auto found = all.exposures.find(number);
    return found == all.exposures.end() ? nullptr : found->second.lock();
  }
  void close() {
    {
      Directory& all = directory();
      const std::lock_guard lock(all.mutex);
      all.exposures.erase(number);
    }
    const std::unique_lock lock(mutex);
    regions.clear();
    fences = nullptr;
  }
};

struct LoopbackTransport::Peer final : Reactor::Handler {
  Peer(LoopbackTransport& transport, PeerId number, UniqueFd fd, std::string peer_name)
      : owner(transport), id(number), socket(std::move(fd)), name(std::move(peer_name)) {}
  void on_ready(std::uint32_t) override { owner.on_ready(*this); }

  LoopbackTransport& owner;
  const PeerId id;
  UniqueFd socket;  // closed when the rail is down
  const std::string name;
  Hello hello;  // the peer's, as far as it has arrived
  std::size_t hello_nbytes = 0;
  std::shared_ptr<Exposure> exposure;  // set when the rail is up
  std::unordered_map<RegionId, std::uint64_t> attached;  // -> end of its bytes
  WorkQueue queue;
};

LoopbackTransport::LoopbackTransport(Reactor& reactor, const FenceTable& fences)
    : reactor_(reactor), exposure_(Exposure::open(fences)) {}

LoopbackTransport::~LoopbackTransport() {
  exposure_->close();
  for (auto& [id, peer] : peers_)
    if (peer->socket) reactor_.remove(peer->socket.get());
}

Capabilities LoopbackTransport::capabilities() const noexcept {
  // Rank 0: nothing beats a copy within one address space.
  return {.name = "loopback", .one_sided = true, .fence = FenceGrain::kWork, .rank = 0};
}

// ---- memory ----

Result<RegionKeys> LoopbackTransport::register_memory(const LocalRegion& region) {
  const std::unique_lock lock(exposure_->mutex);
  exposure_->regions[region.id] = {region.base, end_of(region.spans)};
  // The region's id is all that a peer needs; its address lets attach() notice a mix-up.
  const auto address = reinterpret_cast<std::uintptr_t>(region.base);
  RegionKeys keys(sizeof address);
  std::memcpy(keys.data(), &address, sizeof address);
  return keys;
}

void LoopbackTransport::deregister_memory(RegionId region) noexcept {
  const std::unique_lock lock(exposure_->mutex);
  exposure_->regions.erase(region);
}

Status LoopbackTransport::attach(PeerId peer_id, const RemoteRegion& region) {
  const auto found = peers_.find(peer_id);
  if (found == peers_.end() || found->second->exposure == nullptr)
    return {Code::kRailFailed, "loopback: not connected to this peer"};
  Peer& peer = *found->second;

  const std::shared_lock lock(peer.exposure->mutex);
  const auto exposed = peer.exposure->regions.find(region.id);
  if (exposed == peer.exposure->regions.end())
    return {Code::kUnsupported, "loopback: " + peer.name + " has not registered this region here"};
  const auto address = reinterpret_cast<std::uintptr_t>(exposed->second.base);
  if (region.keys.size() != sizeof address || std::memcmp(region.keys.data(), &address, sizeof address) != 0)
    return {Code::kUnsupported, "loopback: the region's keys are not those that " + peer.name + " gave out"};
  const std::uint64_t end = end_of(region.spans);
  if (end > exposed->second.end)
    return {Code::kUnsupported, "loopback: the region ends at " + std::to_string(end) + ", but " + peer.name +
                                    " registered " + std::to_string(exposed->second.end) + " bytes"};
  peer.attached[region.id] = end;
  return {};
}

void LoopbackTransport::detach(PeerId peer, RegionId region) noexcept {
  const auto found = peers_.find(peer);
  if (found != peers_.end()) found->second->attached.erase(region);
}

// ---- peers ----

Result<PeerId> LoopbackTransport::connect(UniqueFd socket, const ConnectInfo& info) {
  const PeerId id = next_peer_++;
  Peer& peer = *(peers_[id] = std::make_unique<Peer>(*this, id, std::move(socket), info.peer_name));
  if (Status added = reactor_.add(peer.socket.get(), EPOLLIN, peer); !added.ok()) {
    peers_.erase(id);
    return added;
  }
  Hello hello;
  hello.process = process_token();
  hello.exposure = exposure_->number;
  // 32 bytes fit the buffer of a socket that has carried nothing but its handshake.
  if (::send(peer.socket.get(), &hello, sizeof hello, MSG_DONTWAIT | MSG_NOSIGNAL) != sizeof hello)
    fail(peer, "its socket does not take the hello");
  return id;
}

void LoopbackTransport::on_ready(Peer& peer) {
  std::array<std::byte, sizeof(Hello)> bytes;
  const ssize_t received = ::recv(peer.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (received < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (received < 0) return fail(peer, Status::from_errno("recv", errno).message());
  if (received == 0) return fail(peer, "it closed its end");

  const auto nbytes = static_cast<std::size_t>(received);
  if (nbytes > sizeof(Hello) - peer.hello_nbytes) return fail(peer, "it sent more than a hello");
  std::memcpy(reinterpret_cast<std::byte*>(&peer.hello) + peer.hello_nbytes, bytes.data(), nbytes);
  peer.hello_nbytes += nbytes;
  if (peer.hello_nbytes < sizeof(Hello)) return;

  if (peer.hello.magic != Hello().magic) return fail(peer, "its hello is not of this transport's version");
  if (peer.hello.process != process_token())
    return fail(peer, "it is in another process, or uses another copy of this library");
  peer.exposure = Exposure::find(peer.hello.exposure);
  if (peer.exposure == nullptr) return fail(peer, "it is closed");
  ready_.rail_up(peer.id);
}

void LoopbackTransport::fail(Peer& peer, const std::string& why) {
  reactor_.remove(peer.socket.get());
  peer.socket.reset();
  peer.exposure.reset();
  const std::string detail = "loopback: the rail to " + peer.name + " is down: " + why;
  peer.queue.end(Code::kRailFailed, detail, ready_);
  ready_.rail_down(peer.id, detail);
}

void LoopbackTransport::disconnect(PeerId id) noexcept {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  Peer& peer = *found->second;
  if (peer.socket) reactor_.remove(peer.socket.get());
  ready_.forget_rail(id);
  peer.queue.end(Code::kCancelled, {}, ready_);
  peers_.erase(found);
}

// ---- work ----

PostResult LoopbackTransport::post(PeerId id, std::span<const Work> batch) noexcept {
  const auto found = peers_.find(id);
  if (found == peers_.end() || !found->second->socket) return {0, Code::kRailFailed};
  Peer& peer = *found->second;
  if (peer.exposure == nullptr) return {0, Code::kAgain};  // not up yet
  return peer.queue.post(batch);
}

// Work only moves inside poll, so what is still queued has not begun and what is not has ended.
void LoopbackTransport::cancel(WorkId id) noexcept {
  for (auto& [peer_id, peer] : peers_)
    if (peer->queue.withdraw(id)) return ready_.work(id, Code::kCancelled);
}

std::size_t LoopbackTransport::poll(std::span<Completion> completions) noexcept {
  std::size_t count = ready_.take(completions);
  std::uint64_t moved_nbytes = 0;
  while (count < completions.size() && moved_nbytes < kPollNbytes) {
    const auto turn =
        next_in_turn(peers_, last_served_, [](const auto& entry) { return !entry.second->queue.empty(); });
    if (turn == peers_.end()) break;
    last_served_ = turn->first;
    Peer& peer = *turn->second;
    completions[count++] = run(peer, peer.queue.take(), moved_nbytes);
  }
  return count;
}

bool LoopbackTransport::busy() const noexcept {
  return !ready_.empty() || std::any_of(peers_.begin(), peers_.end(),
                                        [](const auto& entry) { return !entry.second->queue.empty(); });
}

Completion LoopbackTransport::run(Peer& peer, const Work& work, std::uint64_t& moved_nbytes) noexcept {
  switch (work.kind) {
    case WorkKind::kFetch: return fetch(peer, work, moved_nbytes);
    case WorkKind::kCheckFence: return check_fence(peer, work);
    case WorkKind::kSend:
    case WorkKind::kReceive: break;
  }
  return failed(work.id, Code::kUnsupported, "loopback: the destination fetches; nothing is sent");
}

Completion LoopbackTransport::fetch(Peer& peer, const Work& work, std::uint64_t& moved_nbytes) noexcept {
  const Move& move = *work.move;
  const auto attached = peer.attached.find(move.remote_region);
  const std::shared_lock reading(peer.exposure->mutex);
  const auto exposed = peer.exposure->regions.find(move.remote_region);
  if (attached == peer.attached.end() || exposed == peer.exposure->regions.end())
    return failed(work.id, Code::kRegionGone, "loopback: " + peer.name + " deregistered the region");
  if (piece_end(move, work.piece, Side::kSrc) > attached->second)
    return failed(work.id, Code::kInternal, "loopback: the piece ends outside the region of " + peer.name);
  copy_piece(move, work.piece, exposed->second.base, move.local_base);
  moved_nbytes += piece_nbytes(*move.program, move.grid.piece(work.piece));
  return done(work.id);
}

Completion LoopbackTransport::check_fence(Peer& peer, const Work& work) noexcept {
  const std::shared_lock reading(peer.exposure->mutex);
  if (peer.exposure->fences == nullptr)
    return failed(work.id, Code::kRailFailed, "loopback: " + peer.name + " is closed");
  return kvxfer::check_fence(peer.exposure->fences->words(), work, "loopback", peer.name);
}

}  // namespace kvxfer
