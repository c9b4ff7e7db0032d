#include "toy_transport/toy_transport.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <iterator>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "core/copy/executor.h"
#include "core/copy/pack.h"
#include "core/copy/run_cursor.h"

namespace kvxfer::toy {
namespace {

constexpr std::uint64_t kPollNbytes = 1024 * 1024;
constexpr std::size_t kMostPosted = 1024;  // works of a peer: the engine posts `window` at a time

// What choose() weighs, in bytes that could be copied meanwhile: a request for each run that is fetched; a frame that
// asks, for what is sent, and one more copy of its bytes.
constexpr std::uint64_t kRunCost = 8 * 1024, kAskCost = 32 * 1024;

// The device that all instances share.
struct Nic {
  struct Message {
    TransferId transfer;
    std::uint32_t piece;
    std::vector<std::byte> bytes;
  };
  struct Endpoint {
    const FenceTable* fences;
    std::deque<Message> arrived, held;
    bool armed = false;
  };

  std::mutex mutex;  // held while bytes are read: what is unpinned is not read any more
  std::map<std::uint64_t, std::pair<const std::byte*, std::uint64_t>> pinned;  // key -> base and end
  std::map<std::uint64_t, Endpoint> endpoints;
  std::uint64_t next = 1;
  bool holds = false;
  std::size_t num_polls = 0;
};
Nic& nic() {
  static Nic the_nic;
  return the_nic;
}

std::uint64_t open_endpoint(const FenceTable& fences) {
  const std::lock_guard lock(nic().mutex);
  nic().endpoints[nic().next].fences = &fences;
  return nic().next++;
}

std::uint64_t num_runs(const CopyProgram& program, const Piece& piece) {
  std::uint64_t num = 0;
  for (const CopyLoop& loop : program.loops)
    if (piece.layer - loop.first_layer < loop.num_layers)  // wraps below first_layer
      num += std::uint64_t{piece.end(loop.grain) - piece.begin(loop.grain)} * loop.counts[0] * loop.counts[1];
  return num;
}

}  // namespace

std::function<Status(const LocalRegion&)>& before_pin() {
  static std::function<Status(const LocalRegion&)> hook;
  return hook;
}

std::function<void(std::size_t)>& before_arm() {
  static std::function<void(std::size_t)> hook;
  return hook;
}

void hold(bool held) {
  const std::lock_guard lock(nic().mutex);
  nic().holds = held;
}

std::size_t num_held() {
  const std::lock_guard lock(nic().mutex);
  std::size_t num = 0;
  for (const auto& [id, endpoint] : nic().endpoints) num += endpoint.held.size();
  return num;
}

std::size_t num_polls() {
  const std::lock_guard lock(nic().mutex);
  return nic().num_polls;
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
  Peer(ToyTransport& transport, PeerId number, UniqueFd fd, const ConnectInfo& info)
      : owner(transport),
        id(number),
        socket(std::move(fd)),
        name(info.peer_name),
        endpoint(open_endpoint(transport.fences_)) {}
  ~Peer() override {
    if (socket) owner.reactor_.remove(socket.get());
    close_endpoint();
  }
  void on_ready(std::uint32_t) override { owner.on_ready(*this); }

  ToyTransport& owner;
  const PeerId id;
  UniqueFd socket;  // closed when the rail is down
  const std::string name;
  const std::uint64_t endpoint;
  std::uint64_t there = 0;  // the peer's endpoint, once the rail is up
  bool armed = false;  // a byte over the socket will tell what arrives
  std::map<RegionId, std::uint64_t> keys;
  // By number, of works_: those that were cancelled are there no more. Works to be run, and receives by their piece.
  std::deque<WorkId> queue;
  std::map<std::pair<TransferId, std::uint32_t>, WorkId> receives;

  bool is_up() const noexcept { return socket && there != 0; }
  std::size_t num_posted() const noexcept { return queue.size() + receives.size(); }
  void end_works(Code code, const std::string& detail) {
    for (const auto& [piece, work] : receives) queue.push_back(work);
    receives.clear();
    for (const WorkId work : queue)
      if (owner.works_.erase(work) != 0) owner.ready_.work(work, code, detail);
    queue.clear();
  }
  void close_endpoint() {
    const std::lock_guard lock(nic().mutex);
    nic().endpoints.erase(endpoint);
  }
};

ToyTransport::ToyTransport(Reactor& reactor, const FenceTable& fences, bool pins)
    : reactor_(reactor), fences_(fences), pins_(pins) {}

ToyTransport::~ToyTransport() = default;

Capabilities ToyTransport::capabilities() const noexcept {
  return {.name = "toy", .one_sided = true, .two_sided = true, .piece_nbytes = 40 * 1024, .pins = pins_};
}

// ---- memory ----

Result<Pinned> ToyTransport::prepare(const LocalRegion& region) {
  if (before_pin()) {
    if (Status status = before_pin()(region); !status.ok()) return status;
  }
  return Pinned(std::make_shared<const Pin>(region));
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
  if (found == peers_.end() || !found->second->is_up())
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
  ready_.make_room(ready_.size() + works_.size() + 2 * (peers_.size() + 1));  // it comes up, and goes down
  Peer& peer = *(peers_[id] = std::make_unique<Peer>(*this, id, std::move(socket), info));
  if (Status added = reactor_.add(peer.socket.get(), EPOLLIN, peer); !added.ok()) {
    peers_.erase(id);
    return added;
  }
  // 8 bytes fit the buffer of a socket that has carried nothing but its handshake.
  if (::send(peer.socket.get(), &peer.endpoint, sizeof peer.endpoint, MSG_NOSIGNAL) != sizeof peer.endpoint)
    fail(peer, "the endpoint could not be sent");
  return id;
}

void ToyTransport::on_ready(Peer& peer) {
  if (peer.there != 0) {
    char bells[64];
    const ssize_t got = ::recv(peer.socket.get(), bells, sizeof bells, MSG_DONTWAIT);
    if (got == 0) fail(peer, "it closed the rail");
    if (got > 0) peer.armed = false;  // something arrived, and nothing more is announced
    return;
  }
  std::uint64_t endpoint = 0;
  const ssize_t got = ::recv(peer.socket.get(), &endpoint, sizeof endpoint, MSG_PEEK | MSG_DONTWAIT);
  if (got == 0) return fail(peer, "it closed the rail");
  if (got != sizeof endpoint) return;  // the rest is on its way
  static_cast<void>(::recv(peer.socket.get(), &endpoint, sizeof endpoint, MSG_DONTWAIT));
  peer.there = endpoint;
  ready_.rail_up(peer.id);
}

void ToyTransport::fail(Peer& peer, const std::string& why) {
  if (!peer.socket) return;
  reactor_.remove(peer.socket.get());
  peer.socket.reset();
  peer.close_endpoint();
  const std::string detail = "toy: the rail to " + peer.name + " is down: " + why;
  peer.end_works(Code::kRailFailed, detail);
  ready_.rail_down(peer.id, detail);
}

void ToyTransport::disconnect(PeerId id) noexcept {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  ready_.forget_rail(id);
  found->second->end_works(Code::kCancelled, {});
  peers_.erase(found);
}

// ---- work ----

Code ToyTransport::post(PeerId id, const Work& work) noexcept {
  const auto found = peers_.find(id);
  if (found == peers_.end() || !found->second->socket) return Code::kRailFailed;
  Peer& peer = *found->second;
  if (!peer.is_up()) return Code::kAgain;
  try {
    // What is accepted completes whatever memory there is then, so room for that comes first.
    ready_.make_room(ready_.size() + works_.size() + 1 + 2 * peers_.size());
    if (accept(peer, work)) return Code::kOk;
  } catch (const std::bad_alloc&) {  // as full as it can be
    works_.erase(work.id);
  }
  return Code::kAgain;
}

bool ToyTransport::accept(Peer& peer, const Work& work) {
  if (peer.num_posted() == kMostPosted) return false;
  works_.emplace(work.id, Posted{&peer, work});
  if (work.kind != WorkKind::kReceive) {
    peer.queue.push_back(work.id);
  } else if (!peer.receives.try_emplace({work.move->transfer, work.piece}, work.id).second) {
    works_.erase(work.id);
    ready_.work(work.id, Code::kUnsupported, "toy: the piece is already waited for");
  }
  return true;
}

WorkKind ToyTransport::choose(PeerId, const Move& move, std::uint32_t piece) const noexcept {
  if (!move.program->conversions.empty()) return WorkKind::kReceive;  // what is fetched is copied as it is
  const Piece named = move.grid.piece(piece);
  const std::uint64_t nbytes = piece_nbytes(*move.program, named);
  const std::uint64_t fetched = nbytes + num_runs(*move.program, named) * kRunCost;
  return fetched <= kAskCost + 2 * nbytes ? WorkKind::kFetch : WorkKind::kReceive;
}

// Works move inside poll alone: what is here has not begun, or nothing of it has arrived.
void ToyTransport::cancel(std::span<const WorkId> works) noexcept {
  for (const WorkId id : works) {
    const auto found = works_.find(id);
    if (found == works_.end()) continue;  // it has ended
    const Work& work = found->second.work;
    if (work.kind == WorkKind::kReceive)
      found->second.peer->receives.erase({work.move->transfer, work.piece});
    works_.erase(found);
    ready_.work(id, Code::kCancelled);
  }
}

bool ToyTransport::busy() const noexcept {
  return !ready_.empty() || std::any_of(peers_.begin(), peers_.end(),
                                        [](const auto& entry) { return !entry.second->queue.empty(); });
}

bool ToyTransport::wants_poll() const noexcept {
  return busy() || std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) {
           return entry.second->is_up() && !entry.second->armed;
         });
}

bool ToyTransport::arm() noexcept {
  if (before_arm()) {
    std::size_t num_receives = 0;
    for (const auto& [id, peer] : peers_) num_receives += peer->receives.size();
    before_arm()(num_receives);
  }
  const std::lock_guard lock(nic().mutex);
  bool rests = true;
  for (const auto& [id, peer] : peers_) {
    if (!peer->is_up()) continue;
    Nic::Endpoint& endpoint = nic().endpoints.at(peer->endpoint);
    std::move(endpoint.held.begin(), endpoint.held.end(), std::back_inserter(endpoint.arrived));
    endpoint.held.clear();
    endpoint.armed = peer->armed = endpoint.arrived.empty();
    rests = rests && peer->armed;
  }
  return rests;
}

std::size_t ToyTransport::poll(std::span<Completion> completions) noexcept {
  std::uint64_t moved = 0;
  {
    const std::lock_guard lock(nic().mutex);
    ++nic().num_polls;
  }
  for (const auto& [id, peer] : peers_)
    while (moved < kPollNbytes && peer->is_up() && receive(*peer, moved)) {}
  std::size_t count = ready_.take(completions);
  while (moved < kPollNbytes && count < completions.size()) {
    const auto has_work = [](const auto& entry) { return !entry.second->queue.empty(); };
    auto turn = std::find_if(peers_.upper_bound(last_served_), peers_.end(), has_work);
    if (turn == peers_.end()) turn = std::find_if(peers_.begin(), peers_.end(), has_work);
    if (turn == peers_.end()) break;
    last_served_ = turn->first;
    Peer& peer = *turn->second;
    const auto next = works_.find(peer.queue.front());
    peer.queue.pop_front();
    if (next == works_.end()) continue;  // it was cancelled
    const Work work = std::move(works_.extract(next).mapped().work);
    completions[count++] = run(peer, work, moved);
  }
  return count;
}

// ---- bytes; with the NIC's lock, so that nothing is unpinned meanwhile ----

Completion ToyTransport::run(Peer& peer, const Work& work, std::uint64_t& moved_nbytes) noexcept {
  const std::lock_guard lock(nic().mutex);
  moved_nbytes += piece_nbytes(*work.move->program, work.move->grid.piece(work.piece));
  return work.kind == WorkKind::kFetch ? fetch(peer, work) : send(peer, work);
}

Completion ToyTransport::fetch(const Peer& peer, const Work& work) const {
  const Move& move = *work.move;
  if (!move.program->conversions.empty())
    return failed(work.id, Code::kUnsupported, "toy: what is fetched is not converted");
  const auto key = peer.keys.find(move.remote_region);
  const auto pinned = key == peer.keys.end() ? nic().pinned.end() : nic().pinned.find(key->second);
  if (pinned == nic().pinned.end())
    return failed(work.id, Code::kRegionGone, "toy: " + peer.name + " deregistered the region");
  const auto& [base, end] = pinned->second;
  if (piece_end(move, work.piece, Side::kSrc) > end)
    return failed(work.id, Code::kInternal, "toy: the piece ends outside the region");
  copy_piece(move, work.piece, base, move.local->base);
  // All bytes are here. They are the transfer's if the source's right holds still.
  const auto source = nic().endpoints.find(peer.there);
  if (source == nic().endpoints.end()) return failed(work.id, Code::kRailFailed, "toy: the peer is gone");
  if (move.fence.slot >= FenceTable::kNumSlots)
    return failed(work.id, Code::kInternal, "toy: there is no such fence slot");
  if (source->second.fences->generation(move.fence.slot) != move.fence.generation)
    return failed(work.id, Code::kLeaseEnded, "toy: the right has ended");
  return done(work.id);
}

// Gathers the piece at once: the right holds until its last byte is read.
Completion ToyTransport::send(const Peer& peer, const Work& work) const {
  const auto found = nic().endpoints.find(peer.there);
  if (found == nic().endpoints.end()) return failed(work.id, Code::kRailFailed, "toy: the peer is gone");
  Nic::Endpoint& endpoint = found->second;
  Nic::Message message{work.move->transfer, work.piece, {}};
  message.bytes.resize(piece_nbytes(*work.move->program, work.move->grid.piece(work.piece)));
  Packer packer(*work.move, work.piece);
  std::size_t have = 0;
  while (const std::size_t more = packer.pack(message.bytes.data() + have, message.bytes.size() - have))
    have += more;
  (nic().holds ? endpoint.held : endpoint.arrived).push_back(std::move(message));
  if (!nic().holds && std::exchange(endpoint.armed, false))
    static_cast<void>(::send(peer.socket.get(), "!", 1, MSG_DONTWAIT | MSG_NOSIGNAL));
  return done(work.id);
}

// Lands the next piece that has arrived; one that nobody waits for any more is dropped. False: there is none.
bool ToyTransport::receive(Peer& peer, std::uint64_t& moved_nbytes) {
  Nic::Message message;
  {
    const std::lock_guard lock(nic().mutex);
    std::deque<Nic::Message>& arrived = nic().endpoints.at(peer.endpoint).arrived;
    if (arrived.empty()) return false;
    message = std::move(arrived.front());
    arrived.pop_front();
  }
  const auto found = peer.receives.find({message.transfer, message.piece});
  if (found == peer.receives.end()) return true;
  const Work work = std::move(works_.extract(found->second).mapped().work);
  peer.receives.erase(found);
  if (message.bytes.size() != piece_nbytes(*work.move->program, work.move->grid.piece(work.piece))) {
    ready_.work(work.id, Code::kRailFailed, "toy: the peer sent a piece of another length");
    return true;
  }
  RunCursor(*work.move, work.piece, Side::kDst).scatter(message.bytes.data(), message.bytes.size());
  moved_nbytes += message.bytes.size();
  ready_.push(done(work.id));
  return true;
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
