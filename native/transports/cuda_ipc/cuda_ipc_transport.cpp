#include "transports/cuda_ipc/cuda_ipc_transport.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <set>

#include "core/executor.h"
#include "core/pack.h"
#include "transports/common/peer_mapping.h"

namespace kvxfer {
namespace {

constexpr std::size_t kMaxQueued = 1024;    // works a peer; the engine posts `window` at a time
constexpr std::size_t kMaxMemories = 8192;  // a peer: layers, and segments of an allocator
constexpr std::size_t kMaxPartings = 64;    // a descriptor each; of peers that come and never let go
constexpr std::uint64_t kFenceTableNbytes = FenceTable::kNumSlots * sizeof(std::uint64_t);
// What is under way a fence is complete behind: 5 ms at 50 GB/s. Two launches, so that a GPU goes on while a poll
// finds the end of one; what lies between two is some microseconds, in which it copies less than a tenth of this.
constexpr std::uint64_t kFlyingNbytes = 256 * 1024 * 1024;
constexpr std::uint64_t kLaunchNbytes = kFlyingNbytes / 2;
// A launch costs 3 us, which is what a GPU copies 8 MiB in.
constexpr std::uint32_t kPieceNbytes = 8 * 1024 * 1024;
// Polls without an end between two questions whether the device still works.
constexpr std::uint32_t kPollsPerCheck = 1024;
constexpr gpu::CopyStream::Ticket kNeverTicket = UINT64_MAX;

// A region's keys: it lies in allocations that its owner has told of, up to this one.
struct Keys {
  std::array<char, 4> version{'c', 'i', 'p', '1'};
  std::uint32_t reserved = 0;
  std::uint64_t last_memory = 0;
};
static_assert(sizeof(Keys) == 16 && sizeof(Keys) <= kMaxKeyBytes);

enum class MessageKind : std::uint32_t {
  kHello = 1,       // first, once; with the fence table's memfd
  kMemory = 2,      // an allocation in which some region lies; with a descriptor if it goes by one
  kMemoryGone = 3,  // no region lies there any longer
  kMemoryUnmapped = 4,  // the answer to that: nothing of it is mapped or read here any more
};

SharedFd duplicate(int fd) { return std::make_shared<const UniqueFd>(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

Completion done(WorkId work) { return {CompletionKind::kWork, work, 0, Code::kOk, {}}; }
Completion failed(WorkId work, Code code, std::string detail) {
  return {CompletionKind::kWork, work, 0, code, std::move(detail)};
}

}  // namespace

struct CudaIpcTransport::Message {
  std::array<char, 4> magic{'k', 'v', 'g', '2'};
  MessageKind kind = MessageKind::kHello;
  std::uint64_t memory_id = 0;  // ascending
  std::uint64_t base = 0;       // in the sender's addresses
  std::uint64_t nbytes = 0;     // of the memory, or of the fence table
  gpu::HandleKind handle_kind = gpu::HandleKind::kIpc;
  std::uint32_t reserved = 0;
  std::array<std::byte, gpu::kHandleNbytes> handle{};
};

struct CudaIpcTransport::Attached {
  std::uint64_t base = 0;  // in the peer's process
  std::vector<MemorySpan> spans;
  std::uint64_t last_memory = 0;
  std::optional<gpu::Placement> placement;  // once its memory is mapped
  std::string failure;                      // why that cannot be
  Code failure_code = Code::kUnsupported;   // kRailFailed: it could, and its memory is gone
};

struct CudaIpcTransport::Peer final : Reactor::Handler {
  Peer(CudaIpcTransport& transport, PeerId number, UniqueFd socket, std::string peer_name)
      : owner(transport),
        id(number),
        name(std::move(peer_name)),
        channel(std::move(socket), sizeof(Message)) {}
  void on_ready(std::uint32_t events) override { owner.on_ready(*this, events); }

  struct Memory {
    gpu::ExportedMemory exported;
    std::optional<gpu::PeerMemory> mapped;  // while a region lies in it
  };

  CudaIpcTransport& owner;
  const PeerId id;
  const std::string name;
  MessageChannel channel;
  bool up = false, down = false;
  bool gone = false;      // disconnected: forgotten once nothing of it is under way
  bool parted = false;    // all of its memory is unmapped, which comes after down
  bool given_up = false;  // what it may have mapped of ours is not waited for
  bool watches_write = false;
  PeerMapping fences;
  std::uint64_t last_memory = 0;  // that it told of
  std::set<std::uint64_t> unmapping;  // of ours: it was told that these are gone, and has not answered
  std::map<std::uint64_t, Memory> memories;
  std::map<RegionId, Attached> regions;
  std::deque<Work> queue;
  std::size_t num_flights = 0;
  gpu::CopyStream::Ticket last_ticket = 0;  // of those
  // Memory that its owner takes back: kernels up to a ticket may read it, and then it is unmapped and that told.
  struct Going {
    gpu::CopyStream::Ticket after;
    std::uint64_t memory_id;
    std::optional<gpu::PeerMemory> mapped;
  };
  std::deque<Going> going;
  gpu::CopyStream::Ticket unused_after = 0;  // then what no region lies in is unmapped; 0: nothing is
};

// The end of a rail, at which a peer may still have memory of ours mapped. Both ends unmap first and end
// their half of the socket then; a process that dies does both.
struct CudaIpcTransport::Parting final : Reactor::Handler {
  Parting(CudaIpcTransport& transport, std::string peer_name, UniqueFd ending,
          std::set<std::uint64_t> memories)
      : owner(transport), name(std::move(peer_name)), socket(std::move(ending)), held(std::move(memories)) {}
  void on_ready(std::uint32_t) override {
    std::array<std::byte, 4096> unread;  // descriptors among it are closed by the kernel
    const ssize_t received = ::recv(socket.get(), unread.data(), unread.size(), MSG_DONTWAIT);
    if (received > 0 || (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))) return;
    held.clear();
    owner.forget_partings();
  }

  CudaIpcTransport& owner;
  const std::string name;
  const UniqueFd socket;
  std::set<std::uint64_t> held;
};

Result<std::unique_ptr<CudaIpcTransport>> CudaIpcTransport::create(Reactor& reactor, const FenceTable& fences,
                                                                   const gpu::Driver& driver,
                                                                   const Options& options) {
  Result<gpu::PrimaryContext> context = gpu::PrimaryContext::retain(driver, options.device);
  if (!context.ok()) return context.status();
  std::unique_ptr<CudaIpcTransport> transport(
      new CudaIpcTransport(reactor, fences, std::move(context).value(), driver, options));
  Result<std::unique_ptr<gpu::CopyStream>> stream =
      gpu::CopyStream::create(driver, transport->context_.get(), options.kernels, options.stream);
  if (!stream.ok()) return stream.status();
  transport->stream_ = std::move(stream).value();
  return transport;
}

CudaIpcTransport::CudaIpcTransport(Reactor& reactor, const FenceTable& fences, gpu::PrimaryContext context,
                                   const gpu::Driver& driver, const Options& options)
    : reactor_(reactor),
      fences_(duplicate(fences.fd())),
      driver_(driver),
      options_(options),
      context_(std::move(context)) {}

CudaIpcTransport::~CudaIpcTransport() {
  for (auto& [id, peer] : peers_)
    if (!peer->down) reactor_.remove(peer->channel.fd());
  for (const Parting& parting : partings_) reactor_.remove(parting.socket.get());
  stream_.reset();  // waits for kernels, while what they read is mapped
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
  std::vector<std::uint64_t> memories;
  const auto forget = [&] {
    regions_[region.id] = std::move(memories);
    deregister_memory(region.id);
  };
  for (const MemorySpan& span : region.spans) {
    const gpu::Address begin = reinterpret_cast<gpu::Address>(region.base) + span.offset;
    for (gpu::Address at = begin; at < begin + span.nbytes;) {
      auto found = std::find_if(exported_.begin(), exported_.end(), [at](const auto& entry) {
        const gpu::ExportedMemory& memory = entry.second.memory;
        return at >= memory.base && at - memory.base < memory.nbytes;
      });
      if (found == exported_.end()) {
        Result<gpu::ExportedMemory> memory = gpu::export_memory(driver_, at);
        if (!memory.ok()) {
          forget();
          return memory.status();
        }
        if (exported_.size() == kMaxMemories) {
          forget();
          return Status(Code::kExhausted, "regions already lie in " + std::to_string(kMaxMemories) +
                                              " allocations of GPU memory: use fewer, larger ones");
        }
        Exported entry{std::move(memory).value(), nullptr, 0};
        if (entry.memory.fd) entry.fd = std::make_shared<const UniqueFd>(std::move(entry.memory.fd));
        found = exported_.emplace(next_memory_++, std::move(entry)).first;
        for (auto& [id, peer] : peers_) tell(*peer, memory_message(*found), found->second.fd);
      }
      if (std::find(memories.begin(), memories.end(), found->first) == memories.end()) {
        memories.push_back(found->first);
        ++found->second.num_regions;
      }
      at = found->second.memory.base + found->second.memory.nbytes;
    }
  }
  regions_[region.id] = std::move(memories);
  const Keys keys{.last_memory = next_memory_ - 1};
  RegionKeys bytes(sizeof keys);
  std::memcpy(bytes.data(), &keys, sizeof keys);
  return bytes;
}

void CudaIpcTransport::deregister_memory(RegionId region) noexcept {
  const auto found = regions_.find(region);
  if (found == regions_.end()) return;
  std::vector<std::uint64_t> gone;
  for (const std::uint64_t id : found->second) {
    const auto exported = exported_.find(id);
    if (--exported->second.num_regions != 0) continue;
    exported_.erase(exported);
    gone.push_back(id);
  }
  regions_.erase(found);
  leaving_[region] = gone;
  for (auto& [peer_id, peer] : peers_)
    if (!peer->parted && !peer->given_up) peer->unmapping.insert(gone.begin(), gone.end());
  Message message;
  message.kind = MessageKind::kMemoryGone;
  for (auto& [peer_id, peer] : peers_)
    for (const std::uint64_t id : gone) {
      message.memory_id = id;
      tell(*peer, message, nullptr);
    }
  forget_unheld();
}

bool CudaIpcTransport::held_by_peers(RegionId region) const noexcept {
  if (region != kEveryRegion) return leaving_.contains(region);
  return !leaving_.empty() || !partings_.empty() ||
         std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) {
           return entry.second->down && !entry.second->parted && !entry.second->given_up;
         });
}

std::vector<std::string> CudaIpcTransport::give_up_holders(RegionId region) {
  const auto holds = [&](const std::set<std::uint64_t>& held) {
    if (region == kEveryRegion) return !held.empty();
    const auto found = leaving_.find(region);
    return found != leaving_.end() && std::any_of(found->second.begin(), found->second.end(),
                                                  [&](std::uint64_t id) { return held.contains(id); });
  };
  std::vector<std::string> names;
  for (auto& [id, peer] : peers_) {
    if (!holds(peer->unmapping) && (region != kEveryRegion || !peer->down)) continue;
    fail(*peer,
         "it was told that memory is deregistered and did not say in time that it has unmapped it; its "
         "process may keep it mapped until it ends");
    if (peer->parted || peer->given_up) continue;  // below
    peer->given_up = true;  // it has not parted, since kernels here still read its memory
    peer->unmapping.clear();
    names.push_back(peer->name);
  }
  forget_unheld();
  for (Parting& parting : partings_) {
    if (!holds(parting.held)) continue;
    names.push_back(parting.name);
    parting.held.clear();  // what else it has mapped is not waited for, either
  }
  forget_partings();
  return names;
}

bool CudaIpcTransport::is_held(std::uint64_t memory_id) const noexcept {
  const auto holds = [memory_id](const auto& holder) { return holder.held.contains(memory_id); };
  return std::any_of(peers_.begin(), peers_.end(),
                     [&](const auto& entry) { return entry.second->unmapping.contains(memory_id); }) ||
         std::any_of(partings_.begin(), partings_.end(), holds);
}

void CudaIpcTransport::forget_unheld() {
  for (auto& [region, memories] : leaving_)
    std::erase_if(memories, [this](std::uint64_t id) { return !is_held(id); });
  std::erase_if(leaving_, [](const auto& entry) { return entry.second.empty(); });
}

void CudaIpcTransport::forget_partings() {
  for (const Parting& parting : partings_)
    if (parting.held.empty()) reactor_.remove(parting.socket.get());
  std::erase_if(partings_, [](const Parting& parting) { return parting.held.empty(); });
  forget_unheld();
}

CudaIpcTransport::Message CudaIpcTransport::memory_message(
    const std::pair<const std::uint64_t, Exported>& entry) noexcept {
  Message message;
  message.kind = MessageKind::kMemory;
  message.memory_id = entry.first;
  message.base = entry.second.memory.base;
  message.nbytes = entry.second.memory.nbytes;
  message.handle_kind = entry.second.memory.kind;
  message.handle = entry.second.memory.handle;
  return message;
}

// ---- peers' memory ----

Status CudaIpcTransport::attach(PeerId peer_id, const RemoteRegion& region) {
  const auto found = peers_.find(peer_id);
  if (found == peers_.end() || !found->second->up || found->second->down)
    return {Code::kRailFailed, "cuda_ipc: not connected to this peer"};
  Peer& peer = *found->second;
  Keys keys;
  if (region.keys.size() != sizeof keys ||
      std::memcmp(region.keys.data(), keys.version.data(), sizeof keys.version) != 0)
    return {Code::kUnsupported,
            "cuda_ipc: keys of " + std::to_string(region.keys.size()) + " bytes are not of this version"};
  std::memcpy(&keys, region.keys.data(), sizeof keys);
  Attached attached;
  attached.base = region.base;
  attached.spans = region.spans;
  attached.last_memory = keys.last_memory;
  place(peer, attached);
  if (!attached.failure.empty()) return {Code::kUnsupported, "cuda_ipc: " + attached.failure};
  peer.regions[region.id] = std::move(attached);
  return {};
}

void CudaIpcTransport::detach(PeerId peer_id, RegionId region) noexcept {
  const auto found = peers_.find(peer_id);
  if (found == peers_.end() || found->second->regions.erase(region) == 0) return;
  drop_unused(*found->second);
}

// Brings a region and its memory together, as soon as all of it has been told of.
void CudaIpcTransport::place(Peer& peer, Attached& region) {
  if (region.placement || !region.failure.empty() || peer.last_memory < region.last_memory) return;
  Result<gpu::Placement> placement = placement_of(peer, region);
  if (placement.ok())
    region.placement = std::move(placement).value();
  else
    region.failure = "the region of " + peer.name + ": " + placement.status().message();
}

Result<gpu::Placement> CudaIpcTransport::placement_of(Peer& peer, const Attached& region) {
  std::vector<gpu::Extent> extents;
  for (const MemorySpan& span : region.spans) {
    if (span.offset > UINT64_MAX - region.base || span.nbytes > UINT64_MAX - region.base - span.offset)
      return Status(Code::kUnsupported, "it ends beyond the address space");
    const gpu::Address begin = region.base + span.offset, end = begin + span.nbytes;
    for (gpu::Address at = begin; at < end;) {
      const auto found = std::find_if(peer.memories.begin(), peer.memories.end(), [at](const auto& entry) {
        const gpu::ExportedMemory& memory = entry.second.exported;
        return at >= memory.base && at - memory.base < memory.nbytes;
      });
      if (found == peer.memories.end())
        return Status(Code::kUnsupported, "it lies outside the memory that its owner has told of");
      Peer::Memory& memory = found->second;
      if (!memory.mapped) {
        Result<gpu::PeerMemory> mapped =
            gpu::PeerMemory::map(driver_, context_.get(), options_.device, memory.exported);
        if (!mapped.ok())
          return Status(Code::kUnsupported,
                        "GPU " + std::to_string(options_.device) + " cannot read it by its " +
                            std::string(gpu::name_of(memory.exported.kind)) + " (" +
                            mapped.status().message() +
                            "): the two GPUs need NVLink or PCIe peer access, and must be visible to both "
                            "processes");
        memory.mapped = std::move(mapped).value();
      }
      const std::uint64_t within = at - memory.exported.base;
      const std::uint64_t nbytes = std::min(end - at, memory.exported.nbytes - within);
      extents.push_back({at - region.base, nbytes, memory.mapped->address() + within});
      at += nbytes;
    }
  }
  return gpu::Placement(std::move(extents));
}

// Unmaps what no region lies in, once no kernel can read there.
void CudaIpcTransport::drop_unused(Peer& peer) {
  if (peer.num_flights == 0) return unmap_unused(peer);
  peer.unused_after = peer.last_ticket;
}

void CudaIpcTransport::unmap_unused(Peer& peer) {
  peer.unused_after = 0;
  for (auto& [id, memory] : peer.memories) {
    if (!memory.mapped) continue;
    const gpu::ExportedMemory& exported = memory.exported;
    const bool used = std::any_of(peer.regions.begin(), peer.regions.end(), [&](const auto& entry) {
      const Attached& region = entry.second;
      return std::any_of(region.spans.begin(), region.spans.end(), [&](const MemorySpan& span) {
        const gpu::Address begin = region.base + span.offset;
        return begin < exported.base + exported.nbytes && exported.base < begin + span.nbytes;
      });
    });
    if (!used) memory.mapped.reset();
  }
}

std::size_t CudaIpcTransport::num_mappings() const noexcept {
  std::size_t count = 0;
  for (const auto& [id, peer] : peers_)
    for (const auto& [memory_id, memory] : peer->memories) count += memory.mapped.has_value();
  return count;
}

// ---- peers ----

Result<PeerId> CudaIpcTransport::connect(UniqueFd socket, const ConnectInfo& info) {
  if (!lost_why_.empty()) return Status(Code::kRailFailed, "cuda_ipc: the GPU has failed in this process");
  if (!*fences_)
    return Status(Code::kSystem, "cuda_ipc: the fence table's descriptor could not be duplicated");
  const PeerId id = next_peer_++;
  Peer& peer = *(peers_[id] = std::make_unique<Peer>(*this, id, std::move(socket), info.peer_name));
  if (Status added = reactor_.add(peer.channel.fd(), EPOLLIN, peer); !added.ok()) {
    peers_.erase(id);
    return added;
  }
  Message hello;
  hello.nbytes = kFenceTableNbytes;
  tell(peer, hello, fences_);
  for (const auto& entry : exported_) tell(peer, memory_message(entry), entry.second.fd);
  return id;
}

void CudaIpcTransport::disconnect(PeerId id) noexcept {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  Peer& peer = *found->second;
  end_work(peer, Code::kCancelled, {});
  go_down(peer);
  std::erase_if(ready_,
                [id](const Completion& c) { return c.kind != CompletionKind::kWork && c.peer == id; });
  peer.gone = true;
  settle(peer);
}

void CudaIpcTransport::go_down(Peer& peer) {
  if (!std::exchange(peer.down, true)) reactor_.remove(peer.channel.fd());
}

// After flights of it have landed, or where there are none.
void CudaIpcTransport::settle(Peer& peer) {
  while (!peer.going.empty() && (peer.num_flights == 0 || peer.going.front().after <= landed_)) {
    Message message;
    message.kind = MessageKind::kMemoryUnmapped;
    message.memory_id = peer.going.front().memory_id;
    peer.going.pop_front();
    tell(peer, message, nullptr);
  }
  if (peer.unused_after != 0 && peer.unused_after <= landed_) unmap_unused(peer);
  if (peer.down && !peer.parted && peer.num_flights == 0) part(peer);
  if (const PeerId id = peer.id; peer.gone && peer.parted) peers_.erase(id);
}

void CudaIpcTransport::part(Peer& peer) {
  peer.parted = true;
  peer.regions.clear();
  peer.memories.clear();
  peer.going.clear();
  peer.fences = {};
  const UniqueFd& ending =
      partings_.emplace_back(*this, peer.name, peer.channel.release(), std::move(peer.unmapping)).socket;
  peer.unmapping.clear();
  std::set<std::uint64_t>& held = partings_.back().held;
  for (const auto& [id, exported] : exported_) held.insert(id);  // it was told of all
  if (peer.given_up) held.clear();
  ::shutdown(ending.get(), SHUT_WR);
  static_cast<void>(reactor_.add(ending.get(), EPOLLIN, partings_.back()));  // else it is given up one day
  if (partings_.size() > kMaxPartings) partings_.front().held.clear();
  forget_partings();
}

void CudaIpcTransport::fail(Peer& peer, const std::string& why) {
  if (peer.down) return;
  go_down(peer);
  const std::string detail = "cuda_ipc: the rail to " + peer.name + " is down: " + why;
  end_work(peer, Code::kRailFailed, detail);
  ready_.push_back({CompletionKind::kRailDown, 0, peer.id, Code::kRailFailed, detail});
  settle(peer);  // kernels that still run read what is unmapped then
}

// What is under way lands, or ends with the device.
void CudaIpcTransport::fail_all(const std::string& why) {
  if (lost_why_.empty()) lost_why_ = why;
  for (auto& [id, peer] : peers_) fail(*peer, why);
}

void CudaIpcTransport::end_work(Peer& peer, Code code, const std::string& detail) {
  for (const Work& work : peer.queue) ready_.push_back(failed(work.id, code, detail));
  peer.queue.clear();
}

void CudaIpcTransport::tell(Peer& peer, const Message& message, SharedFd fd) {
  if (peer.down) return;
  peer.channel.queue(std::as_bytes(std::span(&message, 1)), std::move(fd));
  flush(peer);
}

void CudaIpcTransport::flush(Peer& peer) {
  if (Status flushed = peer.channel.flush(); !flushed.ok()) return fail(peer, flushed.message());
  if (peer.channel.wants_write() == peer.watches_write) return;
  peer.watches_write = peer.channel.wants_write();
  reactor_.modify(peer.channel.fd(), peer.watches_write ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void CudaIpcTransport::on_ready(Peer& peer, std::uint32_t events) {
  if (events & EPOLLOUT) flush(peer);
  if (peer.down || (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0) return;
  if (Status received = receive(peer); !received.ok()) fail(peer, received.message());
}

Status CudaIpcTransport::receive(Peer& peer) {
  for (;;) {
    Result<MessageChannel::Received> next = peer.channel.receive();
    if (!next.ok()) return next.status();
    if (next.value().message.empty()) return {};
    Message message;
    std::memcpy(&message, next.value().message.data(), sizeof message);
    UniqueFd fd = std::move(next.value().fd);
    if (message.magic != Message().magic || message.reserved != 0)
      return {Code::kRailFailed, "it sent a message that is not of this transport's version"};
    if ((message.kind == MessageKind::kHello) == peer.up)
      return {Code::kRailFailed, peer.up ? "it said hello twice" : "it did not begin with a hello"};
    const bool by_fd =
        message.kind == MessageKind::kHello ||
        (message.kind == MessageKind::kMemory && message.handle_kind == gpu::HandleKind::kPosixFd);
    if (static_cast<bool>(fd) != by_fd)
      return {Code::kRailFailed, "it sent a message without its descriptor, or one too many"};
    Status status;
    switch (message.kind) {
      case MessageKind::kHello: status = on_hello(peer, message, std::move(fd)); break;
      case MessageKind::kMemory: status = on_memory(peer, message, std::move(fd)); break;
      case MessageKind::kMemoryGone: status = on_memory_gone(peer, message.memory_id); break;
      case MessageKind::kMemoryUnmapped: status = on_memory_unmapped(peer, message.memory_id); break;
      default: status = {Code::kRailFailed, "it sent a message of an unknown kind"};
    }
    if (!status.ok()) return status;
  }
}

Status CudaIpcTransport::on_hello(Peer& peer, const Message& message, UniqueFd fences) {
  if (message.nbytes != kFenceTableNbytes)
    return {Code::kRailFailed, "its fence table has " + std::to_string(message.nbytes) + " bytes, not " +
                                   std::to_string(kFenceTableNbytes)};
  if (Status usable = check_memfd(fences.get(), message.nbytes); !usable.ok()) return usable;
  Result<PeerMapping> mapping = PeerMapping::map(fences.get(), message.nbytes);
  if (!mapping.ok()) return mapping.status();
  peer.fences = std::move(mapping).value();
  peer.up = true;
  ready_.push_back({CompletionKind::kRailUp, 0, peer.id, Code::kOk, {}});
  return {};
}

Status CudaIpcTransport::on_memory(Peer& peer, const Message& message, UniqueFd fd) {
  if (message.handle_kind < gpu::HandleKind::kFabric || message.handle_kind > gpu::HandleKind::kIpc)
    return {Code::kRailFailed, "it sent memory by an unknown kind of handle"};
  if (message.nbytes == 0 || message.nbytes > UINT64_MAX - message.base)
    return {Code::kRailFailed, "it sent memory of impossible size"};
  if (peer.memories.size() == kMaxMemories)
    return {Code::kRailFailed, "it sent more than " + std::to_string(kMaxMemories) + " allocations"};
  if (message.memory_id <= peer.last_memory) return {Code::kRailFailed, "it sent the same memory twice"};
  peer.last_memory = message.memory_id;
  Peer::Memory& memory = peer.memories[message.memory_id];
  memory.exported.kind = message.handle_kind;
  memory.exported.base = message.base;
  memory.exported.nbytes = message.nbytes;
  memory.exported.handle = message.handle;
  memory.exported.fd = std::move(fd);
  for (auto& [id, region] : peer.regions) place(peer, region);
  return {};
}

// Its owner waits to free it: regions there have ended, or end with the next frame.
Status CudaIpcTransport::on_memory_gone(Peer& peer, std::uint64_t memory_id) {
  const auto found = peer.memories.find(memory_id);
  if (found == peer.memories.end()) return {Code::kRailFailed, "it took back memory that it had not told of"};
  if (peer.channel.num_queued() + peer.going.size() > kMaxMemories)
    return {Code::kRailFailed, "it does not read the answers to what it says"};
  const gpu::ExportedMemory& exported = found->second.exported;
  for (auto& [id, region] : peer.regions) {
    if (!region.placement) continue;  // what it lies in is to come, maybe at the same address
    for (const MemorySpan& span : region.spans) {
      const gpu::Address begin = region.base + span.offset;
      if (begin >= exported.base + exported.nbytes || exported.base >= begin + span.nbytes) continue;
      region.placement.reset();
      region.failure = "the region of " + peer.name + ": its memory is gone";
      region.failure_code = Code::kRailFailed;  // the frame that says so is on its way
    }
  }
  // Nothing is launched there any more; what was may still read.
  peer.going.push_back({peer.last_ticket, memory_id, std::move(found->second.mapped)});
  peer.memories.erase(found);
  settle(peer);
  return {};
}

Status CudaIpcTransport::on_memory_unmapped(Peer& peer, std::uint64_t memory_id) {
  if (peer.unmapping.erase(memory_id) == 0)
    return {Code::kRailFailed, "it says that it has unmapped memory that it was not told to"};
  forget_unheld();
  return {};
}

// ---- work ----

PostResult CudaIpcTransport::post(PeerId id, std::span<const Work> batch) noexcept {
  const auto found = peers_.find(id);
  if (found == peers_.end() || found->second->down) return {0, Code::kRailFailed};
  Peer& peer = *found->second;
  if (!peer.up) return {0, Code::kAgain};
  const std::size_t accepted = std::min(batch.size(), kMaxQueued - peer.queue.size());
  for (const Work& work : batch.first(accepted)) peer.queue.push_back(work);
  return {accepted, accepted == batch.size() ? Code::kOk : Code::kAgain};
}

void CudaIpcTransport::cancel(WorkId id) noexcept {
  for (auto& [peer_id, peer] : peers_) {
    const auto work =
        std::find_if(peer->queue.begin(), peer->queue.end(), [id](const Work& w) { return w.id == id; });
    if (work == peer->queue.end()) continue;
    peer->queue.erase(work);
    ready_.push_back(failed(id, Code::kCancelled, {}));
    return;
  }
}

std::size_t CudaIpcTransport::poll(std::span<Completion> completions) noexcept {
  land();
  while (ready_.size() < completions.size() && run_next()) {}
  const std::size_t count = std::min(completions.size(), ready_.size());
  for (std::size_t i = 0; i < count; ++i) {
    completions[i] = std::move(ready_.front());
    ready_.pop_front();
  }
  return count;
}

bool CudaIpcTransport::busy() const noexcept {
  if (!ready_.empty() || !flights_.empty()) return true;
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) {
    const Peer& peer = *entry.second;
    return std::any_of(peer.queue.begin(), peer.queue.end(),
                       [&](const Work& work) { return can_run(peer, work); });
  });
}

// Work waits while its region's memory is still on its way. Whatever will fail runs at once.
bool CudaIpcTransport::can_run(const Peer& peer, const Work& work) noexcept {
  if (work.kind != WorkKind::kFetch) return true;
  const auto found = peer.regions.find(work.move->remote_region);
  return found == peer.regions.end() || found->second.placement || !found->second.failure.empty();
}

CudaIpcTransport::Peer* CudaIpcTransport::next_peer() noexcept {
  auto at = peers_.upper_bound(last_served_);
  for (std::size_t i = 0; i < peers_.size(); ++i, ++at) {
    if (at == peers_.end()) at = peers_.begin();
    Peer& peer = *at->second;
    const auto next =
        std::find_if(peer.queue.begin(), peer.queue.end(), [&](const Work& w) { return can_run(peer, w); });
    if (next == peer.queue.end()) continue;
    std::rotate(peer.queue.begin(), next, next + 1);
    last_served_ = at->first;
    return &peer;
  }
  return nullptr;
}

// Ends or submits the next work of the next peer. False where there is nothing, or no room.
bool CudaIpcTransport::run_next() {
  if (flying_nbytes_ >= kFlyingNbytes) return false;
  Peer* const peer = next_peer();
  if (peer == nullptr) return false;
  const Work& work = peer->queue.front();
  Attached* region = nullptr;
  Completion ended;
  if (work.kind == WorkKind::kCheckFence) {
    ended = check_fence(*peer, work);
  } else if (work.kind != WorkKind::kFetch) {
    ended = failed(work.id, Code::kUnsupported, "cuda_ipc: the destination fetches; nothing is sent");
  } else if (const auto found = peer->regions.find(work.move->remote_region); found == peer->regions.end()) {
    ended = failed(work.id, Code::kRegionGone, "cuda_ipc: the region of " + peer->name + " is not attached");
  } else if (!found->second.failure.empty()) {
    ended = failed(work.id, found->second.failure_code, "cuda_ipc: " + found->second.failure);
  } else {
    region = &found->second;
  }
  if (region != nullptr) return submit(*peer, *region);
  peer->queue.pop_front();
  ready_.push_back(std::move(ended));
  return true;
}

// One launch for the piece at the front and those behind it that go on where it ends, in its layer or, where
// pieces are whole layers, in the next.
bool CudaIpcTransport::submit(Peer& peer, Attached& region) {
  const Move& move = *peer.queue.front().move;
  const Piece piece = move.grid.piece(peer.queue.front().piece);
  gpu::Part part{piece.layer, 1, piece.num_pairs, piece.num_fine};
  Flight flight{0, peer.id, {peer.queue.front().id}, piece_nbytes(*move.program, piece)};
  std::size_t num_works = 1;
  while (num_works < peer.queue.size() && flight.nbytes < kLaunchNbytes) {
    const Work& next = peer.queue[num_works];
    if (next.kind != WorkKind::kFetch || next.move.get() != &move ||
        next.piece != peer.queue.front().piece + num_works)
      break;
    const Piece more = move.grid.piece(next.piece);
    if (move.grid.pieces_per_layer() == 1) {
      ++part.num_layers;
    } else if (more.layer == piece.layer && stream_->has_room_for_two(part.num_pairs + more.num_pairs)) {
      part.num_pairs += more.num_pairs;
      part.num_fine += more.num_fine;  // a layer's last pairs
    } else {
      break;
    }
    flight.works.push_back(next.id);
    flight.nbytes += piece_nbytes(*move.program, more);
    ++num_works;
  }
  const auto ids = [&](const std::vector<std::uint32_t>& table) {
    return std::span(table).subspan(piece.first_pair, part.num_pairs);
  };
  const Result<gpu::CopyStream::Ticket> ticket =
      stream_->submit(*move.program, part, ids(move.src_ids), ids(move.dst_ids), *region.placement,
                      gpu::Placement(reinterpret_cast<gpu::Address>(move.local_base)));
  if (!ticket.ok() && ticket.status().code() == Code::kAgain) return false;
  peer.queue.erase(peer.queue.begin(), peer.queue.begin() + static_cast<std::ptrdiff_t>(num_works));
  const bool is_lost = !ticket.ok() && ticket.status().code() == Code::kSystem;
  if (!ticket.ok() && !is_lost) {
    for (const WorkId work : flight.works)
      ready_.push_back(failed(work, ticket.status().code(), "cuda_ipc: " + ticket.status().message()));
    return true;
  }
  // Where the device is lost some of it may be under way, and its end will not be told.
  flight.ticket = peer.last_ticket = is_lost ? kNeverTicket : ticket.value();
  ++peer.num_flights;
  flying_nbytes_ += flight.nbytes;
  flights_.push_back(std::move(flight));
  if (is_lost) fail_all(ticket.status().message());  // not of this peer's making alone
  return true;
}

void CudaIpcTransport::land() {
  if (flights_.empty()) return;
  gpu::CopyStream::Ticket ended = stream_->done();
  bool runs = true;
  if (flights_.front().ticket > ended) {
    // A device that refuses launches may still run earlier ones; one that has failed runs none.
    if (lost_why_.empty()) {
      if (++idle_polls_ < kPollsPerCheck) return;
      idle_polls_ = 0;
      const Status status = stream_->check();
      if (status.ok()) return;
      fail_all(status.message());
    }
    runs = stream_->is_running();
    ended = stream_->done();
  }
  idle_polls_ = 0;
  while (!flights_.empty() && (!runs || flights_.front().ticket <= ended)) {
    const Flight flight = std::move(flights_.front());
    flights_.pop_front();
    end_flight(flight, flight.ticket <= ended);
  }
}

void CudaIpcTransport::end_flight(const Flight& flight, bool is_done) {
  Peer& peer = *peers_.at(flight.peer);
  for (const WorkId work : flight.works)
    ready_.push_back(!is_done    ? failed(work, Code::kRailFailed, "cuda_ipc: " + lost_why_)
                     : peer.gone ? failed(work, Code::kCancelled, {})
                                 : done(work));
  flying_nbytes_ -= flight.nbytes;
  landed_ = flight.ticket;
  --peer.num_flights;
  settle(peer);
}

// As shm's: pages were read before, by kernels whose end was acquired, and the source moves its word on
// before it lets anyone write to the pages.
Completion CudaIpcTransport::check_fence(Peer& peer, const Work& work) const noexcept {
  if (work.fence_slot >= FenceTable::kNumSlots)
    return failed(work.id, Code::kInternal,
                  "cuda_ipc: there is no fence slot " + std::to_string(work.fence_slot));
  const auto* words = reinterpret_cast<const std::atomic<std::uint64_t>*>(peer.fences.data());
  std::atomic_thread_fence(std::memory_order_acquire);
  if (words[work.fence_slot].load(std::memory_order_relaxed) != work.fence_generation)
    return failed(work.id, Code::kLeaseEnded,
                  "cuda_ipc: " + peer.name + " ended the right to read while the bytes moved");
  return done(work.id);
}

}  // namespace kvxfer
