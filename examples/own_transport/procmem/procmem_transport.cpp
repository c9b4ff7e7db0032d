// A transport of one's own: the destination reads the source's pages through /proc/PID/mem.
//
// It carries host memory between processes of one host and one user. The engine of kvxfer asks a transport for four
// things, and this file answers them in this order:
//
//   Hello           what the two ends of a rail say to each other first: here, where the sender's fence words are
//   Source          how bytes of the peer's region are read
//   ProcMem         the rail: it attaches regions, copies a slice, and compares a fence word
//   procmem_transport   what agents, Python and `kvxfer doctor` know of it
//
// transports/common/copying_rail.h brings the rest: queues, turns, cancelling, what is told and when.
// docs/tutorials/own-transport.md walks through it.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/copy/executor.h"
#include "kvxfer/transport_kind.h"
#include "transports/common/copying_rail.h"
#include "transports/common/peer_fences.h"

namespace kvxfer {
namespace {

// --8<-- [start:hello]
struct Hello {
  std::array<char, 8> magic{'k', 'v', 'x', 'p', 'm', 'e', 'm', '1'};
  std::uint64_t fences_nbytes = 0;  // of the fence table, whose descriptor comes with this message

  bool is_of_this_version() const noexcept { return magic == Hello().magic; }
  bool is_hello() const noexcept { return true; }
  Status check(bool has_fd) const {
    return has_fd ? Status() : Status(Code::kRailFailed, "it sent no fence table");
  }
};

struct Peer : RailPeer<Hello> {
  using RailPeer::RailPeer;
  UniqueFd memory;  // /proc/PID/mem
  PeerFences fences;
  struct Attached {
    std::uint64_t base, end;  // address in the peer's process; end of its bytes, from the base
  };
  std::unordered_map<RegionId, Attached> attached;
};
// --8<-- [end:hello]

// --8<-- [start:source]
class Source final : public CopySource {
 public:
  Source(int memory, std::uint64_t base) noexcept : memory_(memory), base_(base) {}

  // Some pairs of blocks, whole, straight into the pages of the destination.
  Status copy(const Move& move, const Piece& pairs) override {
    Status status;
    for_each_run(move.program->view(), pairs, move.src_ids.data(), move.dst_ids.data(),
                 [&](std::uint64_t src, std::uint64_t dst, std::uint64_t nbytes) {
                   if (status.ok()) status = read_into(move.local->base + dst, src, nbytes);
                 });
    return status;
  }
  // A part of a pair that is larger than a slice.
  Result<const std::byte*> read(std::uint64_t offset, std::size_t nbytes) override {
    buffer_.resize(nbytes);
    if (Status status = read_into(buffer_.data(), offset, nbytes); !status.ok()) return status;
    return buffer_.data();
  }

 private:
  Status read_into(std::byte* to, std::uint64_t offset, std::uint64_t nbytes) {
    while (nbytes > 0) {
      const ssize_t got = ::pread(memory_, to, nbytes, static_cast<off_t>(base_ + offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return {Code::kSystem, std::string("pread of its memory: ") + std::strerror(errno)};
      if (got == 0) return {Code::kRailFailed, "its process has ended"};
      to += got;
      offset += static_cast<std::uint64_t>(got);
      nbytes -= static_cast<std::uint64_t>(got);
    }
    return {};
  }

  const int memory_;
  const std::uint64_t base_;
  std::vector<std::byte> buffer_;
};
// --8<-- [end:source]

// --8<-- [start:rail]
class ProcMem final : public CopyingRail<Peer> {
 public:
  ProcMem(Reactor& reactor, const FenceTable& fences) : CopyingRail(reactor), fences_(fences) {}

  Capabilities capabilities() const noexcept override {
    return {.name = "procmem", .one_sided = true, .converts = false};
  }

  // Nothing is pinned, and the address that the engine tells peers is all that they need.
  Result<RegionKeys> register_memory(const LocalRegion&, const Pinned&) override { return RegionKeys(); }
  void deregister_memory(RegionId) noexcept override {}

  Status attach(PeerId id, const RemoteRegion& region) override {
    const Result<Peer*> peer = find_up(id);
    if (!peer.ok()) return peer.status();
    peer.value()->attached[region.id] = {region.base, end_of(region.spans)};
    return {};
  }
  void detach(PeerId id, RegionId region) noexcept override {
    if (Peer* const peer = find(id)) peer->attached.erase(region);
  }

  Result<PeerId> connect(UniqueFd socket, const ConnectInfo& info) override {
    if (Status shared = fences_.share(); !shared.ok()) return shared;
    return add_peer(std::move(socket), info);
  }

 private:
  void greet(Peer& peer) override {
    Hello hello;
    hello.fences_nbytes = FenceTable::kNbytes;
    tell(peer, hello, fences_.fd());
  }

  // Not ok: this rail does not come up, and pages go over others.
  Status on_hello(Peer& peer, const Hello& hello, UniqueFd fd) override {
    Result<PeerFences> fences = PeerFences::map(fd, hello.fences_nbytes);
    if (!fences.ok()) return fences.status();
    peer.fences = std::move(fences).value();
    ucred process{};  // as the kernel says, and not as the peer does
    socklen_t nbytes = sizeof process;
    if (::getsockopt(peer.channel.fd(), SOL_SOCKET, SO_PEERCRED, &process, &nbytes) != 0)
      return Status::from_errno("getsockopt(SO_PEERCRED)", errno);
    const std::string path = "/proc/" + std::to_string(process.pid) + "/mem";
    peer.memory = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    return peer.memory ? Status() : Status::from_errno(path.c_str(), errno);
  }
  Status on_message(Peer&, const Hello&, UniqueFd) override { return {}; }  // there is the hello alone
  void on_down(Peer& peer) override {
    peer.channel.close();
    peer.memory.reset();
    peer.fences = {};
  }

  Result<std::uint64_t> copy_slice(Peer& peer, Peer::Copy& copy, std::string& broken) override {
    const Move& move = *copy.work.move;
    const auto found = peer.attached.find(move.remote_region);
    if (found == peer.attached.end()) return Status(Code::kRegionGone, peer.name + " has no such region");
    if (!move.program->conversions.empty())
      return Status(Code::kUnsupported, "elements are not converted on this rail");
    if (copy.src_end > found->second.end)
      return Status(Code::kInternal, "the piece ends outside the region of " + peer.name);
    Source source(peer.memory.get(), found->second.base);
    Result<std::uint64_t> cost = copy.slices.advance(source);
    if (!cost.ok() && cost.status().code() == Code::kRailFailed) broken = cost.status().message();
    return cost;
  }

  // After the last byte of a piece: has the source ended the right to read meanwhile?
  Status compare_fence(Peer& peer, const Fence& fence) override {
    return peer.fences.say_it_holds(fence) ? Status() : right_ended(peer);
  }

  OwnFences fences_;
};
// --8<-- [end:rail]

}  // namespace

// --8<-- [start:kind]
extern const TransportKind procmem_transport;
constinit const TransportKind procmem_transport{
    .name = "procmem",
    .purpose = "moves pages between processes of one user on one host, through /proc/PID/mem",
    .remedy = "the kernel lets a process read another one of its user where kernel.yama.ptrace_scope is 0",
    .options = {},
    .memory = MemoryKind::kHost,
    .reach = Reach::kHost,
    .socket = RailSocket::kUnix,
    .rank = 2,
    .is_default = false,  // for agents that name it
    .why_off = [](const std::vector<GpuPart>&) { return std::string(); },
    .make = [](const RailParts& parts,
               const OptionValues&) -> Result<std::vector<std::unique_ptr<Transport>>> {
      std::vector<std::unique_ptr<Transport>> rails;
      rails.push_back(std::make_unique<ProcMem>(parts.reactor, parts.fences));
      return rails;
    },
};
// --8<-- [end:kind]

}  // namespace kvxfer
