#include "transports/verbs/verbs_transport.h"

#include <arpa/inet.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <new>

#include "core/copy/pack.h"
#include "core/in_room.h"

#include "transports/verbs/faults.h"

namespace kvxfer {

using verbs::Flight;
using verbs::KeyedSpan;
using verbs::Message;
using verbs::MessageKind;
using verbs::QueuePair;
using verbs::QueuePairs;
using verbs::Registration;
using verbs::RequestCursor;

namespace {

// Runs that one poll turns into requests: it takes 0.06 ms if each run is a request.
constexpr std::uint32_t kRunsPerPoll = 1280;
// Completions taken from a peer's queue before other peers' queues are polled.
constexpr std::size_t kTakenAtOnce = 32, kTakenRounds = 4;
// A cancelled work ends with its last request, in far less than a millisecond. If the peer or the network is
// dead, only a reset ends it.
constexpr std::chrono::milliseconds kStopBound{200};
// A WRITE ends with the help of the other agent. Until that agent hears of the cancellation it goes on with
// all that it was asked for: 64 pieces of 512 KiB, which 100 Mb/s carry in 3 s. (One second was too short for
// two rails over Soft-RoCE in an emulated machine.)
constexpr std::chrono::milliseconds kWriteStopBound{3000};
// A reset flushes a queue pair's requests at once. If that does not happen the queue pair is destroyed; then,
// too, the device touches no memory for it.
constexpr std::chrono::milliseconds kFlushBound{500};

// Peers for which we remember addresses that they did not answer at.
constexpr std::size_t kMostTried = 256;

std::string name_of(const Flight& flight, const QueuePairs& pairs) {
  const Work& work = flight.work;
  if (flight.is_proof) return "the first READ over a new connection " + pairs.way();
  if (flight.is_confirming) return "a READ of the fence word";
  const Piece piece = work.move->grid.piece(work.piece);
  return std::string(work.kind == WorkKind::kSend ? "a WRITE" : "a READ") + " of layer " +
         std::to_string(piece.layer) + ", " + std::to_string(piece.num_pairs) +
         " blocks from the table's index " + std::to_string(piece.first_pair) + " on";
}

}  // namespace

Result<std::unique_ptr<VerbsTransport>> VerbsTransport::create(Reactor& reactor, const FenceTable& fences,
                                                               std::shared_ptr<verbs::Device> device,
                                                               std::shared_ptr<const verbs::GpuMemory> gpu,
                                                               MemoryPlaces far) {
  Result<std::unique_ptr<verbs::FenceWords>> words = verbs::FenceWords::create(
      [device](const LocalRegion& region) { return Registration::create(device, region); }, fences);
  if (!words.ok()) return words.status();
  Result<std::unique_ptr<Alarm>> alarm = Alarm::create(reactor);
  if (!alarm.ok()) return alarm.status();
  Result<std::unique_ptr<Connector>> connector = Connector::create();
  if (!connector.ok()) return connector.status();
  std::unique_ptr<VerbsTransport> made(
      new VerbsTransport(reactor, std::move(device), std::move(gpu), far, std::move(alarm).value(),
                         std::move(connector).value(), std::move(words).value()));
  if (Status listening = made->listen(); !listening.ok()) return listening;
  return made;
}

VerbsTransport::VerbsTransport(Reactor& reactor, std::shared_ptr<verbs::Device> device,
                               std::shared_ptr<const verbs::GpuMemory> gpu, MemoryPlaces far,
                               std::unique_ptr<Alarm> alarm, std::unique_ptr<Connector> connector,
                               std::unique_ptr<verbs::FenceWords> fences)
    : WrittenPieces(reactor),
      reactor_(reactor),
      device_(std::move(device)),
      gpu_(std::move(gpu)),
      far_(far),
      fences_(std::move(fences)),
      alarm_(std::move(alarm)),
      connector_(std::move(connector)),
      chain_(device_->num_entries(), device_->most_read_nbytes()) {}

Status VerbsTransport::listen() {
  if (Status added = reactor_.add(device_->channel()->fd, EPOLLIN, completions_); !added.ok()) return added;
  if (Status added = reactor_.add(connector_->fd(), EPOLLIN, set_ups_); !added.ok()) return added;
  return reactor_.add(device_->context()->async_fd, EPOLLIN, events_);
}

VerbsTransport::~VerbsTransport() {
  reactor_.remove(device_->channel()->fd);
  reactor_.remove(device_->context()->async_fd);
  reactor_.remove(connector_->fd());
  // Queue pairs go first, so that the device writes nothing while the rest is destroyed.
  for_each_peer([](Peer& peer) { peer.pairs.reset(); });
  connector_.reset();
}

Capabilities VerbsTransport::capabilities() const noexcept {
  return {.name = "verbs",
          .one_sided = true,
          .two_sided = device_->options().writes,
          .far = far_,
          .classes = verbs::priorities_of(device_->classes()),
          .window = 64,
          .memory = gpu_ == nullptr ? MemoryKinds(MemoryKind::kHost)
                                    : MemoryKinds(MemoryKind::kHost) | MemoryKind::kGpu,
          .converts = false,
          .pins = true};
}

Result<KeyedSpan> VerbsTransport::shared_fences() {
  const Result<const Registration*> shared = fences_->share();
  if (!shared.ok()) return shared.status();
  // Peers learn its key as they learn those of regions.
  const std::vector<KeyedSpan>& spans = shared.value()->remote().all();
  if (spans.size() == 1) return spans.front();
  return Status(Code::kUnsupported, device_->name() + " registers no more than " +
                                        std::to_string(device_->most_registered_nbytes()) +
                                        " bytes at once, too few for the fence table");
}

// ---- our memory ----

Result<Pinned> VerbsTransport::prepare(const LocalRegion& region) {
  Result<std::shared_ptr<const Registration>> made = Registration::create(device_, region, gpu_.get());
  if (!made.ok()) return made.status();
  return Pinned(std::move(made).value());
}

Result<RegionKeys> VerbsTransport::register_memory(const LocalRegion& region, const Pinned& pinned) {
  auto registration = std::static_pointer_cast<const Registration>(pinned);
  RegionKeys keys = registration->keys();
  registered_[region.id] = std::move(registration);
  return keys;
}

void VerbsTransport::deregister_memory(RegionId region) noexcept { registered_.erase(region); }

// ---- peers' memory ----

std::string VerbsTransport::path_to(PeerId id) const {
  const Peer* const peer = find(id);
  if (peer == nullptr || peer->path.empty()) return {};
  return peer->path + (peer->writes ? ", by WRITE" : ", by READ");
}

WorkKind VerbsTransport::choose(PeerId id, const Move&, std::uint32_t) const noexcept {
  const Peer* const peer = find(id);
  return peer != nullptr && peer->writes ? WorkKind::kReceive : WorkKind::kFetch;
}

Status VerbsTransport::attach(PeerId id, const RemoteRegion& region) {
  const Result<Peer*> peer = find_up(id);
  if (!peer.ok()) return peer.status();
  Result<verbs::KeyedSpans> spans = verbs::spans_of(region);
  if (!spans.ok())
    return {spans.status().code(),
            words("the region of " + peer.value()->name + ": " + spans.status().message())};
  peer.value()->regions[region.id] = std::make_shared<const verbs::KeyedSpans>(std::move(spans).value());
  return {};
}

void VerbsTransport::detach(PeerId id, RegionId region) noexcept {
  if (Peer* const peer = find(id)) peer->regions.erase(region);
}

// ---- peers ----

Result<PeerId> VerbsTransport::connect(UniqueFd socket, const ConnectInfo& info) {
  if (!lost_why_.empty()) return refuse(std::move(socket), info, {Code::kRailFailed, lost_why_});
  if (const Result<KeyedSpan> shared = shared_fences(); !shared.ok())
    return refuse(std::move(socket), info, shared.status());
  Charge queues = Charge::take(info.budget, Resource::kBytes, QueuePairs::nbytes(*device_));
  if (!queues)
    return refuse(
        std::move(socket), info,
        {Code::kExhausted, "no queue pairs are made for it: " + info.budget->in_words(Resource::kBytes)});
  const auto tried = tried_.find(info.peer_name);
  Result<std::unique_ptr<QueuePairs>> pairs =
      QueuePairs::create(device_, tried == tried_.end() ? std::span<const verbs::GidRow>() : tried->second);
  if (!pairs.ok()) return refuse(std::move(socket), info, pairs.status());
  std::size_t num_peers = 1;
  for_each_peer([&](const Peer&) { ++num_peers; });
  flying_.reserve(num_peers);
  watched_.reserve(num_peers);
  Result<PeerId> added = add_peer(std::move(socket), info, std::move(pairs).value());
  if (!added.ok()) return added;
  Peer& peer = *find(added.value());
  peer.queues = std::move(queues);
  return added;
}

void VerbsTransport::greet(Peer& peer) {
  Message hello;
  peer.pairs->introduce(hello);
  const KeyedSpan words = shared_fences().value();
  hello.fence_address = words.address;
  hello.fence_nbytes = words.end - words.offset;
  hello.fence_key = words.key;
  tell(peer, hello);
}

Status VerbsTransport::on_hello(Peer& peer, const Message& hello, UniqueFd) {
  if (hello.fence_nbytes != FenceTable::kNbytes)
    return {Code::kRailFailed, "its fence table has " + std::to_string(hello.fence_nbytes) + " bytes, not " +
                                   std::to_string(FenceTable::kNbytes)};
  peer.has_hello = true;
  peer.fences = {0, hello.fence_nbytes, hello.fence_address, hello.fence_key};
  return connector_->begin(std::make_unique<verbs::SetUp>(peer.id, peer.name, std::move(peer.pairs), hello,
                                                          std::move(peer.queues)));
}

void VerbsTransport::on_connected() {
  connector_->acknowledge();
  while (const std::unique_ptr<Connector::SetUp> any = connector_->take_ended()) {
    auto* const ended = static_cast<verbs::SetUp*>(any.get());
    Peer* const peer = find(ended->peer);
    if (peer == nullptr || peer->down) continue;  // its queue pairs end with the set-up
    peer->pairs = std::move(ended->pairs);
    peer->queues = std::move(ended->charge);
    try {
      if (Status connected = on_connected(*peer, *ended); !connected.ok()) fail(*peer, connected.message());
    } catch (const std::bad_alloc&) {
      fail(*peer, kNoMemory);
    }
  }
}

Status VerbsTransport::on_connected(Peer& peer, const verbs::SetUp& ended) {
  const Message& hello = ended.theirs;
  if (ended.status.code() == Code::kExhausted) return {Code::kExhausted, std::string(kNoMemory)};
  if (!ended.status.ok())
    return {ended.status.code(), "its " + hello.device_name() + ": " + ended.status.message()};
  if (hello.takes_writes != 0 && device_->options().writes) {
    peer.awaited.reserve(QueuePair::kNumReceives, peer.pairs->classes().size());
    peer.asked.reserve(QueuePair::kNumReceives * peer.pairs->classes().size());
    peer.writes = true;
  }
  peer.path = device_->name() + " " + peer.pairs->way() + " (" + hello.device_name() + ")";
  if (const std::string classes = peer.pairs->classes_in_words(); !classes.empty())
    peer.path += ", " + classes;
  Message ready;
  ready.kind = MessageKind::kReady;
  peer.is_connected = true;
  tell(peer, ready);
  return peer.is_ready && !peer.down ? prove(peer) : Status();
}

Status VerbsTransport::on_message(Peer& peer, const Message& message, UniqueFd) {
  if (message.kind == MessageKind::kReady) {
    if (std::exchange(peer.is_ready, true)) return {Code::kRailFailed, "it said twice that it is ready"};
    return peer.is_connected ? prove(peer) : Status();
  }
  if (!peer.writes)
    return {Code::kRailFailed, "it sent a message about WRITEs, which the two ends have not agreed on"};
  if (message.kind == MessageKind::kAwait || message.kind == MessageKind::kGiveUp)
    return on_asked(peer, message.kind, message.ticket);
  if (AwaitedPieces::Piece* const piece = peer.awaited.find(message.ticket.number)) {
    end_awaited(peer, *piece, piece->code == Code::kOk ? Code::kLeaseEnded : piece->code,
                piece->code == Code::kOk ? "the source stopped in the middle of the piece" : piece->why);
    clean_up(peer);
  }
  return {};
}

void VerbsTransport::on_down(Peer& peer) {
  // This also counts if the other end gave up: its READs were not answered either, or it has no route to this
  // address.
  if (!peer.up && peer.has_hello) remember_address(peer);
  end_requests(peer);
}

// As far as we know the address leads nowhere, so the next connection uses another one.
void VerbsTransport::remember_address(const Peer& peer) noexcept {
  const std::optional<verbs::GidRow>& row = peer.row;
  if (!row) return;
  try {
    if (tried_.size() >= kMostTried) tried_.clear();
    std::vector<verbs::GidRow>& tried = tried_[peer.name];
    if (std::find(tried.begin(), tried.end(), *row) != tried.end()) tried.clear();  // each was: start again
    tried.push_back(*row);
  } catch (const std::bad_alloc&) {  // the next connection tries it again
  }
}

void VerbsTransport::forget(Peer& peer) noexcept {
  peer.gone = true;
  end_requests(peer);
}

// ---- requests go out ----

bool VerbsTransport::can_run(const Peer& peer, const Work& work) const noexcept {
  if (!peer.up || peer.pairs == nullptr) return false;
  const std::size_t of_class = peer.pairs->class_of(work);
  if (work.kind == WorkKind::kFetch && !fences_->has_room()) return false;
  if (work.kind == WorkKind::kReceive && peer.writes) return peer.awaited.has_room(of_class);
  if (work.kind == WorkKind::kSend && peer.writes && !peer.asked.has(work.move->transfer, work.piece))
    return false;
  return peer.pairs->can_begin(of_class);
}

bool VerbsTransport::can_go_on(const Peer& peer) const noexcept {
  if (peer.pairs == nullptr || peer.down) return false;
  const QueuePairs& pairs = *peer.pairs;
  return std::any_of(pairs.begin(), pairs.end(), [](const QueuePair& pair) { return pair.can_go_on(); }) ||
         std::any_of(peer.fetched.begin(), peer.fetched.end(), [&](const verbs::Fetched& fetched) {
           return pairs.can_begin(pairs.class_of(fetched.work));
         });
}

std::size_t VerbsTransport::num_announced() const noexcept {
  return QueuePair::kNumReceives * (device_->classes().size() - 1);
}

// Each queue pair READs a packet's worth of fence words, whose values do not matter. There are more words
// than fill a packet.
Status VerbsTransport::prove(Peer& peer) {
  const KeyedSpan to = fences_->nowhere();
  for (QueuePair& pair : *peer.pairs) {
    pair.begin(chain_, 1);
    chain_.add(peer.fences.address, peer.fences.key, to.address, to.key, peer.pairs->path_nbytes());
    Flight& flight = pair.flights.push(Flight());
    flight.is_proof = flight.is_posted = true;
    flight.end = pair.posted() + chain_.size();
    ++peer.num_unproved;
    if (Status posted = pair.post(chain_); !posted.ok()) return posted;
    armed_ = false;
    if (!std::exchange(peer.is_flying, true)) add_in_room(flying_, &peer);
  }
  return {};
}

void VerbsTransport::post_some() noexcept {
  std::uint32_t num_runs = kRunsPerPoll;
  Peer* peer = nullptr;
  while (num_runs != 0) try {
      peer = next_turn();
      if (peer == nullptr) return;
      end_turn();
      await_some(*peer);
      if (peer->down) continue;
      // Posts one chain for the peer: for its most urgent class that has something to post. Queue pairs of a
      // class take turns.
      const std::size_t num_classes = peer->pairs->classes().size();
      for (std::size_t of_class = 0; of_class < num_classes; ++of_class)
        if (QueuePair* const pair = next_pair(*peer, of_class)) {
          post_chain(*peer, *pair, of_class, num_runs);
          break;
        }
    } catch (const std::bad_alloc&) {
      fail(*peer, kNoMemory);
    }
}

std::size_t VerbsTransport::first_that_runs(const Peer& peer, std::size_t of_class) const {
  const QueuePairs& pairs = *peer.pairs;
  if (pairs.classes().size() == 1) return RailPeers::first_that_runs(peer);
  return peer.queue.first(
      [&](const Work& work) { return pairs.class_of(work) == of_class && can_run(peer, work); });
}

QueuePair* VerbsTransport::next_pair(Peer& peer, std::size_t of_class) const {
  const std::span<QueuePair> pairs = peer.pairs->of(of_class);
  const bool may_confirm = first_fetched(peer, of_class) != peer.fetched.size();
  // With one class, next_turn() has already found that some work can run.
  bool may_begin = may_confirm || !peer.queue.empty(),
       is_seen = may_confirm || peer.pairs->classes().size() == 1;
  for (std::size_t left = pairs.size(); left > 0; --left) {
    QueuePair& pair = pairs[peer.turns[of_class]++ % pairs.size()];
    if (pair.can_go_on()) return &pair;
    if (!may_begin || !pair.can_begin()) continue;
    if (!std::exchange(is_seen, true)) may_begin = first_that_runs(peer, of_class) != peer.queue.size();
    if (may_begin) return &pair;
  }
  return nullptr;
}

void VerbsTransport::post_chain(Peer& peer, QueuePair& pair, std::size_t of_class, std::uint32_t& num_runs) {
  pair.begin(chain_, verbs::kMostChained);
  while (num_runs != 0 && !chain_.is_full()) {
    if (!pair.goes_on()) {
      if (pair.flights.size() == QueuePair::kMostFlights) break;
      if (const std::size_t fetched = first_fetched(peer, of_class); fetched != peer.fetched.size()) {
        --num_runs;  // a short work counts, too
        begin_confirming(peer, pair, fetched);
      } else {
        const std::size_t at = peer.queue.empty() ? 0 : first_that_runs(peer, of_class);
        if (at == peer.queue.size()) break;
        --num_runs;
        if (!begin(peer, pair, at)) continue;
      }
    }
    Flight& flight = pair.flights.back();
    const RequestCursor::Stop stop = add_requests(peer, flight, num_runs);
    flight.end = pair.posted() + chain_.size();
    if (stop == RequestCursor::Stop::kFull || stop == RequestCursor::Stop::kTired) break;
    chain_.close();  // the next work begins a request of its own
    flight.is_posted = true;
    if (stop == RequestCursor::Stop::kOutside)
      flight.stop(Code::kInternal, words(flight.cursor.outside() == Side::kSrc
                                             ? "the piece ends outside the region of " + peer.name
                                             : "the piece ends outside the region here"));
  }
  if (chain_.size() == 0) return land(peer);
  if (Status posted = pair.post(chain_); !posted.ok()) return fail(peer, posted.message());
  armed_ = false;
  if (!std::exchange(peer.is_flying, true)) add_in_room(flying_, &peer);
}

bool VerbsTransport::begin(Peer& peer, QueuePair& pair, std::size_t at) {
  Flight& flight = pair.flights.push(Flight());
  flight.end = pair.posted();
  flight.work = peer.queue.take(at);
  Status ready;
  try {
    ready = prepare_flight(peer, flight);
  } catch (const std::bad_alloc&) {
    flight.is_posted = true;  // it ends with the rail
    throw;
  }
  if (ready.ok()) return true;
  end_work(failed(flight.work.id, ready.code(), words(ready.message())));
  pair.flights.pop_back();
  return false;
}

std::size_t VerbsTransport::first_fetched(const Peer& peer, std::size_t of_class) const {
  const auto found = std::find_if(
      peer.fetched.begin(), peer.fetched.end(),
      [&](const verbs::Fetched& fetched) { return peer.pairs->class_of(fetched.work) == of_class; });
  return static_cast<std::size_t>(found - peer.fetched.begin());
}

// The word is read only after all bytes of the piece have landed.
void VerbsTransport::begin_confirming(Peer& peer, QueuePair& pair, std::size_t at) {
  Flight& flight = pair.flights.push(Flight());
  flight.end = pair.posted();
  flight.is_confirming = true;
  flight.work = std::move(peer.fetched[at].work);
  flight.scratch = peer.fetched[at].scratch;
  peer.fetched.erase(peer.fetched.begin() + static_cast<std::ptrdiff_t>(at));
}

void VerbsTransport::end_fetched(Peer& peer, Code code, std::string_view why) noexcept {
  for (const verbs::Fetched& fetched : peer.fetched) {
    fences_->give_back(fetched.scratch);
    end_work(fetched.work.id, code, why);
  }
  peer.fetched.clear();
}

Status VerbsTransport::prepare_flight(Peer& peer, Flight& flight) {
  const Work& work = flight.work;
  const bool is_write = work.kind == WorkKind::kSend;
  if (work.kind != WorkKind::kFetch && !(is_write && peer.writes))
    return {Code::kUnsupported, "this rail cannot send: the destination fetches"};
  const Move& move = *work.move;
  PieceTicket asked{};
  if (is_write) {
    const auto [ticket, is_given_up] = peer.asked.take(move.transfer, work.piece);
    asked = ticket;
    if (is_given_up) return {Code::kCancelled, peer.name + " no longer awaits the piece"};
  }
  const auto local = registered(move, !is_write);
  if (!local.ok()) return local.status();
  const auto remote = peer.regions.find(move.remote_region);
  if (remote == peer.regions.end())
    return {Code::kRegionGone, "the region of " + peer.name + " is not attached"};
  flight.remote = remote->second;
  flight.to_gpu = !is_write && move.local->kind == MemoryKind::kGpu;
  flight.cursor = RequestCursor(move, work.piece, *flight.remote, local.value()->local(),
                                is_write ? Side::kSrc : Side::kDst);
  if (is_write) {
    flight.number = asked.number;
    return {};
  }
  if (move.fence.slot >= FenceTable::kNumSlots)
    return {Code::kInternal, "there is no fence slot " + std::to_string(move.fence.slot)};
  // Once it has landed it needs a place among the fetched.
  std::size_t num = peer.fetched.size();
  for (const QueuePair& pair : *peer.pairs) num += pair.flights.size();
  if (num > peer.fetched.capacity()) peer.fetched.reserve(2 * num);
  flight.scratch = fences_->take();
  return {};
}

Result<const Registration*> VerbsTransport::registered(const Move& move, bool to_be_written) const {
  if (move.program->converts())
    return Status(Code::kUnsupported, "a NIC copies bytes as they are, but this program converts them");
  const auto local = registered_.find(move.local->id);
  if (local == registered_.end())
    return Status(Code::kUnsupported, "the local region is not registered with " + device_->name());
  if (const std::string& why = local->second->why_not_written(); to_be_written && !why.empty())
    return Status(Code::kUnsupported,
                  "the region here may not be written by " + device_->name() + ": " + why);
  return local->second.get();
}

// Must not be called while a chain is being filled: a peer that reads none of its messages loses its queue
// pairs here.
void VerbsTransport::await_some(Peer& peer) {
  while (peer.writes && !peer.down && peer.awaited.has_room()) {
    const std::size_t at = peer.queue.first([&](const Work& work) {
      return work.kind == WorkKind::kReceive && peer.awaited.has_room(peer.pairs->class_of(work));
    });
    if (at == peer.queue.size()) return;
    await(peer, at);
  }
}

void VerbsTransport::await(Peer& peer, std::size_t at) {
  // What needs memory comes first: a work that is in no queue would never end.
  const Status local = registered(*peer.queue[at].move, true).status();
  std::string why = local.ok() ? std::string() : words(local.message());
  Work work = peer.queue.take(at);
  PieceTicket ticket{work.move->transfer, work.piece, 0};
  if (!local.ok()) {
    end_work(failed(work.id, local.code(), std::move(why)));
    return tell_of_piece(peer, MessageKind::kGiveUp, ticket);
  }
  const std::size_t of_class = peer.pairs->class_of(work);
  ticket.number = peer.awaited.add(std::move(work), of_class).number;
  if (!std::exchange(peer.is_flying, true)) add_in_room(flying_, &peer);
  armed_ = false;
  tell_of_piece(peer, MessageKind::kAwait, ticket);
}

void VerbsTransport::cancel(std::span<const WorkId> works) noexcept {
  for (const WorkId id : works)
    if (Peer* const peer = peer_of(id); peer != nullptr && peer->writes && !peer->down) drop_piece(*peer, id);
  RailPeers::cancel(works);
}

RequestCursor::Stop VerbsTransport::add_requests(Peer& peer, Flight& flight, std::uint32_t& num_runs) {
  if (flight.work.kind == WorkKind::kSend) {
    chain_.go_on(verbs::abi::kRdmaWrite);
    const RequestCursor::Stop stop = flight.cursor.advance(chain_, num_runs);
    if (stop != RequestCursor::Stop::kDone) return stop;
    const std::vector<KeyedSpan>& spans = flight.remote->all();
    const KeyedSpan any = spans.empty() ? KeyedSpan{} : spans.front();
    return chain_.announce(htonl(flight.number), any.address, any.key) ? stop : RequestCursor::Stop::kFull;
  }
  chain_.go_on(verbs::abi::kRdmaRead);
  if (!flight.is_confirming) return flight.cursor.advance(chain_, num_runs);
  const KeyedSpan target = fences_->target(*flight.scratch);
  const std::uint64_t at = flight.work.move->fence.slot * sizeof(std::uint64_t);
  return chain_.add_word(peer.fences.address + at, peer.fences.key, target.address, target.key)
             ? RequestCursor::Stop::kDone
             : RequestCursor::Stop::kFull;
}

// ---- and come back ----

bool VerbsTransport::reap() noexcept {
  bool came = false;
  for (std::size_t i = 0; i < flying_.size();) {
    Peer* const peer = flying_[i];
    try {
      came = reap(*peer) || came;
    } catch (const std::bad_alloc&) {
      fail(*peer, kNoMemory);
    }
    if (i < flying_.size() && flying_[i] == peer) ++i;
  }
  return came;
}

bool VerbsTransport::reap(Peer& peer) {
  std::array<verbs::abi::WorkCompletion, kTakenAtOnce> taken;
  std::string broken;
  std::size_t num = kTakenAtOnce;
  bool came = false;
  for (std::size_t round = 0; round < kTakenRounds && num == kTakenAtOnce; ++round) {
    num = peer.pairs->poll(taken);
    came = came || num != 0;
    if (num != 0) flushed_ = false;
    for (const verbs::abi::WorkCompletion& completion : std::span(taken).first(num)) {
      const bool is_receive = (completion.id & verbs::kReceiveBit) != 0;
      const std::size_t index = verbs::pair_of(completion.id & ~verbs::kReceiveBit);
      if (index >= peer.pairs->size()) continue;  // not the number of a request of ours
      QueuePair& pair = (*peer.pairs)[index];
      if (is_receive) {
        if (completion.status == verbs::abi::WorkStatus::kSuccess) {
          land_written(peer, ntohl(completion.immediate));
          if (Status posted = peer.down ? Status() : pair.receive(); !posted.ok()) broken = posted.message();
        } else if (broken.empty() && !peer.down) {
          broken = device_->name() + ": a receive: " + words_of(device_->library(), completion);
        }
        continue;
      }
      const std::uint64_t position = verbs::position_of(completion.id);
      if (completion.status != verbs::abi::WorkStatus::kSuccess) {
        // Requests before the failed one have ended well; those behind it are flushed.
        for (std::size_t i = 0; i < pair.flights.size(); ++i) {
          Flight& flight = pair.flights[i];
          if (flight.end < position) continue;
          if (broken.empty() && !peer.down)
            broken = device_->name() + ": " + name_of(flight, *peer.pairs) + ": " +
                     words_of(device_->library(), completion);
          flight.stop(Code::kRailFailed, broken);
        }
        if (broken.empty() && !peer.down)
          broken = device_->name() + ": " + words_of(device_->library(), completion);
      }
      pair.complete(position);
    }
  }
  if (came) land(peer);
  if (!broken.empty()) fail(peer, broken);
  if (came && peer.is_ready && !peer.up && !peer.down && peer.num_unproved == 0) {
    tried_.erase(peer.name);
    come_up(peer);
  }
  // A work that has begun may go on.
  if (came && !peer.down && can_go_on(peer)) activate(peer);
  clean_up(peer);
  return came;
}

void VerbsTransport::land(Peer& peer) noexcept {
  if (peer.pairs == nullptr) return;
  bool any_stopped = false;
  for (QueuePair& pair : *peer.pairs) {
    for (; pair.has_landed(); pair.flights.pop()) land(peer, pair.flights.front());
    for (std::size_t i = 0; peer.due && !any_stopped && i < pair.flights.size(); ++i)
      any_stopped = pair.flights[i].is_cancelled;
  }
  for (const AwaitedPieces::Piece& piece : peer.awaited)
    any_stopped = any_stopped || piece.code == Code::kCancelled;
  if (peer.due && !peer.down && !any_stopped) unwatch(peer);
}

void VerbsTransport::land(Peer& peer, Flight& flight) noexcept {
  if (flight.to_gpu && flight.code == Code::kOk) flight.code = flush(flight.why);
  const Code code = flight.code;
  if (flight.is_proof) {
    if (code == Code::kOk) --peer.num_unproved;
    return;
  }
  const bool is_fetched = flight.scratch && code == Code::kOk;
  if (is_fetched && !flight.is_confirming) {
    add_in_room(peer.fetched, verbs::Fetched{std::move(flight.work), *flight.scratch});
    return;
  }
  const bool is_stale = is_fetched && fences_->value(*flight.scratch) != flight.work.move->fence.generation;
  if (flight.scratch) fences_->give_back(*flight.scratch);
  if (is_stale) return end_stale(peer, flight.work.id);
  end_work(flight.work.id, code, code == Code::kOk ? std::string_view() : flight.why);
}

// All WRITEs of the piece landed before their number, since they came on the same queue pair.
void VerbsTransport::land_written(Peer& peer, std::uint32_t number) noexcept {
  AwaitedPieces::Piece* const piece = peer.awaited.find(number);
  if (piece == nullptr) return;
  if (piece->code == Code::kOk && piece->work.move->local->kind == MemoryKind::kGpu)
    piece->code = flush(piece->why);
  end_awaited(peer, *piece, piece->code, piece->why);
}

// One flush serves all that completed before it.
Code VerbsTransport::flush(std::string& why) noexcept {
  if (flushed_ || !gpu_->needs_flush()) return Code::kOk;
  try {
    Status seen = gpu_->flush();
    flushed_ = seen.ok();
    if (!seen.ok()) why = words(seen.message());
    return seen.code();
  } catch (const std::bad_alloc&) {  // no memory for the driver's words
    return Code::kSystem;
  }
}

// Begins nothing new on the peer's queue pairs, and flushes what is under way.
void VerbsTransport::end_requests(Peer& peer) noexcept {
  peer.channel.close();
  peer.regions.clear();
  if (!peer.is_connected) connector_->abandon(peer.id);
  if (peer.pairs != nullptr) {
    peer.pairs->reset();
    unwatch(peer);
    if (!peer.pairs->is_drained()) watch(peer, Clock::now() + kFlushBound);
  }
  clean_up(peer);
}

void VerbsTransport::clean_up(Peer& peer) noexcept {
  if (peer.pairs != nullptr && peer.down && peer.pairs->is_drained()) {
    land(peer);
    destroy_pairs(peer);
  }
  if (peer.is_flying && (peer.pairs == nullptr || (peer.pairs->is_drained() && peer.awaited.empty()))) {
    peer.is_flying = false;
    std::erase(flying_, &peer);
  }
  if (peer.gone && peer.pairs == nullptr) erase(peer);
}

// Destroys the peer's queue pairs. Once that has returned the device touches no memory for them.
void VerbsTransport::destroy_pairs(Peer& peer) noexcept {
  unwatch(peer);
  const std::unique_ptr<QueuePairs> pairs = std::move(peer.pairs);
  pairs->destroy();
  peer.queues.release();
  for (QueuePair& pair : *pairs)
    for (; !pair.flights.empty(); pair.flights.pop()) {
      // The works got their results when the rail failed.
      pair.flights.front().stop(Code::kRailFailed, kNoMemory);
      land(peer, pair.flights.front());
    }
  while (!peer.awaited.empty()) {
    AwaitedPieces::Piece& piece = *peer.awaited.begin();
    const Code code = piece.code == Code::kOk ? Code::kRailFailed : piece.code;
    end_awaited(peer, piece, code, piece.why);
  }
}

// A WRITE that has begun runs to the end of its piece, which is no larger than the engine makes pieces. So
// the destination hears of every piece that has begun.
void VerbsTransport::stop_shared(WorkId work) noexcept {
  Peer* const peer = peer_of(work);
  if (peer == nullptr || peer->pairs == nullptr) return;
  const Clock::time_point now = Clock::now();
  if (AwaitedPieces::Piece* const piece = peer->awaited.find_work(work)) {
    if (piece->code != Code::kOk) return;
    piece->code = Code::kCancelled;
    piece->due_at = now + kWriteStopBound;
    if (!peer->due || piece->due_at < *peer->due) watch(*peer, piece->due_at);
    return tell_of_piece(*peer, MessageKind::kGiveUp,
                         {piece->work.move->transfer, piece->work.piece, piece->number});
  }
  const auto fetched = std::find_if(peer->fetched.begin(), peer->fetched.end(),
                                    [work](const verbs::Fetched& each) { return each.work.id == work; });
  if (fetched != peer->fetched.end()) {  // nothing of it is under way
    fences_->give_back(fetched->scratch);
    peer->fetched.erase(fetched);
    return end_work(work, Code::kCancelled);
  }
  for (QueuePair& pair : *peer->pairs)
    for (std::size_t i = 0; i < pair.flights.size(); ++i) {
      Flight& flight = pair.flights[i];
      if (flight.work.id != work) continue;
      const bool is_write = flight.work.kind == WorkKind::kSend;
      if (!is_write) flight.stop(Code::kCancelled, {});
      flight.is_cancelled = true;
      flight.due_at = now + (is_write ? kWriteStopBound : kStopBound);
      if (!peer->due || flight.due_at < *peer->due) watch(*peer, flight.due_at);
      return land(*peer);
    }
}

void VerbsTransport::stop_shared(PeerId id, Code code, std::string_view why) noexcept {
  Peer* const peer = find(id);
  if (peer == nullptr || peer->pairs == nullptr) return;
  for (QueuePair& pair : *peer->pairs)
    for (std::size_t i = 0; i < pair.flights.size(); ++i) pair.flights[i].stop(code, why);
  end_fetched(*peer, code, why);
  for (AwaitedPieces::Piece& piece : peer->awaited) try {
      if (piece.code == Code::kOk) piece.code = code;
      piece.why = why;
    } catch (const std::bad_alloc&) {  // the code is enough
    }
  land(*peer);
}

// ---- in time ----

void VerbsTransport::watch(Peer& peer, Clock::time_point due) noexcept {
  if (!std::exchange(peer.due, due)) add_in_room(watched_, &peer);
  Clock::time_point first = due;
  for (const Peer* const each : watched_) first = std::min(first, *each->due);
  alarm_->set(first);
}

void VerbsTransport::unwatch(Peer& peer) noexcept {
  if (!peer.due) return;
  peer.due.reset();
  std::erase(watched_, &peer);
  if (watched_.empty()) alarm_->clear();
}

void VerbsTransport::look_at_clock() noexcept {
  alarm_->acknowledge();
  if (watched_.empty()) return;
  const Clock::time_point now = Clock::now();
  for (std::size_t i = 0; i < watched_.size();) {
    Peer* const peer = watched_[i];
    if (*peer->due <= now) look_at_clock(*peer, now);
    if (i < watched_.size() && watched_[i] == peer) ++i;
  }
}

void VerbsTransport::look_at_clock(Peer& peer, Clock::time_point now) noexcept {
  if (peer.down) {  // its queue pairs were reset and do not flush
    destroy_pairs(peer);
    return clean_up(peer);
  }
  std::optional<Clock::time_point> first;
  for (const QueuePair& pair : *peer.pairs)
    for (std::size_t i = 0; i < pair.flights.size(); ++i)
      if (const Flight& flight = pair.flights[i]; flight.is_cancelled)
        first = std::min(first.value_or(flight.due_at), flight.due_at);
  for (const AwaitedPieces::Piece& piece : peer.awaited)
    if (piece.code == Code::kCancelled) first = std::min(first.value_or(piece.due_at), piece.due_at);
  if (!first) return unwatch(peer);
  if (*first > now) return watch(peer, *first);
  fail_saying(peer, [] {
    return "cancelled READs or WRITEs did not end in time (" + std::to_string(kStopBound.count()) + " and " +
           std::to_string(kWriteStopBound.count()) +
           " ms), so its queue pairs are reset: the peer, its port or the network does not answer";
  });
}

// ---- for the core ----

std::size_t VerbsTransport::poll(std::span<Completion> completions) noexcept {
  reap();
  look_at_clock();
  post_some();
  return ready_.take(completions);
}

bool VerbsTransport::busy() const noexcept {
  return !ready_.empty() ||
         std::any_of(active().begin(), active().end(), [this](const Peer* peer) { return has_turn(*peer); });
}

bool VerbsTransport::wants_poll() const noexcept {
  return alarm_->has_rung() || (!armed_ && !flying_.empty()) || busy();
}

bool VerbsTransport::arm() noexcept {
  if (!armed_) {
    for (Peer* const peer : flying_) peer->pairs->arm();
    armed_ = true;
    if (reap()) armed_ = false;
  }
  return !wants_poll();
}

// ---- what the device announces ----

void VerbsTransport::on_completion_event() {
  const verbs::Library& library = device_->library();
  verbs::abi::CompletionQueue* cq = nullptr;
  void* unused = nullptr;
  // Acknowledges each event, because a queue with unacknowledged events cannot be destroyed.
  while (library.get_cq_event(device_->channel(), &cq, &unused) == 0) library.ack_cq_events(cq, 1);
  armed_ = false;
}

void VerbsTransport::on_device_event() {
  verbs::abi::AsyncEvent event;
  while (device_->library().get_async_event(device_->context(), &event) == 0) {
    const verbs::abi::AsyncEvent told = event;
    device_->library().ack_async_event(&event);
    on_device_event(told);
  }
}

void VerbsTransport::on_device_event(const verbs::abi::AsyncEvent& event) {
  const std::string what = device_->name() + " announced: " + device_->library().event_type_str(event.kind);
  switch (event.kind) {
    case verbs::abi::EventKind::kDeviceFatal: is_dead_ = true; return fail_all(what);
    case verbs::abi::EventKind::kPortError:
      if (event.element.port_num == device_->port()) fail_all(what);
      return;
    case verbs::abi::EventKind::kPortActive:
      if (event.element.port_num == device_->port() && !is_dead_) lost_why_.clear();
      return;
    case verbs::abi::EventKind::kCqError:
    case verbs::abi::EventKind::kQpFatal: {
      Peer* whose = nullptr;
      for_each_peer([&](Peer& peer) {
        if (peer.pairs != nullptr && peer.pairs->owns(event)) whose = &peer;
      });
      if (whose != nullptr) fail(*whose, what);
      return;
    }
    case verbs::abi::EventKind::kGidChange: return tried_.clear();
    // Each new peer gets addresses that are read anew. A peer whose request was refused here hears of that
    // with the reason, and ends the rail. If we told it first that the rail has ended, it would not learn the
    // reason.
    default: return;
  }
}

void VerbsTransport::fail_all(const std::string& why) {
  lost_why_ = why;
  for_each_peer([&](Peer& peer) { fail(peer, why); });
}

}  // namespace kvxfer
