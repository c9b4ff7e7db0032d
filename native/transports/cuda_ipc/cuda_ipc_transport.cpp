#include "transports/cuda_ipc/cuda_ipc_transport.h"

#include <fcntl.h>
#include <sys/epoll.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <set>
#include <utility>

#include "core/pack.h"
#include "transports/common/peer_fences.h"
#include "transports/common/work_queue.h"
#include "transports/cuda_ipc/peer_regions.h"

namespace kvxfer {

using cuda_ipc::MemoryId;
using cuda_ipc::Message;
using cuda_ipc::MessageKind;
using cuda_ipc::PeerRegions;

namespace {

// A launch costs 3 us, which is what a GPU copies 8 MiB in.
constexpr std::uint32_t kPieceNbytes = 8 * 1024 * 1024;

}  // namespace

struct CudaIpcTransport::Peer final : Reactor::Handler {
  Peer(CudaIpcTransport& transport, PeerId number, UniqueFd socket, const std::string& peer_name,
       const PeerRegions::Reader& reader)
      : owner(transport),
        id(number),
        name(peer_name),
        channel(std::move(socket)),
        regions(reader, peer_name) {}
  void on_ready(std::uint32_t events) override { owner.on_ready(*this, events); }

  // Memory that its owner takes back: kernels up to a ticket may read it, and then it is unmapped and that told.
  struct Going {
    cuda_ipc::Flights::Ticket after;
    MemoryId memory_id;
    std::optional<gpu::PeerMemory> mapped;
  };

  CudaIpcTransport& owner;
  const PeerId id;
  const std::string name;
  cuda_ipc::SideChannel channel;
  bool up = false, down = false;
  bool gone = false;      // disconnected: forgotten once nothing of it is under way
  bool parted = false;    // all of its memory is unmapped, which comes after down
  bool given_up = false;  // what it may have mapped of ours is not waited for
  PeerFences fences;
  PeerRegions regions;
  std::deque<Going> going;
  cuda_ipc::Flights::Ticket unused_after = 0;  // then what no region lies in is unmapped; 0: nothing is
  WorkQueue queue;
};

Result<std::unique_ptr<CudaIpcTransport>> CudaIpcTransport::create(Reactor& reactor, const FenceTable& fences,
                                                                   const gpu::Driver& driver,
                                                                   const Options& options) {
  Result<gpu::PrimaryContext> context = gpu::PrimaryContext::retain(driver, options.device);
  if (!context.ok()) return context.status();
  Result<std::unique_ptr<gpu::CopyStream>> stream =
      gpu::CopyStream::create(driver, context.value().get(), options.kernels, options.stream);
  if (!stream.ok()) return stream.status();
  return std::unique_ptr<CudaIpcTransport>(new CudaIpcTransport(
      reactor, fences, driver, options, std::move(context).value(), std::move(stream).value()));
}

CudaIpcTransport::CudaIpcTransport(Reactor& reactor, const FenceTable& fences, const gpu::Driver& driver,
                                   const Options& options, gpu::PrimaryContext context,
                                   std::unique_ptr<gpu::CopyStream> stream)
    : reactor_(reactor),
      fences_(std::make_shared<const UniqueFd>(::fcntl(fences.fd(), F_DUPFD_CLOEXEC, 0))),
      driver_(driver),
      device_(options.device),
      context_(std::move(context)),
      exports_(driver),
      holders_(reactor),
      flights_(std::move(stream), options.most_flying_nbytes) {}

CudaIpcTransport::~CudaIpcTransport() {
  for (auto& [id, peer] : peers_)
    if (!peer->down) reactor_.remove(peer->channel.fd());
}

Capabilities CudaIpcTransport::capabilities() const noexcept {
  return {.name = "cuda_ipc",
          .one_sided = true,
          .fence = FenceGrain::kWork,
          .rank = 0,
          .window = 64,
          .piece_nbytes = kPieceNbytes,
          .memory = MemoryKind::kGpu};
}

// ---- our memory ----

Result<RegionKeys> CudaIpcTransport::register_memory(const LocalRegion& region) {
  const gpu::ContextScope scope(driver_, context_.get());
  Result<std::vector<MemoryId>> added = exports_.add(region);
  if (!added.ok()) return added.status();
  for (const MemoryId id : added.value())
    for (auto& [peer_id, peer] : peers_) {
      const cuda_ipc::Exports::Entry& entry = exports_.all().at(id);
      tell(*peer, entry.message, entry.fd);
    }
  const cuda_ipc::Keys keys{.last_memory = exports_.last()};
  const auto bytes = std::as_bytes(std::span(&keys, 1));
  return RegionKeys(bytes.begin(), bytes.end());
}

void CudaIpcTransport::deregister_memory(RegionId region) noexcept {
  const std::vector<MemoryId> gone = exports_.remove(region);
  if (gone.empty()) return;
  std::vector<PeerId> told;
  for (auto& [id, peer] : peers_)
    if (!peer->parted && !peer->given_up) told.push_back(id);
  holders_.wait_for(region, gone, told);
  for (auto& [id, peer] : peers_)
    for (const MemoryId memory : gone) tell(*peer, Message::about(MessageKind::kMemoryGone, memory));
}

bool CudaIpcTransport::held_by_peers(RegionId region) const noexcept {
  if (holders_.hold(region)) return true;
  return region == kEveryRegion && std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) {
           return entry.second->down && !entry.second->parted && !entry.second->given_up;
         });
}

std::vector<std::string> CudaIpcTransport::give_up_holders(RegionId region) {
  std::vector<std::string> names;
  for (auto& [id, peer] : peers_) {
    if (!holders_.holds(id, region) && (region != kEveryRegion || !peer->down)) continue;
    fail(*peer,
         "it was told that memory is deregistered and did not say in time that it has unmapped it; its "
         "process may keep it mapped until it ends");
    if (peer->parted || peer->given_up) continue;  // below
    peer->given_up = true;  // it has not parted, since kernels here still read its memory
    holders_.forget(id);
    names.push_back(peer->name);
  }
  for (std::string& name : holders_.give_up_parted(region)) names.push_back(std::move(name));
  return names;
}

// ---- peers' memory ----

Status CudaIpcTransport::attach(PeerId id, const RemoteRegion& region) {
  Peer* const peer = find(id);
  if (peer == nullptr || !peer->up || peer->down)
    return {Code::kRailFailed, "cuda_ipc: not connected to this peer"};
  Status attached = peer->regions.attach(region);
  if (!attached.ok()) return {attached.code(), "cuda_ipc: " + attached.message()};
  return {};
}

void CudaIpcTransport::detach(PeerId id, RegionId region) noexcept {
  Peer* const peer = find(id);
  if (peer == nullptr || !peer->regions.detach(region)) return;
  peer->unused_after = flights_.last_of(id);
  if (peer->unused_after == 0) peer->regions.unmap_unused();
}

std::size_t CudaIpcTransport::num_mappings() const noexcept {
  std::size_t count = 0;
  for (const auto& [id, peer] : peers_) count += peer->regions.num_mapped();
  return count;
}

// ---- peers ----

CudaIpcTransport::Peer* CudaIpcTransport::find(PeerId id) const noexcept {
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : found->second.get();
}

Result<PeerId> CudaIpcTransport::connect(UniqueFd socket, const ConnectInfo& info) {
  if (!lost_why_.empty()) return Status(Code::kRailFailed, "cuda_ipc: the GPU has failed in this process");
  if (!*fences_)
    return Status(Code::kSystem, "cuda_ipc: the fence table's descriptor could not be duplicated");
  const PeerId id = next_peer_++;
  const PeerRegions::Reader reader{driver_, context_.get(), device_};
  Peer& peer = *(peers_[id] = std::make_unique<Peer>(*this, id, std::move(socket), info.peer_name, reader));
  if (Status added = reactor_.add(peer.channel.fd(), EPOLLIN, peer); !added.ok()) {
    peers_.erase(id);
    return added;
  }
  Message hello;
  hello.nbytes = PeerFences::kNbytes;
  tell(peer, hello, fences_);
  for (const auto& [memory, entry] : exports_.all()) tell(peer, entry.message, entry.fd);
  return id;
}

void CudaIpcTransport::disconnect(PeerId id) noexcept {
  Peer* const peer = find(id);
  if (peer == nullptr) return;
  peer->queue.end(Code::kCancelled, {}, ready_);
  go_down(*peer);
  ready_.forget_rail(id);
  peer->gone = true;
  settle(*peer);
}

void CudaIpcTransport::go_down(Peer& peer) {
  if (!std::exchange(peer.down, true)) reactor_.remove(peer.channel.fd());
}

void CudaIpcTransport::settle(Peer& peer) {
  while (!peer.going.empty() && peer.going.front().after <= flights_.landed()) {
    const MemoryId memory = peer.going.front().memory_id;
    peer.going.pop_front();
    tell(peer, Message::about(MessageKind::kMemoryUnmapped, memory));
  }
  if (peer.unused_after != 0 && peer.unused_after <= flights_.landed()) {
    peer.unused_after = 0;
    peer.regions.unmap_unused();
  }
  if (peer.down && !peer.parted && flights_.last_of(peer.id) == 0) part(peer);
  if (const PeerId id = peer.id; peer.gone && peer.parted) peers_.erase(id);
}

void CudaIpcTransport::part(Peer& peer) {
  peer.parted = true;
  peer.regions.clear();
  peer.going.clear();
  peer.fences = {};
  std::set<MemoryId> exported;  // it was told of all
  if (!peer.given_up)
    for (const auto& [id, entry] : exports_.all()) exported.insert(id);
  holders_.part(peer.id, peer.name, peer.channel.release(), std::move(exported));
}

void CudaIpcTransport::fail(Peer& peer, const std::string& why) {
  if (peer.down) return;
  go_down(peer);
  const std::string detail = "cuda_ipc: the rail to " + peer.name + " is down: " + why;
  peer.queue.end(Code::kRailFailed, detail, ready_);
  ready_.rail_down(peer.id, detail);
  settle(peer);  // kernels that still run read what is unmapped then
}

// What is under way lands, or ends with the device.
void CudaIpcTransport::fail_all(const std::string& why) {
  if (lost_why_.empty()) lost_why_ = why;
  for (auto& [id, peer] : peers_) fail(*peer, why);
}

void CudaIpcTransport::tell(Peer& peer, const Message& message, SharedFd fd) {
  if (peer.down) return;
  peer.channel.queue(message, std::move(fd));
  flush(peer);
}

void CudaIpcTransport::flush(Peer& peer) {
  if (Status flushed = peer.channel.flush(reactor_); !flushed.ok()) fail(peer, flushed.message());
}

void CudaIpcTransport::on_ready(Peer& peer, std::uint32_t events) {
  if (events & EPOLLOUT) flush(peer);
  if (peer.down || (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0) return;
  if (Status received = receive(peer); !received.ok()) fail(peer, received.message());
}

Status CudaIpcTransport::receive(Peer& peer) {
  for (;;) {
    Result<std::optional<cuda_ipc::SideChannel::Received>> next = peer.channel.receive();
    if (!next.ok()) return next.status();
    if (!next.value().has_value()) return {};
    const Message& message = next.value()->message;
    UniqueFd& fd = next.value()->fd;
    Status status;
    switch (message.kind) {
      case MessageKind::kHello: status = on_hello(peer, message, fd); break;
      case MessageKind::kMemory: status = peer.regions.add_memory(message, std::move(fd)); break;
      case MessageKind::kMemoryGone: status = on_memory_gone(peer, message.memory_id); break;
      case MessageKind::kMemoryUnmapped: status = on_memory_unmapped(peer, message.memory_id); break;
    }
    if (!status.ok()) return status;
  }
}

Status CudaIpcTransport::on_hello(Peer& peer, const Message& message, const UniqueFd& fences) {
  Result<PeerFences> mapped = PeerFences::map(fences, message.nbytes);
  if (!mapped.ok()) return mapped.status();
  peer.fences = std::move(mapped).value();
  peer.up = true;
  ready_.rail_up(peer.id);
  return {};
}

// Its owner waits to free it.
Status CudaIpcTransport::on_memory_gone(Peer& peer, MemoryId memory) {
  Result<std::optional<gpu::PeerMemory>> mapped = peer.regions.take_back(memory);
  if (!mapped.ok()) return mapped.status();
  if (peer.channel.num_queued() + peer.going.size() > cuda_ipc::kMaxMemories)
    return {Code::kRailFailed, "it does not read the answers to what it says"};
  peer.going.push_back({flights_.last_of(peer.id), memory, std::move(mapped).value()});
  settle(peer);
  return {};
}

Status CudaIpcTransport::on_memory_unmapped(Peer& peer, MemoryId memory) {
  if (holders_.unmapped(peer.id, memory)) return {};
  return {Code::kRailFailed, "it says that it has unmapped memory that it was not told to"};
}

// ---- work ----

PostResult CudaIpcTransport::post(PeerId id, std::span<const Work> batch) noexcept {
  Peer* const peer = find(id);
  if (peer == nullptr || peer->down) return {0, Code::kRailFailed};
  if (!peer->up) return {0, Code::kAgain};
  return peer->queue.post(batch);
}

void CudaIpcTransport::cancel(WorkId id) noexcept {
  for (auto& [peer_id, peer] : peers_)
    if (peer->queue.withdraw(id)) return ready_.work(id, Code::kCancelled);
}

std::size_t CudaIpcTransport::poll(std::span<Completion> completions) noexcept {
  land();
  while (ready_.size() < completions.size() && run_next()) {}
  return ready_.take(completions);
}

bool CudaIpcTransport::busy() const noexcept {
  if (!ready_.empty() || !flights_.empty()) return true;
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) {
    const Peer& peer = *entry.second;
    return peer.queue.has([&](const Work& work) { return can_run(peer, work); });
  });
}

// Work waits while its region's memory is still on its way. Whatever will fail runs at once.
bool CudaIpcTransport::can_run(const Peer& peer, const Work& work) noexcept {
  if (work.kind != WorkKind::kFetch) return true;
  const PeerRegions::Region* const region = peer.regions.find(work.move->remote_region);
  return region == nullptr || region->placement || !region->failure.empty();
}

// Ends or launches the next work of the next peer. False where there is nothing, or no room.
bool CudaIpcTransport::run_next() {
  const auto turn = next_in_turn(peers_, last_served_, [](const auto& entry) {
    Peer& peer = *entry.second;
    return peer.queue.bring_forward([&](const Work& work) { return can_run(peer, work); });
  });
  if (turn == peers_.end()) return false;
  Peer& peer = *turn->second;
  const Work& work = peer.queue.front();
  const auto end = [&](Completion completion) {
    ready_.push(std::move(completion));
    peer.queue.drop(1);
    last_served_ = peer.id;
    return true;
  };
  // As shm's: pages were read before, by kernels whose end was acquired.
  if (work.kind == WorkKind::kCheckFence)
    return end(check_fence(peer.fences.words(), work, "cuda_ipc", peer.name));
  if (work.kind != WorkKind::kFetch)
    return end(failed(work.id, Code::kUnsupported, "cuda_ipc: the destination fetches; nothing is sent"));
  const PeerRegions::Region* const region = peer.regions.find(work.move->remote_region);
  if (region == nullptr)
    return end(
        failed(work.id, Code::kRegionGone, "cuda_ipc: the region of " + peer.name + " is not attached"));
  if (!region->placement) return end(failed(work.id, region->failure_code, "cuda_ipc: " + region->failure));
  const Status launched = flights_.launch(peer.id, peer.queue, *region->placement, ready_);
  if (launched.code() == Code::kAgain) return false;  // its turn is still to come
  last_served_ = peer.id;
  if (launched.code() == Code::kSystem) fail_all(launched.message());  // not of this peer's making alone
  return true;
}

void CudaIpcTransport::land() {
  if (const Status status = flights_.check(); !status.ok()) fail_all(status.message());
  while (const std::optional<cuda_ipc::Flights::Flight> flight = flights_.next_landed()) {
    Peer& peer = *peers_.at(flight->peer);
    for (const WorkId work : flight->works)
      ready_.push(!flight->is_done ? failed(work, Code::kRailFailed, "cuda_ipc: " + lost_why_)
                  : peer.gone      ? failed(work, Code::kCancelled)
                                   : done(work));
    settle(peer);
  }
}

}  // namespace kvxfer
