#include "transports/loopback/loopback_transport.h"

#include <sys/random.h>

#include <array>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "core/everlasting.h"
#include "transports/common/peer_fences.h"

namespace kvxfer {

using loopback::Exposure;
using loopback::Hello;

namespace {

const std::array<std::byte, 16>& process_token() {
  static const auto token = [] {
    std::array<std::byte, 16> bytes{};
    // getrandom() returns 16 bytes whole.
    static_cast<void>(::getrandom(bytes.data(), bytes.size(), 0));
    return bytes;
  }();
  return token;
}

}  // namespace

// A peer holds the lock shared while it reads a slice; the owner takes it exclusively to withdraw something.
// So when deregister_memory has returned no peer reads the memory, and it may be unmapped.
class loopback::Exposure {
 public:
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
    static Everlasting<Directory> the_directory;
    return the_directory.get();
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

LoopbackTransport::LoopbackTransport(Reactor& reactor, const FenceTable& fences)
    : CopyingRail(reactor), exposure_(Exposure::open(fences)) {}

LoopbackTransport::~LoopbackTransport() { exposure_->close(); }

Capabilities LoopbackTransport::capabilities() const noexcept {
  return {.name = "loopback", .one_sided = true};
}

// ---- memory ----

Result<RegionKeys> LoopbackTransport::register_memory(const LocalRegion& region, const Pinned&) {
  const std::unique_lock lock(exposure_->mutex);
  exposure_->regions[region.id] = {region.base, end_of(region.spans)};
  // The region's id is enough for a peer. Its address lets attach() notice a mix-up.
  const auto address = reinterpret_cast<std::uintptr_t>(region.base);
  RegionKeys keys(sizeof address);
  std::memcpy(keys.data(), &address, sizeof address);
  return keys;
}

void LoopbackTransport::deregister_memory(RegionId region) noexcept {
  const std::unique_lock lock(exposure_->mutex);
  exposure_->regions.erase(region);
}

Status LoopbackTransport::attach(PeerId id, const RemoteRegion& region) {
  const Result<Peer*> found = find_up(id);
  if (!found.ok()) return found.status();
  Peer& peer = *found.value();
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

void LoopbackTransport::detach(PeerId id, RegionId region) noexcept {
  if (Peer* const peer = find(id)) peer->attached.erase(region);
}

// ---- peers ----

Result<PeerId> LoopbackTransport::connect(UniqueFd socket, const ConnectInfo& info) {
  return add_peer(std::move(socket), info);
}

void LoopbackTransport::greet(Peer& peer) {
  Hello hello;
  hello.process = process_token();
  hello.exposure = exposure_->number;
  tell(peer, hello);
}

Status LoopbackTransport::on_hello(Peer& peer, const Hello& hello, UniqueFd) {
  if (hello.process != process_token())
    return {Code::kRailFailed, "it is in another process, or uses another copy of this library"};
  peer.exposure = Exposure::find(hello.exposure);
  if (peer.exposure == nullptr) return {Code::kRailFailed, "it is closed"};
  return {};
}

// A hello is the only message.
Status LoopbackTransport::on_message(Peer&, const Hello&, UniqueFd) { return {}; }

void LoopbackTransport::on_down(Peer& peer) {
  peer.channel.close();
  peer.exposure.reset();
}

// ---- work ----

Result<std::uint64_t> LoopbackTransport::copy_slice(Peer& peer, Peer::Copy& copy, std::string&) {
  const RegionId region = copy.work.move->remote_region;
  const auto attached = peer.attached.find(region);
  const std::shared_lock reading(peer.exposure->mutex);
  const auto exposed = peer.exposure->regions.find(region);
  if (attached == peer.attached.end() || exposed == peer.exposure->regions.end())
    return Status(Code::kRegionGone, peer.name + " deregistered the region");
  if (copy.src_end > attached->second)
    return Status(Code::kInternal, "the piece ends outside the region of " + peer.name);
  MappedSource source(exposed->second.base);
  return copy.slices.advance(source);
}

Status LoopbackTransport::compare_fence(Peer& peer, const Fence& fence) {
  const std::shared_lock reading(peer.exposure->mutex);
  const FenceTable* const fences = peer.exposure->fences;
  if (fences == nullptr) return {Code::kRailFailed, peer.name + " is closed"};
  const bool stands = fence.slot < FenceTable::kNumSlots && holds(fences->words()[fence.slot], fence);
  return stands ? Status() : right_ended(peer);
}

}  // namespace kvxfer
