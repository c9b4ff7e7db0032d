#include "toy_transport/toy_transport.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

#include "core/executor.h"
#include "core/pack.h"

namespace kvxfer::toy {
namespace {

constexpr std::uint64_t kPollNbytes = 1024 * 1024;
constexpr std::size_t kMostQueued = 1024;  // works of a peer: the engine posts `window` at a time

// The device that all instances share.
struct Nic {
  std::mutex mutex;  // held while bytes are read: what is unpinned is not read any more
  std::map<std::uint64_t, std::pair<const std::byte*, std::uint64_t>> pinned;  // key -> base and end
  std::map<std::uint64_t, const FenceTable*> endpoints;
  std::uint64_t next = 1;
};
Nic& nic() {
  static Nic the_nic;
  return the_nic;
}

std::uint64_t open_endpoint(const FenceTable& fences) {
  const std::lock_guard lock(nic().mutex);
  nic().endpoints[nic().next] = &fences;
  return nic().next++;
}

}  // namespace

std::function<Status(const LocalRegion&)>& before_pin() {
  static std::function<Status(const LocalRegion&)> hook;
  return hook;
}

std::size_t num_pinned() {
  const std::lock_guard lock(nic().mutex);
  return nic().pinned.size();
}

struct Pin {
  explicit Pin(const LocalRegion& region) {
    const std::lock_guard lock(nic().mutex);
    key = nic().next++;
    nic().pinned[key] = {region.base, end_of(region.spans)};
  }
  ~Pin() {
    const std::lock_guard lock(nic().mutex);
    nic().pinned.erase(key);
  }
  std::uint64_t key = 0;
};

struct ToyTransport::Peer final : Reactor::Handler {
  Peer(ToyTransport& transport, PeerId number, UniqueFd fd, std::string peer_name)
      : owner(transport), id(number), socket(std::move(fd)), name(std::move(peer_name)) {}
  void on_ready(std::uint32_t) override { owner.on_ready(*this); }

  ToyTransport& owner;
  const PeerId id;
  UniqueFd socket;  // closed when the rail is down
  const std::string name;
  std::uint64_t endpoint = 0;  // the peer's, once the rail is up
  std::map<RegionId, std::uint64_t> keys;
  std::deque<Work> queue;

  void end_works(Code code, const std::string& detail) {
    for (const Work& work : queue) owner.ready_.work(work.id, code, detail);
    queue.clear();
  }
};

ToyTransport::ToyTransport(Reactor& reactor, const FenceTable& fences, bool pins)
    : reactor_(reactor), pins_(pins), endpoint_(open_endpoint(fences)) {}

ToyTransport::~ToyTransport() {
  for (auto& [id, peer] : peers_)
    if (peer->socket) reactor_.remove(peer->socket.get());
  const std::lock_guard lock(nic().mutex);
  nic().endpoints.erase(endpoint_);
}

Capabilities ToyTransport::capabilities() const noexcept {
  return {.name = "toy", .one_sided = true, .rank = 1};
}

// ---- memory ----

Result<Pinned> ToyTransport::prepare(const LocalRegion& region) {
  if (before_pin()) {
    if (Status status = before_pin()(region); !status.ok()) return status;
  }
  return Pinned(std::make_shared<const Pin>(region));
}

Result<RegionKeys> ToyTransport::register_memory(const LocalRegion& region) {
  return register_memory(region, std::make_shared<const Pin>(region));
}

Result<RegionKeys> ToyTransport::register_memory(const LocalRegion& region, const Pinned& pinned) {
  const Pinned own = pinned != nullptr ? pinned : Pinned(std::make_shared<const Pin>(region));
  registered_[region.id] = own;
  const std::uint64_t key = static_cast<const Pin*>(own.get())->key;
  RegionKeys keys(sizeof key);
  std::memcpy(keys.data(), &key, sizeof key);
  return keys;
}

void ToyTransport::deregister_memory(RegionId region) noexcept { registered_.erase(region); }

Status ToyTransport::attach(PeerId id, const RemoteRegion& region) {
  const auto found = peers_.find(id);
  if (found == peers_.end() || found->second->endpoint == 0)
    return {Code::kRailFailed, "toy: not connected to this peer"};
  std::uint64_t key = 0;
  if (region.keys.size() != sizeof key) return {Code::kUnsupported, "toy: keys of another version"};
  std::memcpy(&key, region.keys.data(), sizeof key);
  found->second->keys[region.id] = key;
  return {};
}

void ToyTransport::detach(PeerId id, RegionId region) noexcept {
  if (const auto found = peers_.find(id); found != peers_.end()) found->second->keys.erase(region);
}

// ---- peers ----

Result<PeerId> ToyTransport::connect(UniqueFd socket, const ConnectInfo& info) {
  const PeerId id = next_peer_++;
  Peer& peer = *(peers_[id] = std::make_unique<Peer>(*this, id, std::move(socket), info.peer_name));
  if (Status added = reactor_.add(peer.socket.get(), EPOLLIN, peer); !added.ok()) {
    peers_.erase(id);
    return added;
  }
  // 8 bytes fit the buffer of a socket that has carried nothing but its handshake.
  if (::send(peer.socket.get(), &endpoint_, sizeof endpoint_, MSG_NOSIGNAL) != sizeof endpoint_)
    fail(peer, "the endpoint could not be sent");
  return id;
}

void ToyTransport::on_ready(Peer& peer) {
  if (peer.endpoint != 0) {
    char byte;
    if (::recv(peer.socket.get(), &byte, 1, MSG_DONTWAIT) >= 0) fail(peer, "it closed the rail");
    return;
  }
  std::uint64_t endpoint = 0;
  const ssize_t got = ::recv(peer.socket.get(), &endpoint, sizeof endpoint, MSG_PEEK | MSG_DONTWAIT);
  if (got == 0) return fail(peer, "it closed the rail");
  if (got != sizeof endpoint) return;  // the rest is on its way
  static_cast<void>(::recv(peer.socket.get(), &endpoint, sizeof endpoint, MSG_DONTWAIT));
  peer.endpoint = endpoint;
  ready_.rail_up(peer.id);
}

void ToyTransport::fail(Peer& peer, const std::string& why) {
  if (!peer.socket) return;
  reactor_.remove(peer.socket.get());
  peer.socket.reset();
  const std::string detail = "toy: the rail to " + peer.name + " is down: " + why;
  peer.end_works(Code::kRailFailed, detail);
  ready_.rail_down(peer.id, detail);
}

void ToyTransport::disconnect(PeerId id) noexcept {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  Peer& peer = *found->second;
  if (peer.socket) reactor_.remove(peer.socket.get());
  ready_.forget_rail(id);
  peer.end_works(Code::kCancelled, {});
  peers_.erase(found);
}

// ---- work ----

PostResult ToyTransport::post(PeerId id, std::span<const Work> batch) noexcept {
  const auto found = peers_.find(id);
  if (found == peers_.end() || !found->second->socket) return {0, Code::kRailFailed};
  if (found->second->endpoint == 0) return {0, Code::kAgain};
  std::deque<Work>& queue = found->second->queue;
  const std::size_t accepted = std::min(batch.size(), kMostQueued - queue.size());
  queue.insert(queue.end(), batch.begin(), batch.begin() + static_cast<std::ptrdiff_t>(accepted));
  return {accepted, accepted == batch.size() ? Code::kOk : Code::kAgain};
}

void ToyTransport::cancel(WorkId id) noexcept {
  // What is queued has not begun, and what is not has ended: work moves inside poll alone.
  for (auto& [number, peer] : peers_)
    if (std::erase_if(peer->queue, [id](const Work& work) { return work.id == id; }) != 0)
      return ready_.work(id, Code::kCancelled);
}

bool ToyTransport::busy() const noexcept {
  return !ready_.empty() || std::any_of(peers_.begin(), peers_.end(),
                                        [](const auto& entry) { return !entry.second->queue.empty(); });
}

std::size_t ToyTransport::poll(std::span<Completion> completions) noexcept {
  std::size_t count = ready_.take(completions);
  for (std::uint64_t moved = 0; moved < kPollNbytes && count < completions.size();) {
    const auto has_work = [](const auto& entry) { return !entry.second->queue.empty(); };
    auto turn = std::find_if(peers_.upper_bound(last_served_), peers_.end(), has_work);
    if (turn == peers_.end()) turn = std::find_if(peers_.begin(), peers_.end(), has_work);
    if (turn == peers_.end()) break;
    last_served_ = turn->first;
    const Work work = std::move(turn->second->queue.front());
    turn->second->queue.pop_front();
    completions[count++] = run(*turn->second, work, moved);
  }
  return count;
}

Completion ToyTransport::run(Peer& peer, const Work& work, std::uint64_t& moved_nbytes) noexcept {
  const std::lock_guard lock(nic().mutex);
  if (work.kind == WorkKind::kCheckFence) {
    const auto found = nic().endpoints.find(peer.endpoint);
    if (found == nic().endpoints.end()) return failed(work.id, Code::kRailFailed, "toy: the peer is gone");
    if (work.fence_slot >= FenceTable::kNumSlots)
      return failed(work.id, Code::kInternal, "toy: there is no such fence slot");
    const bool stands = found->second->generation(work.fence_slot) == work.fence_generation;
    return stands ? done(work.id) : failed(work.id, Code::kLeaseEnded, "toy: the right has ended");
  }
  if (work.kind != WorkKind::kFetch)
    return failed(work.id, Code::kUnsupported, "toy: the destination fetches; nothing is sent");
  const Move& move = *work.move;
  const auto key = peer.keys.find(move.remote_region);
  const auto pinned = key == peer.keys.end() ? nic().pinned.end() : nic().pinned.find(key->second);
  if (pinned == nic().pinned.end())
    return failed(work.id, Code::kRegionGone, "toy: " + peer.name + " deregistered the region");
  const auto& [base, end] = pinned->second;
  if (piece_end(move, work.piece, Side::kSrc) > end)
    return failed(work.id, Code::kInternal, "toy: the piece ends outside the region");
  copy_piece(move, work.piece, base, move.local->base);
  moved_nbytes += piece_nbytes(*move.program, move.grid.piece(work.piece));
  return done(work.id);
}

}  // namespace kvxfer::toy

// ---- what it says of itself ----

namespace kvxfer {
namespace {

constexpr TransportOption kOptions[] = {
    {"rails", "instances, as a machine has NICs", std::int64_t{2}, 1, 8},
    {"pins", "whether registering memory takes its time", true},
};

}  // namespace

extern const TransportKind toy_transport;
constinit const TransportKind toy_transport{
    .name = "toy",
    .purpose = "moves pages between agents of one process, to be read and tested",
    .remedy = "nothing forbids it",
    .options = kOptions,
    .memory = MemoryKind::kHost,
    .reach = Reach::kProcess,
    .socket = RailSocket::kUnix,
    .rank = 1,
    .is_default = false,
    .why_off = [](const std::vector<GpuPart>&) { return std::string(); },
    .make = [](const RailParts& parts,
               const OptionValues& options) -> Result<std::vector<std::unique_ptr<Transport>>> {
      std::vector<std::unique_ptr<Transport>> rails;
      for (std::int64_t i = 0; i < options.number("rails"); ++i)
        rails.push_back(
            std::make_unique<toy::ToyTransport>(parts.reactor, parts.fences, options.flag("pins")));
      return rails;
    },
};

}  // namespace kvxfer
