#include "transports/shm/shm_transport.h"

#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "core/copy/executor.h"
#include "core/system/pool_memory.h"

namespace kvxfer {

using shm::Keys;
using shm::Message;
using shm::MessageKind;
using shm::Where;

namespace {

// Bytes that peers read at the address that our hello names.
const shm::Probe& own_probe() {
  static shm::Probe probe;
  static const bool filled = [] {
    // getrandom() returns 16 bytes whole.
    static_cast<void>(::getrandom(probe.bytes.data(), probe.bytes.size(), 0));
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

// Why a read of a piece failed. For a pool with holes, also why its rail fails.
Status in_words(const shm::Peer& peer, const shm::PieceSource& source, const Status& why,
                std::string& broken) {
  if (!source.is_mapped()) return {why.code(), "reading memory of " + peer.name + ": " + why.message()};
  broken = why.message();
  return {why.code(), "the pool of " + peer.name + ": " + broken};
}

}  // namespace

// A piece that several threads copy.
class ShmTransport::Shared final : public Flight {
 public:
  Shared(const Work& its, PeerId of, shm::PieceSource from, std::shared_ptr<shm::ForeignReaders> readers)
      : Flight(its, of), source(std::move(from)), readers_(std::move(readers)) {}
  const shm::PieceSource source;

 private:
  Result<std::uint64_t> advance(SlicedCopy& slice, std::size_t thread) override {
    return source.advance(slice, (*readers_)[thread]);
  }
  const std::shared_ptr<shm::ForeignReaders> readers_;
};

ShmTransport::ShmTransport(Reactor& reactor, const FenceTable& fences, std::shared_ptr<CopyWorkers> workers)
    : CopyingRail(reactor, std::move(workers)),
      fences_(fences),
      readers_(std::make_shared<shm::ForeignReaders>(workers_ == nullptr ? 1 : workers_->num_threads())) {}

Capabilities ShmTransport::capabilities() const noexcept {
  // A piece is half a slice.
  return {.name = "shm", .one_sided = true, .piece_nbytes = SlicedCopy::kSliceCost / 2};
}

// ---- our memory ----

Result<RegionKeys> ShmTransport::register_memory(const LocalRegion& region, const Pinned&) {
  Keys keys;
  if (const auto slice = PoolMemory::find(region.base, end_of(region.spans))) {
    auto found = exported_.find(slice->memfd_id);
    if (found == exported_.end()) {
      // Refuses here what a peer would refuse, because the caller can correct it here.
      if (Status usable = check_memfd(slice->fd, slice->memfd_nbytes); !usable.ok())
        return Status(Code::kInvalidArgument, "shm: peers would refuse this region: " + usable.message());
      if (exported_.size() == shm::kMaxMemfds)
        return Status(Code::kExhausted, "shm: regions already lie in " + std::to_string(shm::kMaxMemfds) +
                                            " pools; use fewer, larger pools");
      SharedFd fd = share_copy_of(slice->fd);
      if (!*fd) return Status::from_errno("dup of a pool's descriptor", errno);
      found = exported_.emplace(slice->memfd_id, Exported{std::move(fd), slice->memfd_nbytes, 0}).first;
      tell_all(memfd_message(slice->memfd_id, slice->memfd_nbytes), found->second.fd);
    }
    if (pool_regions_.emplace(region.id, slice->memfd_id).second) ++found->second.num_regions;
    keys = {Where::kPool, slice->memfd_id, slice->offset, slice->memfd_nbytes};
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
  // Peers release the memory: while one of them holds the descriptor, the kernel keeps the pages.
  Message message;
  message.kind = MessageKind::kMemfdGone;
  message.memfd_id = exported->first;
  exported_.erase(exported);
  tell_all(message);
}

// ---- peers' memory ----

Status ShmTransport::attach(PeerId id, const RemoteRegion& region) {
  const Result<Peer*> peer = find_up(id);
  if (!peer.ok()) return peer.status();
  if (Status attached = peer.value()->pools.attach(region); !attached.ok())
    return {attached.code(), words(attached.message())};
  // The next turns enter the pool into our page tables.
  activate(*peer.value());
  return {};
}

void ShmTransport::detach(PeerId id, RegionId region) noexcept {
  if (Peer* const peer = find(id)) peer->pools.detach(region);
}

std::size_t ShmTransport::num_mappings() const noexcept {
  std::size_t count = 0;
  for_each_peer([&](const Peer& peer) { count += peer.pools.num_mapped(); });
  return count;
}

// ---- peers ----

Result<PeerId> ShmTransport::connect(UniqueFd socket, const ConnectInfo& info) {
  if (Status shared = fences_.share(); !shared.ok()) return Status(shared.code(), words(shared.message()));
  return add_peer(std::move(socket), info);
}

void ShmTransport::greet(Peer& peer) {
  Message hello;
  hello.nbytes = FenceTable::kNbytes;
  hello.probe_address = own_probe().address;
  hello.probe = own_probe().bytes;
  tell(peer, hello, fences_.fd());
  for (const auto& [memfd_id, pool] : exported_) tell(peer, memfd_message(memfd_id, pool.nbytes), pool.fd);
}

Status ShmTransport::on_hello(Peer& peer, const Message& message, UniqueFd fences) {
  Result<PeerFences> mapped = PeerFences::map(fences, message.nbytes);
  if (!mapped.ok()) return mapped.status();
  peer.fences = std::move(mapped).value();
  ucred credentials{};
  socklen_t nbytes = sizeof credentials;
  if (::getsockopt(peer.channel.fd(), SOL_SOCKET, SO_PEERCRED, &credentials, &nbytes) != 0)
    return Status::from_errno("getsockopt(SO_PEERCRED)", errno);
  peer.pools.set_process(std::make_shared<const shm::ForeignMemory>(
      credentials.pid, credentials.uid, shm::Probe{message.probe_address, message.probe}));
  return {};
}

Status ShmTransport::on_message(Peer& peer, const Message& message, UniqueFd fd) {
  if (message.kind == MessageKind::kMemfdGone) {
    peer.pools.remove(message.memfd_id);
    return {};
  }
  if (Status added = peer.pools.add(message, std::move(fd)); !added.ok()) return added;
  activate(peer);
  return {};
}

void ShmTransport::on_down(Peer& peer) {
  peer.channel.close();
  peer.pools.clear();
  peer.fences = {};
}

// ---- work ----

bool ShmTransport::can_run(const Peer& peer, const Work& work) const noexcept {
  return work.kind != WorkKind::kFetch || peer.pools.can_read(work.move->remote_region);
}

Result<shm::PieceSource> ShmTransport::source_of(const Peer& peer, const Work& work,
                                                 std::uint64_t src_end) const {
  const shm::PeerPools::Region* const region = peer.pools.find(work.move->remote_region);
  if (region == nullptr) return Status(Code::kRegionGone, "the region of " + peer.name + " is not attached");
  // One check for all runs: they lie within the region, and so (attach) within the memfd. The core has
  // checked the program already; this check keeps a mistake there from becoming a read out of bounds here.
  if (src_end > region->end)
    return Status(Code::kInternal, "the piece ends outside the region of " + peer.name);
  if (auto source = peer.pools.source_of(*region)) return *std::move(source);
  return Status(Code::kRailFailed, "the pool of " + peer.name + ": " +
                                       (region->failure.empty() ? "it was taken back" : region->failure));
}

Result<std::uint64_t> ShmTransport::copy_slice(Peer& peer, Peer::Copy& copy, std::string& broken) {
  const Result<shm::PieceSource> source = source_of(peer, copy.work, copy.src_end);
  if (!source.ok()) return source.status();
  Result<std::uint64_t> cost = source.value().advance(copy.slices, readers_->front());
  if (!cost.ok()) return in_words(peer, source.value(), cost.status(), broken);
  if (copy.slices.done() && !source.value().is_mapped()) foreign_reads_.emplace_back(copy.work.id, &peer);
  return cost;
}

std::unique_ptr<ShmTransport::Flight> ShmTransport::share(Peer& peer, const Work& work,
                                                          std::uint64_t src_end) {
  Result<shm::PieceSource> source = source_of(peer, work, src_end);
  if (!source.ok()) return nullptr;
  return std::make_unique<Shared>(work, peer.id, std::move(source).value(), readers_);
}

Status ShmTransport::result_of(Peer& peer, const Flight& flight, std::string& broken) {
  const shm::PieceSource& source = static_cast<const Shared&>(flight).source;
  if (!flight.status().ok()) return in_words(peer, source, flight.status(), broken);
  if (Status sound = source.check(); !sound.ok()) return in_words(peer, source, sound, broken);
  return {};
}

Status ShmTransport::compare_fence(Peer& peer, const Fence& fence) {
  return peer.fences.say_it_holds(fence) ? Status() : right_ended(peer);
}

// Bytes that were read from a process count only if the process was there after the last byte, because
// another process may have got its number meanwhile. One check serves all reads of a round.
void ShmTransport::after_round(std::span<Completion> completions) noexcept {
  const Peer* asked = nullptr;
  bool is_gone = false;
  for (const auto& [work, peer] : foreign_reads_) {
    if (peer != asked) is_gone = peer->pools.process().is_gone();
    asked = peer;
    if (!is_gone) continue;
    // Copied to a name of its own, because clang 14 captures no structured binding.
    const auto of_it = [id = work](const Completion& each) {
      return each.work == id && each.code == Code::kOk;
    };
    const auto read = std::find_if(completions.begin(), completions.end(), of_it);
    if (read == completions.end()) continue;  // its fence word had moved on
    read->code = Code::kRailFailed;
    try {
      read->detail =
          "shm: reading memory of " + peer->name + ": " + peer->pools.process().check_alive().message();
    } catch (const std::bad_alloc&) {  // the code is enough
    }
  }
  foreign_reads_.clear();
}

void ShmTransport::on_idle() {
  for (Peer* const peer : active()) {
    if (!peer->pools.wants_populating()) continue;
    if (Status populated = peer->pools.populate_some(); !populated.ok()) fail(*peer, populated.message());
    return;
  }
}

}  // namespace kvxfer
