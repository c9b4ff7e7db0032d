#include "transports/shm/shm_transport.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "core/executor.h"
#include "core/memfd.h"
#include "core/pack.h"
#include "transports/common/peer_mapping.h"
#include "transports/shm/foreign_memory.h"

namespace kvxfer {

using shm::Message;
using shm::MessageKind;

namespace {

// A fence waits for at most so much: a third of a millisecond.
constexpr std::uint64_t kPollNbytes = 2 * 1024 * 1024;
constexpr std::size_t kMaxMemfds = 4096;  // a peer: below the usual limit of mappings, 65,530

// A region's keys: where its base lies in a memfd that travels over the rail's socket, or that it
// lies in none.
enum class Where : std::uint64_t { kForeign = 0, kPool = 1 };
struct Keys {
  Where where = Where::kForeign;
  std::uint64_t memfd_id = 0;
  std::uint64_t memfd_offset = 0;
  std::uint64_t memfd_nbytes = 0;
};
static_assert(sizeof(Keys) == 32 && sizeof(Keys) <= kMaxKeyBytes);

// Bytes that peers look up at the address that our hello names.
const shm::Probe& own_probe() {
  static shm::Probe probe;
  static const bool filled = [] {
    static_cast<void>(
        ::getrandom(probe.bytes.data(), probe.bytes.size(), 0));  // 16 bytes are never cut short
    probe.address = reinterpret_cast<std::uintptr_t>(probe.bytes.data());
    return true;
  }();
  static_cast<void>(filled);
  return probe;
}

Message memfd_message(std::uint64_t memfd_id, std::uint64_t nbytes) {
  Message message;
  message.kind = MessageKind::kMemfd;
  message.memfd_id = memfd_id;
  message.nbytes = nbytes;
  return message;
}

SharedFd duplicate(int fd) { return std::make_shared<const UniqueFd>(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

}  // namespace

// A peer's pool, as it arrived over the socket.
struct ShmTransport::Memfd {
  UniqueFd fd;  // kept for a later attach, until the peer says that it is gone
  std::uint64_t nbytes = 0;
  PeerMapping mapping;  // while a region lies in it, and its owner cannot punch holes into it
};

struct ShmTransport::Attached {
  Keys keys;
  std::uint64_t base = 0;  // in the peer's process
  std::uint64_t end = 0;   // of its spans, from base
  std::string failure;     // why its memfd cannot be used, once it has come
  bool by_kernel = false;  // its bytes are read by the kernel, whose reads cannot fault here
};

struct ShmTransport::Peer final : Reactor::Handler {
  Peer(ShmTransport& transport, PeerId number, UniqueFd socket, std::string peer_name)
      : owner(transport), id(number), name(std::move(peer_name)), channel(std::move(socket)) {}
  void on_ready(std::uint32_t events) override { owner.on_ready(*this, events); }

  Memfd* memfd_of(const Attached& region) noexcept {
    const auto found = memfds.find(region.keys.memfd_id);
    return found == memfds.end() ? nullptr : &found->second;
  }
  bool uses(std::uint64_t memfd_id) const noexcept {
    return std::any_of(regions.begin(), regions.end(), [memfd_id](const auto& entry) {
      return entry.second.keys.where == Where::kPool && entry.second.keys.memfd_id == memfd_id;
    });
  }
  // Brings a region and its memfd together, whichever came last.
  Status map_for(Attached& region) {
    Memfd* const memfd = memfd_of(region);
    if (memfd == nullptr) return {};  // its work waits
    if (memfd->nbytes != region.keys.memfd_nbytes)
      return {Code::kUnsupported, "the region's keys tell of a memfd of " +
                                      std::to_string(region.keys.memfd_nbytes) +
                                      " bytes; the one that came has " + std::to_string(memfd->nbytes)};
    if (memfd->mapping) return {};
    if (!is_sealed_against_holes(memfd->fd.get())) return read_by_kernel(region);
    Result<PeerMapping> mapping = PeerMapping::map(memfd->fd.get(), memfd->nbytes);
    if (!mapping.ok()) return mapping.status();
    memfd->mapping = std::move(mapping).value();
    owner.active_.insert(id);
    return {};
  }

  // Where the region lies in no pool, or in one that must not be mapped.
  Status read_by_kernel(Attached& region) const {
    const std::string why =
        region.keys.where == Where::kForeign
            ? "lies in no pool"
            : "lies in a pool that can get holes (no F_SEAL_FUTURE_WRITE: Linux before 5.1)";
    if (!foreign.refusal().empty())
      return {Code::kUnsupported, "the region of " + name + " " + why + ", and " + foreign.refusal() +
                                      ". Or let the engine take this memory from a kvxfer pool"};
    if (region.end > UINT64_MAX - region.base)
      return {Code::kUnsupported, "the region ends beyond the address space"};
    region.by_kernel = true;
    return {};
  }

  ShmTransport& owner;
  const PeerId id;
  const std::string name;
  shm::SideChannel channel;
  bool up = false, down = false;
  PeerFences fences;
  shm::ForeignMemory foreign;
  std::map<std::uint64_t, Memfd> memfds;
  std::map<RegionId, Attached> regions;
  WorkQueue queue;
};

ShmTransport::ShmTransport(Reactor& reactor, const FenceTable& fences)
    : reactor_(reactor), fences_(duplicate(fences.fd())) {}

ShmTransport::~ShmTransport() {
  for (auto& [id, peer] : peers_)
    if (!peer->down) reactor_.remove(peer->channel.fd());
}

Capabilities ShmTransport::capabilities() const noexcept {
  // Only an address space in common (loopback, 0) is nearer.
  return {.name = "shm",
          .one_sided = true,
          .fence = FenceGrain::kWork,
          .rank = 1,
          .piece_nbytes = kPollNbytes / 2};
}

// ---- our memory ----

Result<RegionKeys> ShmTransport::register_memory(const LocalRegion& region) {
  Keys keys;
  if (region.memfd >= 0) {
    const std::uint64_t end = end_of(region.spans);
    if (region.memfd_offset > region.memfd_nbytes || end > region.memfd_nbytes - region.memfd_offset)
      return Status(Code::kOutOfRange, "shm: the region ends outside the memfd that it is said to lie in");
    auto found = exported_.find(region.memfd_id);
    if (found == exported_.end()) {
      // What a peer would refuse is refused here, where it can be mended.
      if (Status usable = check_memfd(region.memfd, region.memfd_nbytes); !usable.ok())
        return Status(Code::kInvalidArgument, "shm: peers would refuse this region: " + usable.message());
      if (exported_.size() == kMaxMemfds)
        return Status(Code::kExhausted, "shm: regions already lie in " + std::to_string(kMaxMemfds) +
                                            " pools; use fewer, larger pools");
      SharedFd fd = duplicate(region.memfd);
      if (!*fd) return Status::from_errno("dup of a pool's descriptor", errno);
      found = exported_.emplace(region.memfd_id, Exported{std::move(fd), region.memfd_nbytes, 0}).first;
      tell_all(memfd_message(region.memfd_id, region.memfd_nbytes), found->second.fd);
    }
    if (pool_regions_.emplace(region.id, region.memfd_id).second) ++found->second.num_regions;
    keys = {Where::kPool, region.memfd_id, region.memfd_offset, region.memfd_nbytes};
  }
  RegionKeys bytes(sizeof keys);
  std::memcpy(bytes.data(), &keys, sizeof keys);
  return bytes;
}

void ShmTransport::deregister_memory(RegionId region) noexcept {
  const auto found = pool_regions_.find(region);
  if (found == pool_regions_.end()) return;
  const auto exported = exported_.find(found->second);
  pool_regions_.erase(found);
  if (--exported->second.num_regions != 0) return;
  // Peers give the memory back: as long as one holds the descriptor the kernel keeps the pages.
  Message message;
  message.kind = MessageKind::kMemfdGone;
  message.memfd_id = exported->first;
  exported_.erase(exported);
  tell_all(message, nullptr);
}

// ---- peers' memory ----

Status ShmTransport::attach(PeerId peer_id, const RemoteRegion& region) {
  const auto found = peers_.find(peer_id);
  if (found == peers_.end() || !found->second->up || found->second->down)
    return {Code::kRailFailed, "shm: not connected to this peer"};
  Peer& peer = *found->second;

  Attached attached{.keys = {}, .base = region.base, .end = end_of(region.spans), .failure = {}};
  if (region.keys.size() != sizeof(Keys))
    return {Code::kUnsupported,
            "shm: keys of " + std::to_string(region.keys.size()) + " bytes are not of this version"};
  std::memcpy(&attached.keys, region.keys.data(), sizeof(Keys));

  switch (attached.keys.where) {
    case Where::kForeign:
      if (Status readable = peer.read_by_kernel(attached); !readable.ok())
        return {Code::kUnsupported, "shm: " + readable.message()};
      break;
    case Where::kPool:
      if (attached.keys.memfd_offset > attached.keys.memfd_nbytes ||
          attached.end > attached.keys.memfd_nbytes - attached.keys.memfd_offset)
        return {Code::kUnsupported, "shm: the region of " + peer.name + " ends outside its pool of " +
                                        std::to_string(attached.keys.memfd_nbytes) + " bytes"};
      if (Status mapped = peer.map_for(attached); !mapped.ok())
        return {Code::kUnsupported, "shm: the pool of " + peer.name + ": " + mapped.message()};
      break;
    default: return {Code::kUnsupported, "shm: keys of an unknown kind"};
  }
  peer.regions[region.id] = std::move(attached);
  return {};
}

void ShmTransport::detach(PeerId peer_id, RegionId region) noexcept {
  const auto found = peers_.find(peer_id);
  if (found == peers_.end()) return;
  Peer& peer = *found->second;
  const auto attached = peer.regions.find(region);
  if (attached == peer.regions.end()) return;
  const Keys keys = attached->second.keys;
  peer.regions.erase(attached);
  if (keys.where != Where::kPool || peer.uses(keys.memfd_id)) return;
  if (const auto memfd = peer.memfds.find(keys.memfd_id); memfd != peer.memfds.end())
    memfd->second.mapping = {};
}

std::size_t ShmTransport::num_mappings() const noexcept {
  std::size_t count = 0;
  for (const auto& [id, peer] : peers_)
    for (const auto& [memfd_id, memfd] : peer->memfds) count += static_cast<bool>(memfd.mapping);
  return count;
}

// ---- peers ----

Result<PeerId> ShmTransport::connect(UniqueFd socket, const ConnectInfo& info) {
  if (!*fences_) return Status(Code::kSystem, "shm: the fence table's descriptor could not be duplicated");
  const PeerId id = next_peer_++;
  Peer& peer = *(peers_[id] = std::make_unique<Peer>(*this, id, std::move(socket), info.peer_name));
  if (Status added = reactor_.add(peer.channel.fd(), EPOLLIN, peer); !added.ok()) {
    peers_.erase(id);
    return added;
  }
  Message hello;
  hello.nbytes = PeerFences::kNbytes;
  hello.probe_address = own_probe().address;
  hello.probe = own_probe().bytes;
  tell(peer, hello, fences_);
  for (const auto& [memfd_id, pool] : exported_) tell(peer, memfd_message(memfd_id, pool.nbytes), pool.fd);
  return id;
}

void ShmTransport::disconnect(PeerId id) noexcept {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  Peer& peer = *found->second;
  if (!peer.down) reactor_.remove(peer.channel.fd());
  ready_.forget_rail(id);
  peer.queue.end(Code::kCancelled, {}, ready_);
  peers_.erase(found);
}

void ShmTransport::fail(Peer& peer, const std::string& why) {
  if (peer.down) return;
  peer.down = true;
  reactor_.remove(peer.channel.fd());
  peer.channel = shm::SideChannel(UniqueFd());
  peer.regions.clear();
  peer.memfds.clear();
  peer.fences = {};
  const std::string detail = "shm: the rail to " + peer.name + " is down: " + why;
  peer.queue.end(Code::kRailFailed, detail, ready_);
  ready_.rail_down(peer.id, detail);
}

void ShmTransport::tell(Peer& peer, const Message& message, SharedFd fd) {
  if (peer.down) return;
  peer.channel.queue(message, std::move(fd));
  flush(peer);
}

void ShmTransport::tell_all(const Message& message, const SharedFd& fd) {
  for (auto& [id, peer] : peers_) tell(*peer, message, fd);
}

void ShmTransport::flush(Peer& peer) {
  if (Status flushed = peer.channel.flush(reactor_); !flushed.ok()) fail(peer, flushed.message());
}

void ShmTransport::on_ready(Peer& peer, std::uint32_t events) {
  if (events & EPOLLOUT) flush(peer);
  if (peer.down || (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0) return;
  if (Status received = receive(peer); !received.ok()) fail(peer, received.message());
}

Status ShmTransport::receive(Peer& peer) {
  for (;;) {
    Result<std::optional<shm::SideChannel::Received>> next = peer.channel.receive();
    if (!next.ok()) return next.status();
    if (!next.value().has_value()) return {};
    const Message& message = next.value()->message;
    Status status;
    switch (message.kind) {
      case MessageKind::kHello: status = on_hello(peer, message, std::move(next.value()->fd)); break;
      case MessageKind::kMemfd: status = on_memfd(peer, message, std::move(next.value()->fd)); break;
      case MessageKind::kMemfdGone: on_memfd_gone(peer, message.memfd_id); break;
    }
    if (!status.ok()) return status;
  }
}

Status ShmTransport::on_hello(Peer& peer, const Message& message, UniqueFd fences) {
  Result<PeerFences> mapped = PeerFences::map(fences, message.nbytes);
  if (!mapped.ok()) return mapped.status();
  peer.fences = std::move(mapped).value();

  // The kernel's word for who is at the other end, not the peer's.
  ucred credentials{};
  socklen_t nbytes = sizeof credentials;
  if (::getsockopt(peer.channel.fd(), SOL_SOCKET, SO_PEERCRED, &credentials, &nbytes) != 0)
    return Status::from_errno("getsockopt(SO_PEERCRED)", errno);
  peer.foreign = shm::ForeignMemory(credentials.pid, credentials.uid, {message.probe_address, message.probe});

  peer.up = true;
  ready_.rail_up(peer.id);
  return {};
}

Status ShmTransport::on_memfd(Peer& peer, const Message& message, UniqueFd fd) {
  if (Status usable = check_memfd(fd.get(), message.nbytes); !usable.ok()) return usable;
  if (peer.memfds.size() == kMaxMemfds)
    return {Code::kRailFailed, "it sent more than " + std::to_string(kMaxMemfds) + " memfds"};
  const auto [entry, is_new] = peer.memfds.try_emplace(message.memfd_id);
  if (!is_new) return {Code::kRailFailed, "it sent the same memfd twice"};
  entry->second.fd = std::move(fd);
  entry->second.nbytes = message.nbytes;
  for (auto& [id, region] : peer.regions) {
    if (region.keys.where != Where::kPool || region.keys.memfd_id != message.memfd_id) continue;
    region.failure = peer.map_for(region).message();  // told by its work: attach said yes long ago
  }
  return {};
}

void ShmTransport::on_memfd_gone(Peer& peer, std::uint64_t memfd_id) {
  peer.memfds.erase(memfd_id);  // its regions' work waits, until they are detached or it comes back
}

// ---- work ----

PostResult ShmTransport::post(PeerId id, std::span<const Work> batch) noexcept {
  const auto found = peers_.find(id);
  if (found == peers_.end() || found->second->down) return {0, Code::kRailFailed};
  Peer& peer = *found->second;
  if (!peer.up) return {0, Code::kAgain};
  const PostResult posted = peer.queue.post(batch);
  if (!peer.queue.empty()) active_.insert(id);
  return posted;
}

// Work only moves inside poll, so what is still queued has not begun and what is not has ended.
void ShmTransport::cancel(WorkId id) noexcept {
  for (auto& [peer_id, peer] : peers_)
    if (peer->queue.withdraw(id)) return ready_.work(id, Code::kCancelled);
}

std::size_t ShmTransport::poll(std::span<Completion> completions) noexcept {
  std::size_t count = ready_.take(completions);
  std::uint64_t moved_nbytes = 0;
  Peer* peer = nullptr;
  Work work;
  while (count < completions.size() && moved_nbytes < kPollNbytes && take_next(peer, work))
    completions[count++] = run(*peer, work, moved_nbytes);
  check_foreign(completions.first(count));
  if (moved_nbytes != 0) return count;

  // Nothing to move: time to prepare for what will come.
  std::erase_if(active_, [this](PeerId id) {
    const auto found = peers_.find(id);
    return found == peers_.end() || (found->second->queue.empty() && !needs_preparing(*found->second));
  });
  for (const PeerId id : active_)
    for (auto& [memfd_id, memfd] : peers_.at(id)->memfds)
      if (memfd.mapping && !memfd.mapping.populated()) {
        Peer& peer_of_it = *peers_.at(id);
        if (Status populated = memfd.mapping.populate_some(); !populated.ok())
          fail(peer_of_it, populated.message());
        return count;
      }
  return count;
}

bool ShmTransport::needs_preparing(const Peer& peer) noexcept {
  return std::any_of(peer.memfds.begin(), peer.memfds.end(), [](const auto& entry) {
    return entry.second.mapping && !entry.second.mapping.populated();
  });
}

// What was read from a process counts if the process was there after the last byte: its number may
// have become another's meanwhile. One question for all of a round.
void ShmTransport::check_foreign(std::span<Completion> completions) noexcept {
  const Peer* asked = nullptr;
  Status alive;
  for (const auto& [work, peer] : foreign_reads_) {
    if (peer != asked) alive = peer->foreign.check_alive();
    asked = peer;
    if (alive.ok()) continue;
    const auto of_it = [&](const Completion& each) { return each.work == work && each.code == Code::kOk; };
    *std::find_if(completions.begin(), completions.end(), of_it) =
        failed(work, alive.code(), "shm: reading memory of " + peer->name + ": " + alive.message());
  }
  foreign_reads_.clear();
}

bool ShmTransport::busy() const noexcept {
  if (!ready_.empty()) return true;
  return std::any_of(active_.begin(), active_.end(), [this](PeerId id) {
    const auto found = peers_.find(id);
    if (found == peers_.end()) return false;
    const Peer& peer = *found->second;
    return needs_preparing(peer) || peer.queue.has([&](const Work& work) { return can_run(peer, work); });
  });
}

// Work waits while its region's memfd is still on its way. Whatever will fail runs at once.
bool ShmTransport::can_run(const Peer& peer, const Work& work) noexcept {
  if (work.kind != WorkKind::kFetch) return true;
  const auto found = peer.regions.find(work.move->remote_region);
  if (found == peer.regions.end() || found->second.keys.where != Where::kPool) return true;
  const auto memfd = peer.memfds.find(found->second.keys.memfd_id);
  if (memfd == peer.memfds.end()) return false;
  return !memfd->second.mapping || memfd->second.mapping.readable();
}

bool ShmTransport::take_next(Peer*& peer, Work& work) noexcept {
  const auto turn = next_in_turn(active_, last_served_, [&](PeerId id) {
    const auto found = peers_.find(id);
    if (found == peers_.end()) return false;
    peer = found->second.get();
    return peer->queue.bring_forward([&](const Work& each) { return can_run(*peer, each); });
  });
  if (turn == active_.end()) return false;
  work = peer->queue.take();
  last_served_ = *turn;
  return true;
}

Completion ShmTransport::run(Peer& peer, const Work& work, std::uint64_t& moved_nbytes) noexcept {
  switch (work.kind) {
    case WorkKind::kFetch: return fetch(peer, work, moved_nbytes);
    case WorkKind::kCheckFence: return check_fence(peer.fences.words(), work, "shm", peer.name);
    case WorkKind::kSend:
    case WorkKind::kReceive: break;
  }
  return failed(work.id, Code::kUnsupported, "shm: the destination fetches; nothing is sent");
}

Completion ShmTransport::fetch(Peer& peer, const Work& work, std::uint64_t& moved_nbytes) noexcept {
  const Move& move = *work.move;
  const auto found = peer.regions.find(move.remote_region);
  if (found == peer.regions.end())
    return failed(work.id, Code::kRegionGone, "shm: the region of " + peer.name + " is not attached");
  Attached& region = found->second;
  // One check for all runs: within the region, hence (attach) within the memfd. The core checked
  // the program before; this keeps a mistake there from becoming a read out of bounds here.
  if (piece_end(move, work.piece, Side::kSrc) > region.end)
    return failed(work.id, Code::kInternal, "shm: the piece ends outside the region of " + peer.name);

  if (region.by_kernel) {
    if (Status read = peer.foreign.fetch_piece(move, work.piece, region.base); !read.ok())
      return failed(work.id, read.code(), "shm: reading memory of " + peer.name + ": " + read.message());
    foreign_reads_.emplace_back(work.id, &peer);
  } else {
    if (!region.failure.empty())
      return failed(work.id, Code::kRailFailed, "shm: the pool of " + peer.name + ": " + region.failure);
    const PeerMapping& pool = peer.memfd_of(region)->mapping;
    copy_piece(move, work.piece, pool.data() + region.keys.memfd_offset, move.local_base);
    if (Status whole = pool.check_holes(); !whole.ok()) {
      fail(peer, whole.message());
      return failed(work.id, Code::kRailFailed, "shm: the pool of " + peer.name + ": " + whole.message());
    }
  }
  moved_nbytes += piece_nbytes(*move.program, move.grid.piece(work.piece));
  return done(work.id);
}

}  // namespace kvxfer
