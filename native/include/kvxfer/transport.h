// The interface of a transport. One instance is one rail of this agent; it serves many peers.
//
// Threads: every method but prepare() is called under the agent's progress gate, so by one thread at a time,
// never concurrently. Nothing here blocks, nothing here takes the GIL. The destructor runs without the gate.
//
// Fences: no thread waits in one. The engine ends a right by asking that the works under it end (cancel,
// disconnect). The fence of a work is complete when poll() has returned its completion: from then on no byte
// of the work lands in our memory, and none of our bytes is read for it. A rail that can stop at once has
// the completion ready at once. A rail that cannot stop (a launched kernel runs to its end; posted READs end
// when their queue pair is reset and flushed) has the completion ready as soon as it could stop, in bounded
// time or not. Meanwhile it serves all other peers.
//
// Memory: methods that are noexcept must cope with a failed allocation. post() then accepts fewer works
// (kAgain). An accepted work completes whatever memory there is, so a transport makes room for its
// completion, and for the end of a rail, beforehand (CompletionQueue::make_room in transports/common does
// that). A completion may lack its words. Any other failed allocation ends the rail to the peer for which
// the memory was needed: kRailDown, and kRailFailed for its works. The other methods may throw
// std::bad_alloc; a connect() that throws leaves nothing behind.
//
// The flow: the progress thread authenticates a stream socket for each (peer, rail) and hands it to
// connect(). tcp moves pages over that socket, shm passes descriptors over it, verbs would exchange queue
// pairs over it. For every transport the end of the socket is the rail's death.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvxfer/budget.h"
#include "kvxfer/cipher.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/priority_classes.h"
#include "kvxfer/status.h"

namespace kvxfer {

using PeerId = std::uint32_t;  // a transport's own number for a connected peer
using WorkId = std::uint64_t;  // unique in the agent, never reused
using RegionId = std::uint64_t;  // unique in its agent, never reused: a region re-registered
// under the same name has another id (its epoch)
using TransferId = std::uint64_t;  // unique in a session

// A closed-on-destruction file descriptor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) noexcept : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), guarded_(std::exchange(other.guarded_, false)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this == &other) return *this;
    reset();
    fd_ = std::exchange(other.fd_, -1);
    guarded_ = std::exchange(other.guarded_, false);
    return *this;
  }
  ~UniqueFd() { reset(); }
  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  int release() noexcept;
  void reset(int fd = -1) noexcept;
  // Closes the descriptor in processes that are forked from now on, wherever this object is moved to: a
  // child's copy of a socket would hide our death from its peer.
  void guard() noexcept;

 private:
  int fd_ = -1;
  bool guarded_ = false;
};

// Readiness of descriptors, level-triggered. The core's epoll implements it; a test may use its own.
class Reactor {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    // `events` are EPOLLIN, EPOLLOUT, EPOLLHUP, EPOLLERR bits. May call add/modify/remove.
    virtual void on_ready(std::uint32_t events) = 0;
  };
  virtual ~Reactor() = default;
  virtual Status add(int fd, std::uint32_t events, Handler& handler) = 0;
  virtual void modify(int fd, std::uint32_t events) = 0;
  virtual void remove(int fd) noexcept = 0;  // call before closing fd
};

// The source's fence: one generation word for each transfer that it serves. A reader that moved the bytes
// itself compares the word after its last byte; a source that ends a right bumps it before the pages are
// used again. The words are in a memfd that peers on this host map read-only.
class FenceTable {
 public:
  static constexpr std::uint32_t kNumSlots = 65536;  // one agent serves so many transfers at a time
  static constexpr std::size_t kNbytes = kNumSlots * sizeof(std::uint64_t);
  static Result<std::unique_ptr<FenceTable>> create();
  ~FenceTable();

  // The memfd for peers: sealed, so that they can map it read-only alone, and filled from now on. Before this
  // call, words that no transfer has had take no memory.
  Result<int> fill() const;
  const std::atomic<std::uint64_t>* words() const noexcept { return words_; }  // kNumSlots
  std::uint64_t generation(std::uint32_t slot) const noexcept {
    return words_[slot].load(std::memory_order_acquire);
  }
  // Once this has returned, every reader that compares sees that its right has ended.
  void bump(std::uint32_t slot) noexcept;

 private:
  FenceTable() = default;
  UniqueFd fd_;
  std::atomic<std::uint64_t>* words_ = nullptr;
};

// Where memory is: the processor's, or a GPU's, which the processor must not touch.
enum class MemoryKind : std::uint8_t { kHost, kGpu };

// Some of the kinds.
class MemoryKinds {
 public:
  constexpr MemoryKinds(MemoryKind kind) noexcept : bits_(bit(kind)) {}  // NOLINT: a kind is a set of one
  static constexpr MemoryKinds none() noexcept { return MemoryKinds(); }
  constexpr bool has(MemoryKind kind) const noexcept { return (bits_ & bit(kind)) != 0; }
  constexpr bool has(MemoryKinds kinds) const noexcept { return (bits_ & kinds.bits_) == kinds.bits_; }
  constexpr MemoryKinds operator|(MemoryKinds other) const noexcept {
    MemoryKinds all = *this;
    all.bits_ = static_cast<std::uint8_t>(bits_ | other.bits_);
    return all;
  }

 private:
  static constexpr std::uint8_t bit(MemoryKind kind) noexcept {
    return static_cast<std::uint8_t>(1u << static_cast<unsigned>(kind));
  }
  constexpr MemoryKinds() = default;
  std::uint8_t bits_ = 0;
};

// The places of memory that a rail may be near to or far from: a GPU, each of the first NUMA nodes, and host
// memory whose node is not known. Nodes beyond the first ones count as not known.
class MemoryPlaces {
 public:
  static constexpr int kMostNodes = 62;
  constexpr void add(MemoryKind kind, int numa_node = -1) noexcept { bits_ |= bit(kind, numa_node); }
  constexpr bool has(MemoryKind kind, int numa_node) const noexcept {
    return (bits_ & bit(kind, numa_node)) != 0;
  }
  // Whether the place of host memory makes a difference.
  constexpr bool differ_by_node() const noexcept { return (bits_ & ~bit(MemoryKind::kGpu, -1)) != 0; }

 private:
  static constexpr std::uint64_t bit(MemoryKind kind, int numa_node) noexcept {
    if (kind == MemoryKind::kGpu) return 2;
    return numa_node < 0 || numa_node >= kMostNodes ? 1 : std::uint64_t{4} << numa_node;
  }
  std::uint64_t bits_ = 0;
};

struct MemorySpan {
  std::uint64_t offset;  // from the region's base
  std::uint64_t nbytes;
};

// The end of the furthest span, from the region's base. A peer may claim any number: at most UINT64_MAX.
inline std::uint64_t end_of(std::span<const MemorySpan> spans) noexcept {
  std::uint64_t end = 0;
  for (const MemorySpan& span : spans) {
    const std::uint64_t own = span.nbytes > UINT64_MAX - span.offset ? UINT64_MAX : span.offset + span.nbytes;
    if (own > end) end = own;
  }
  return end;
}

// Memory that the engine registers: some spans at ascending addresses in this process.
struct LocalRegion {
  RegionId id = 0;
  std::byte* base = nullptr;
  std::vector<MemorySpan> spans;
  MemoryKind kind = MemoryKind::kHost;  // kGpu: base is the device's, not to be touched by the processor
  int device = -1;  // kGpu: index of the device; -1 where it is not known
  // kHost: the node that its pages lie on; -1 if it is not known, or if they lie on several.
  int numa_node = -1;
};

// Memory at an address that no agent has registered: a packer's, a test's.
inline std::shared_ptr<const LocalRegion> unregistered(std::byte* base, MemoryKind kind = MemoryKind::kHost) {
  auto region = std::make_shared<LocalRegion>();
  region->base = base;
  region->kind = kind;
  return region;
}

// Keeps the memory of one region registered with one rail's device. The last reference may go on any thread,
// and dropping it may take long. The agent holds one reference, and drops it without the gate.
using Pinned = std::shared_ptr<const void>;

// What a peer must know to reach a region over one rail (instance of a transport) of its owner; opaque to
// the core, at most kMaxKeyBytes, carried in the REGION frame. A peer's rail gets the keys of the instance
// that it is connected to. 64 KiB hold the packed keys of some hundred memory registrations.
using RegionKeys = std::vector<std::byte>;
inline constexpr std::size_t kMaxKeyBytes = 64 * 1024;

struct RemoteRegion {
  RegionId id = 0;
  std::uint64_t base = 0;  // address in the peer's process; 0 if it means nothing here
  std::vector<MemorySpan> spans;
  RegionKeys keys;
};

// The source's right to let bytes be read, as a destination may ask for it: the right holds while this slot of
// the source's fence table has this generation.
struct Fence {
  std::uint32_t slot = 0;
  std::uint64_t generation = 0;
};

// What the works of one transfer share. Immutable while any of them is posted.
struct Move {
  TransferId transfer = 0;
  std::uint8_t priority = 0;  // of the transfer; both ends have been told the same number
  std::shared_ptr<const CopyProgram> program;
  PieceGrid grid;
  // Ids of units (copy_program.h), the last grid.num_fine of tokens; validated against program and regions.
  std::vector<std::uint32_t> src_ids, dst_ids;
  // The region at this end (destination of fetch and receive, source of send). Its id is the one that
  // register_memory was given: by that id a rail finds its own registration (lkey, memory handle).
  std::shared_ptr<const LocalRegion> local;
  RegionId remote_region = 0;
  Fence fence;  // at a destination: what each fetch compares

  // The block that a pair's unit lies in.
  std::uint32_t src_block(std::uint32_t pair) const noexcept {
    const std::uint32_t units = program->units[grid.grain_of(pair)].src;
    return units == 1 ? src_ids[pair] : src_ids[pair] / units;
  }
  std::uint32_t dst_block(std::uint32_t pair) const noexcept {
    const std::uint32_t units = program->units[grid.grain_of(pair)].dst;
    return units == 1 ? dst_ids[pair] : dst_ids[pair] / units;
  }
};

enum class WorkKind : std::uint8_t {
  // Copy one piece from the peer's region to ours, and then read the word of move->fence in the peer's table: if
  // it is the same, each byte was read under the right. (one-sided rails)
  kFetch,
  kSend,  // stream one piece of ours to the peer                 (two-sided rails)
  kReceive,  // land one piece that the peer was asked to send       (two-sided rails)
};

struct Work {
  WorkId id = 0;
  WorkKind kind = WorkKind::kFetch;
  std::uint32_t piece = 0;  // index in move->grid; with move->transfer it names the
  // piece on a two-sided rail
  std::shared_ptr<const Move> move;
};

enum class CompletionKind : std::uint8_t { kWork, kRailUp, kRailDown };

struct Completion {
  CompletionKind kind = CompletionKind::kWork;
  WorkId work = 0;  // kWork
  PeerId peer = 0;  // kRailUp, kRailDown
  // What the engine does after a kFetch or kReceive:
  //   kOk                     the piece is in
  //   kCancelled, kRailFailed the piece is posted again, over any rail that is up
  //   kLeaseEnded             the transfer ends (kFetch: the source's word moved on; kReceive: the source stopped
  //                           in mid-piece)
  //   kExhausted              the transfer ends: the piece is larger than what the rail has room for
  //   kRegionGone, kUnsupported, kSystem, kInternal
  //                           this rail cannot do it, and gets no more works on that region; others may
  // After a kSend: codes other than kOk, kCancelled and kRailFailed end the transfer.
  Code code = Code::kOk;
  std::string detail;  // empty when kOk: no allocation on the fast path
};

struct Capabilities {
  std::string_view name;  // "shm"
  // Which works it takes. A rail that takes both kinds is asked for each piece: Transport::choose.
  bool one_sided = false;  // kFetch: the destination fetches; the source need not act
  bool two_sided = false;  // kSend, kReceive: the source sends what the destination has asked for
  std::uint32_t rank = 0;  // lower is preferred if several rails reach a region; the agent sets it
  MemoryPlaces far = {};  // places of memory at this end for which the rail is preferred one rank less
  // Classes of transfers' priorities: works of one class do not wait for works of another.
  PriorityClasses classes = {};
  std::uint32_t window = 8;  // pieces of a class worth having posted at a time, for each peer
  std::uint32_t piece_nbytes = 512 * 1024;  // what a piece should hold, about
  MemoryKinds memory = MemoryKind::kHost;  // kinds of memory that it reaches at this end
  // Of those: kinds whose bytes pass through host memory on their way.
  MemoryKinds staged = MemoryKinds::none();
  // True: it runs programs with conversions. A rail that does not (a NIC that READs) ends their works as
  // kUnsupported, and such a program goes over another rail that is up.
  bool converts = true;
  std::uint64_t max_piece_nbytes = UINT64_MAX;  // and at most: it may have no room for a larger one
  bool pins = false;  // registering memory takes its device long: Transport::prepare

  // The rank for a region at this end.
  constexpr std::uint32_t rank_for(const LocalRegion& region) const noexcept {
    return rank + (far.has(region.kind, region.numa_node) ? 1 : 0);
  }
};

struct ConnectInfo {
  bool initiator = false;  // which end called connect
  std::uint16_t rail = 0;  // index of this rail in the session
  std::string peer_name;  // for messages
  // The session's budget: what the peer may make this rail hold. Null: anything.
  std::shared_ptr<Budget> budget = nullptr;
  // Which of the peer's instances of this transport the rail is connected to; keys of regions belong to
  // that instance.
  std::uint16_t peer_instance = 0;
  // Null: the socket is plain. Otherwise all bytes on the socket go through this cipher.
  std::shared_ptr<Cipher> cipher = nullptr;
};

// Names no single region: region numbers begin with 1.
inline constexpr RegionId kEveryRegion = 0;

// Implemented by a transport that lets peers map memory which the kernel does not keep for them. The owner
// of such memory must not free it before the peers have unmapped it.
class MemoryLender {
 public:
  // May a peer still have memory of a deregistered region mapped? kEveryRegion: memory of any region,
  // mappings by peers whose rails have ended included. The answer changes with what poll and sockets
  // bring.
  virtual bool held_by_peers(RegionId region) const noexcept = 0;
  // Stops waiting for such peers: ends their rails, and returns their names.
  virtual std::vector<std::string> give_up_holders(RegionId region) = 0;

 protected:
  ~MemoryLender() = default;
};

class Transport {
 public:
  // Waits for works under way: afterwards none of their bytes lands or is read. They have no completions. The
  // agent has disconnected its peers before; a test may not have.
  virtual ~Transport() = default;

  virtual Capabilities capabilities() const noexcept = 0;

  // Registration has two steps, since pinning 100 GB takes a device longer than peers are patient.
  // prepare() is the long step, of a transport that pins (Capabilities). It runs without the gate, on a
  // thread of its own or on the caller's, beside any other call and those of other transports, so it shares
  // no state with them. Meanwhile the agent goes on, and peers reach the region over the rails that are
  // ready.
  virtual Result<Pinned> prepare(const LocalRegion&) { return Pinned(); }
  // The short step, with what prepare() returned; null of a transport that pins nothing. The keys travel to
  // peers. The memory stays registered until deregister_memory; the agent calls that when no work on the
  // region is outstanding any more. If one rail cannot register it, the others still can: peers reach the
  // region over those.
  virtual Result<RegionKeys> register_memory(const LocalRegion& region, const Pinned& pinned) = 0;
  // Drops the rail's copy of the region's Pinned; the agent drops the last reference later, without the
  // gate.
  virtual void deregister_memory(RegionId region) noexcept = 0;
  virtual MemoryLender* lender() noexcept { return nullptr; }

  // Takes the authenticated socket. The peer may be used once poll reports kRailUp for it; a
  // rail that cannot come up reports kRailDown.
  virtual Result<PeerId> connect(UniqueFd socket, const ConnectInfo& info) = 0;
  // Afterwards nothing begins for this peer. Outstanding works complete as cancelled once none of their
  // bytes can land or be read any more. Reports no kRailDown.
  virtual void disconnect(PeerId peer) noexcept = 0;

  // The way to a peer, for people: devices and addresses of both ends, and how pages come over the rail to
  // this end. "" if the rail's name says it all.
  virtual std::string path_to(PeerId) const { return {}; }

  // Makes a peer's region reachable by work, or says in words why it is not (kUnsupported).
  // Valid once the rail is up.
  virtual Status attach(PeerId peer, const RemoteRegion& region) = 0;
  // Works that were posted may still read it.
  virtual void detach(PeerId peer, RegionId region) noexcept = 0;

  // kOk: accepted; it completes exactly once through poll, in any order, even after kRailDown. kAgain: not
  // now. kRailFailed: there is no such peer, or no rail to it any more.
  virtual Code post(PeerId peer, const Work& work) noexcept = 0;

  // Says how a piece is to come over a rail that takes both one-sided and two-sided works: kFetch or
  // kReceive, whichever costs this rail less for this piece, and never a kind that the rail cannot use for
  // it. The destination asks whenever it is about to post the piece. Pieces of one transfer may come
  // either way.
  virtual WorkKind choose(PeerId, const Move&, [[maybe_unused]] std::uint32_t piece) const noexcept {
    return WorkKind::kFetch;
  }

  // Asks that works end. One call names all works, of any peers, that are to end on this rail at that
  // moment, so that a queue pair is reset only once. Their completions say when they have ended:
  // kCancelled, or their own result if they could not be stopped. Unknown ids are ignored. Costs what
  // these works cost, however many others there are. A kSend cancelled between its last page and its
  // trailer may still arrive as held: every page of it was read while the right stood.
  virtual void cancel(std::span<const WorkId> works) noexcept = 0;

  // Advances work by a bounded amount (about 1 MiB) and reports. Does not block.
  virtual std::size_t poll(std::span<Completion> completions) noexcept = 0;

  // True while poll has something to do that no descriptor will announce: then no thread sleeps.
  virtual bool busy() const noexcept = 0;

  // False: poll would find nothing, so the agent does not call it. It is true while busy. It is also true
  // if the transport has to ask a device what it has completed: while peers or works may bring something
  // and the device is not armed.
  virtual bool wants_poll() const noexcept { return busy(); }

  // The driving thread is about to sleep on the reactor. A device that announces completions only on
  // request is asked to do so now; its descriptor then wakes the thread. False if something came
  // meanwhile: the thread polls once more (wants_poll) before it sleeps. The agent may call this again
  // while the device is armed.
  virtual bool arm() noexcept { return true; }
};

}  // namespace kvxfer
