#include "transports/cuda_ipc/cuda_ipc_transport.h"

#include <new>
#include <utility>

#include "gpu/region_device.h"

namespace kvxfer {

using cuda_ipc::MemoryId;
using cuda_ipc::Message;
using cuda_ipc::MessageKind;
using cuda_ipc::PeerRegions;

namespace {

// A launch costs 3 us. In that time a GPU copies 8 MiB.
constexpr std::uint32_t kPieceNbytes = 8 * 1024 * 1024;

}  // namespace

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
    : RailPeers(reactor),
      fences_(fences),
      driver_(driver),
      device_(options.device),
      context_(std::move(context)),
      exports_(driver),
      holders_(reactor),
      flights_(std::move(stream), options.most_flying_nbytes) {}

Capabilities CudaIpcTransport::capabilities() const noexcept {
  return {.name = "cuda_ipc",
          .one_sided = true,
          .window = 64,
          .piece_nbytes = kPieceNbytes,
          .memory = MemoryKind::kGpu};
}

// ---- our memory ----

Result<RegionKeys> CudaIpcTransport::register_memory(const LocalRegion& region, const Pinned&) {
  if (Status here = gpu::check_device(region, device_); !here.ok()) return here;
  const gpu::ContextScope scope(driver_, context_.get());
  Result<std::vector<MemoryId>> added = exports_.add(region);
  if (!added.ok()) return added.status();
  for (const MemoryId id : added.value()) {
    const cuda_ipc::Exports::Entry& entry = exports_.all().at(id);
    for_each_peer([&](Peer& peer) {
      if (!peer.down) tell_of_memory(peer, id, entry);
    });
  }
  const cuda_ipc::Keys keys{.last_memory = exports_.last()};
  const auto bytes = std::as_bytes(std::span(&keys, 1));
  return RegionKeys(bytes.begin(), bytes.end());
}

void CudaIpcTransport::deregister_memory(RegionId region) noexcept {
  cuda_ipc::Exports::Regions::node_type gone = exports_.remove(region);
  if (!gone || gone.mapped().empty()) return;
  for (const MemoryId memory : gone.mapped()) tell_all(Message::about(MessageKind::kMemoryGone, memory));
  holders_.wait_for(std::move(gone));
}

void CudaIpcTransport::tell_of_memory(Peer& peer, MemoryId id,
                                      const cuda_ipc::Exports::Entry& entry) noexcept {
  try {
    holders_.may_hold(peer.id, id);
  } catch (const std::bad_alloc&) {
    return fail(peer, kNoMemory);
  }
  tell(peer, entry.message, entry.fd);
}

bool CudaIpcTransport::held_by_peers(RegionId region) const noexcept {
  bool held = holders_.hold(region);
  if (region == kEveryRegion)
    for_each_peer([&](const Peer& peer) { held |= peer.down && !peer.parted && !peer.given_up; });
  return held;
}

std::vector<std::string> CudaIpcTransport::give_up_holders(RegionId region) {
  std::vector<std::string> names;
  for_each_peer([&](Peer& peer) {
    if (!holders_.holds(peer.id, region) && (region != kEveryRegion || !peer.down)) return;
    fail(peer,
         "it did not report in time that it has unmapped deregistered memory; its process may keep the "
         "memory mapped until it ends");
    if (peer.parted || peer.given_up) return;  // below
    peer.given_up = true;  // it has not parted, because kernels here still read its memory
    holders_.forget(peer.id);
    names.push_back(peer.name);
  });
  for (std::string& name : holders_.give_up_parted(region)) names.push_back(std::move(name));
  return names;
}

// ---- peers' memory ----

Status CudaIpcTransport::attach(PeerId id, const RemoteRegion& region) {
  const Result<Peer*> peer = find_up(id);
  if (!peer.ok()) return peer.status();
  Status attached = peer.value()->regions.attach(region);
  if (!attached.ok()) return {attached.code(), words(attached.message())};
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
  for_each_peer([&](const Peer& peer) { count += peer.regions.num_mapped(); });
  return count;
}

// ---- peers ----

Result<PeerId> CudaIpcTransport::connect(UniqueFd socket, const ConnectInfo& info) {
  if (is_lost_)
    return Status(Code::kRailFailed, "cuda_ipc: the GPU has failed in this process: " + lost_why_);
  if (Status shared = fences_.share(); !shared.ok()) return Status(shared.code(), words(shared.message()));
  return add_peer(std::move(socket), info, PeerRegions::Reader{driver_, context_.get(), device_});
}

void CudaIpcTransport::greet(Peer& peer) {
  Message hello;
  hello.nbytes = FenceTable::kNbytes;
  tell(peer, hello, fences_.fd());
  for (const auto& [memory, entry] : exports_.all()) tell_of_memory(peer, memory, entry);
}

void CudaIpcTransport::forget(Peer& peer) noexcept {
  peer.gone = true;
  clean_up(peer);
}

void CudaIpcTransport::clean_up(Peer& peer) noexcept {
  while (!peer.going.empty() && peer.going.front().after <= flights_.landed()) {
    const MemoryId memory = peer.going.front().memory_id;
    peer.going.pop_front();
    tell(peer, Message::about(MessageKind::kMemoryUnmapped, memory));
  }
  if (peer.unused_after != 0 && peer.unused_after <= flights_.landed()) {
    peer.unused_after = 0;
    peer.regions.unmap_unused();
  }
  if (peer.down && !peer.parted && flights_.last_of(peer.id) == 0) try {
      part(peer);
    } catch (const std::
                 bad_alloc&) {  // when it is disconnected, or else it counts as a holder until it is given up
    }
  if (peer.gone && peer.parted) erase(peer);
}

void CudaIpcTransport::part(Peer& peer) {
  if (peer.given_up) holders_.forget(peer.id);
  peer.regions.clear();
  peer.going.clear();
  peer.fences = {};
  holders_.part(peer.id, peer.name, peer.channel.release());
  peer.parted = true;
}

// What is under way lands, or ends when the device fails.
void CudaIpcTransport::fail_all(const std::string& why) noexcept {
  is_lost_ = true;
  try {
    if (lost_why_.empty()) lost_why_ = why;
  } catch (const std::bad_alloc&) {  // that it is lost is enough
  }
  for_each_peer([&](Peer& peer) { fail(peer, why); });
}

Status CudaIpcTransport::on_message(Peer& peer, const Message& message, UniqueFd fd) {
  switch (message.kind) {
    case MessageKind::kMemory: return peer.regions.add_memory(message, std::move(fd));
    case MessageKind::kMemoryGone: return on_memory_gone(peer, message.memory_id);
    case MessageKind::kMemoryUnmapped: return on_memory_unmapped(peer, message.memory_id);
    case MessageKind::kHello: break;
  }
  return {};
}

Status CudaIpcTransport::on_hello(Peer& peer, const Message& message, UniqueFd fences) {
  Result<PeerFences> mapped = PeerFences::map(fences, message.nbytes);
  if (!mapped.ok()) return mapped.status();
  peer.fences = std::move(mapped).value();
  return {};
}

// The memory's owner waits until it may free it.
Status CudaIpcTransport::on_memory_gone(Peer& peer, MemoryId memory) {
  Result<std::optional<PeerRegions::Mapped>> mapped = peer.regions.take_back(memory);
  if (!mapped.ok()) return mapped.status();
  if (peer.going.size() == cuda_ipc::kMaxMemories)
    return {Code::kRailFailed, "it has taken back too much memory that kernels here still use"};
  peer.going.push_back({flights_.last_of(peer.id), memory, std::move(mapped).value()});
  clean_up(peer);
  return {};
}

Status CudaIpcTransport::on_memory_unmapped(Peer& peer, MemoryId memory) {
  if (holders_.unmapped(peer.id, memory)) return {};
  return {Code::kRailFailed, "it reports that it has unmapped memory that it was not asked to unmap"};
}

// ---- work ----

std::size_t CudaIpcTransport::poll(std::span<Completion> completions) noexcept {
  tell_some();
  land();
  bool runs = true;
  while (ready_.size() < completions.size() && runs) {
    Peer* const next = next_turn();
    try {
      runs = next != nullptr && run_next(*next);
    } catch (const std::bad_alloc&) {
      fail(*next, kNoMemory);
    }
  }
  return ready_.take(completions);
}

bool CudaIpcTransport::busy() const noexcept { return !flights_.empty() || RailPeers::busy(); }

bool CudaIpcTransport::wants_poll() const noexcept { return !flights_.empty() || RailPeers::wants_poll(); }

// A work waits while its region's memory has not been told of yet. A work that will fail runs at once.
bool CudaIpcTransport::can_run(const Peer& peer, const Work& work) const noexcept {
  if (work.kind != WorkKind::kFetch) return true;
  const PeerRegions::Region* const region = peer.regions.find(work.move->remote_region);
  return region == nullptr || region->placement || !region->failure.empty();
}

// Ends or launches the peer's next work. False: there is no room.
bool CudaIpcTransport::run_next(Peer& peer) {
  const std::size_t at = first_that_runs(peer);
  const Work& work = peer.queue[at];
  const auto end = [&](Completion completion) {
    peer.queue.drop(at, 1);
    end_work(std::move(completion));
    end_turn();
    return true;
  };
  if (work.kind != WorkKind::kFetch)
    return end(failed(work.id, Code::kUnsupported, words("this rail cannot send: the destination fetches")));
  const PeerRegions::Region* const region = peer.regions.find(work.move->remote_region);
  if (region == nullptr)
    return end(failed(work.id, Code::kRegionGone, words("the region of " + peer.name + " is not attached")));
  if (!region->placement) return end(failed(work.id, region->failure_code, words(region->failure)));
  const cuda_ipc::Flights::Launch launch = flights_.launch(peer.id, peer.queue, at, *region->placement);
  const Status& status = launch.status;
  if (status.code() == Code::kAgain) return false;  // it keeps its turn
  end_turn();
  for (const WorkId refused : launch.refused) end_work(refused, status.code(), status.message());
  if (status.code() == Code::kSystem) fail_all(status.message());  // not this peer's fault alone
  return true;
}

void CudaIpcTransport::land() noexcept {
  try {
    if (const Status status = flights_.check(); !status.ok()) fail_all(status.message());
  } catch (const std::bad_alloc&) {
    fail_all({});
  }
  while (const std::optional<cuda_ipc::Flights::Flight> flight = flights_.next_landed()) {
    Peer& peer = *find(flight->peer);
    // As in shm: the kernel read the pages, and its end was acquired.
    const bool is_stale = flight->is_done && !peer.gone && !peer.fences.say_it_holds(flight->fence);
    // Of a source that is gone the word says nothing: it holds for ever.
    const bool is_lost = !flight->is_done || (peer.down && !peer.gone);
    for (const WorkId work : flight->works)
      if (is_lost)
        end_work(work, Code::kRailFailed, lost_why_);
      else if (is_stale)
        end_stale(peer, work);
      else
        end_work(work, peer.gone ? Code::kCancelled : Code::kOk);
    clean_up(peer);
  }
}

}  // namespace kvxfer
