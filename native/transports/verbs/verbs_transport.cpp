#include "transports/verbs/verbs_transport.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <new>

#include "transports/verbs/faults.h"

namespace kvxfer {

using verbs::Flight;
using verbs::KeyedSpan;
using verbs::Message;
using verbs::MessageKind;
using verbs::QueuePair;
using verbs::QueuePairs;
using verbs::ReadCursor;
using verbs::Registration;

namespace {

// Runs that a poll makes requests of: 0.1 ms where each is one.
constexpr std::uint32_t kRunsPerPoll = 2048;
// Completions that are taken from a peer's queue before others are looked at.
constexpr std::size_t kTakenAtOnce = 32, kTakenRounds = 4;
// What is cancelled ends with its last request, in far less than a millisecond; where the peer is dead, or the
// network, only a reset ends it.
constexpr std::chrono::milliseconds kStopBound{200};
// Queue pairs that are reset flush what they had at once. Where that does not happen they are destroyed, after which
// the device touches no memory for them either.
constexpr std::chrono::milliseconds kFlushBound{500};

// Peers of whom is known which addresses they did not answer at.
constexpr std::size_t kMostTried = 256;

std::string name_of(const Flight& flight, const QueuePairs& pairs) {
  const Work& work = flight.work;
  if (flight.is_proof) return "the first READ over a new connection " + pairs.way();
  if (work.kind != WorkKind::kFetch) return "a READ of the fence word";
  const Piece piece = work.move->grid.piece(work.piece);
  return "a READ of layer " + std::to_string(piece.layer) + ", " + std::to_string(piece.num_pairs) +
         " blocks from the table's place " + std::to_string(piece.first_pair) + " on";
}

}  // namespace

Result<std::unique_ptr<VerbsTransport>> VerbsTransport::create(Reactor& reactor, const FenceTable& fences,
                                                               std::shared_ptr<verbs::Device> device,
                                                               std::shared_ptr<const verbs::GpuMemory> gpu,
                                                               std::uint32_t rank) {
  Result<std::unique_ptr<verbs::FenceWords>> words = verbs::FenceWords::create(device, fences);
  if (!words.ok()) return words.status();
  Result<std::unique_ptr<verbs::Alarm>> alarm = verbs::Alarm::create(reactor);
  if (!alarm.ok()) return alarm.status();
  std::unique_ptr<VerbsTransport> made(new VerbsTransport(
      reactor, std::move(device), std::move(gpu), rank, std::move(alarm).value(), std::move(words).value()));
  if (Status listening = made->listen(); !listening.ok()) return listening;
  return made;
}

VerbsTransport::VerbsTransport(Reactor& reactor, std::shared_ptr<verbs::Device> device,
                               std::shared_ptr<const verbs::GpuMemory> gpu, std::uint32_t rank,
                               std::unique_ptr<verbs::Alarm> alarm, std::unique_ptr<verbs::FenceWords> fences)
    : RailPeers(reactor),
      reactor_(reactor),
      device_(std::move(device)),
      gpu_(std::move(gpu)),
      rank_(rank),
      fences_(std::move(fences)),
      alarm_(std::move(alarm)),
      chain_(device_->num_entries(), device_->most_read_nbytes()) {}

Status VerbsTransport::listen() {
  if (Status added = reactor_.add(device_->channel()->fd, EPOLLIN, completions_); !added.ok()) return added;
  return reactor_.add(device_->context()->async_fd, EPOLLIN, events_);
}

VerbsTransport::~VerbsTransport() {
  reactor_.remove(device_->channel()->fd);
  reactor_.remove(device_->context()->async_fd);
  // First, so that the device writes nowhere any more while the rest goes.
  for_each_peer([](Peer& peer) { peer.pairs.reset(); });
}

Capabilities VerbsTransport::capabilities() const noexcept {
  return {.name = "verbs",
          .one_sided = true,
          .rank = rank_,
          .window = 64,
          .memory = gpu_ == nullptr ? MemoryKinds(MemoryKind::kHost)
                                    : MemoryKinds(MemoryKind::kHost) | MemoryKind::kGpu,
          .converts = false};
}

// ---- our memory ----

Result<Pinned> VerbsTransport::prepare(const LocalRegion& region) {
  Result<std::shared_ptr<const Registration>> made = Registration::create(device_, region, gpu_.get());
  if (!made.ok()) return made.status();
  return Pinned(std::move(made).value());
}

Result<RegionKeys> VerbsTransport::register_memory(const LocalRegion& region, const Pinned& pinned) {
  auto registration = std::static_pointer_cast<const Registration>(pinned);
  if (registration == nullptr) {
    Result<std::shared_ptr<const Registration>> made = Registration::create(device_, region, gpu_.get());
    if (!made.ok()) return made.status();
    registration = std::move(made).value();
  }
  RegionKeys keys = registration->keys();
  registered_[region.id] = std::move(registration);
  return keys;
}

void VerbsTransport::deregister_memory(RegionId region) noexcept { registered_.erase(region); }

// ---- peers' memory ----

std::string VerbsTransport::path_to(PeerId id) const {
  const Peer* const peer = find(id);
  return peer == nullptr ? std::string() : peer->path;
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
  if (!lost_why_.empty()) return Status(Code::kRailFailed, words(lost_why_));
  if (const Result<KeyedSpan> shared = fences_->share(info.fence_slots); !shared.ok())
    return Status(shared.status().code(), words(shared.status().message()));
  Charge queues = Charge::take(info.budget, Resource::kBytes, QueuePairs::nbytes(*device_));
  if (!queues)
    return Status(Code::kExhausted,
                  words("no queue pairs are made for it: " + info.budget->in_words(Resource::kBytes)));
  const auto tried = tried_.find(info.peer_name);
  Result<std::unique_ptr<QueuePairs>> pairs =
      QueuePairs::create(device_, tried == tried_.end() ? std::span<const verbs::GidRow>() : tried->second);
  if (!pairs.ok()) return Status(pairs.status().code(), words(pairs.status().message()));
  std::size_t num_peers = 1;
  for_each_peer([&](const Peer&) { ++num_peers; });
  flying_.reserve(num_peers);
  watched_.reserve(num_peers);
  Result<PeerId> added = add_peer(std::move(socket), info, std::move(pairs).value());
  if (added.ok()) find(added.value())->queues = std::move(queues);
  return added;
}

void VerbsTransport::greet(Peer& peer) {
  Message hello;
  peer.pairs->introduce(hello);
  const KeyedSpan words = fences_->share(peer.fence_slots).value();
  hello.fence_address = words.address;
  hello.fence_nbytes = words.end - words.offset;
  hello.fence_key = words.key;
  tell(peer, hello);
}

Status VerbsTransport::on_hello(Peer& peer, const Message& hello, UniqueFd) {
  if (hello.fence_nbytes != peer.fence_slots.nbytes())
    return {Code::kRailFailed, "its fence table has " + std::to_string(hello.fence_nbytes) + " bytes, not " +
                                   std::to_string(peer.fence_slots.nbytes())};
  peer.fences = {0, hello.fence_nbytes, hello.fence_address, hello.fence_key};
  if (Status connected = peer.pairs->connect(hello); !connected.ok()) {
    remember_address(peer);
    return {connected.code(), "its " + hello.device_name() + ": " + connected.message()};
  }
  peer.path = device_->name() + " " + peer.pairs->way() + " (" + hello.device_name() + ")";
  Message ready;
  ready.kind = MessageKind::kReady;
  tell(peer, ready);
  return {};
}

Status VerbsTransport::on_message(Peer& peer, const Message&, UniqueFd) {
  if (std::exchange(peer.is_ready, true)) return {Code::kRailFailed, "it said twice that it is ready"};
  return prove(peer);
}

void VerbsTransport::on_down(Peer& peer) {
  // So too where the other end has given up, whose READs were not answered either.
  if (peer.num_unproved != 0) remember_address(peer);
  end_requests(peer);
}

// It led nowhere, as far as that is known: the next connection has another.
void VerbsTransport::remember_address(const Peer& peer) noexcept {
  const std::optional<verbs::GidRow>& row = peer.pairs->address().row;
  if (!row) return;
  try {
    if (tried_.size() >= kMostTried) tried_.clear();
    std::vector<verbs::GidRow>& tried = tried_[peer.name];
    if (std::find(tried.begin(), tried.end(), *row) != tried.end()) tried.clear();  // each was: once more
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
  if (work.kind == WorkKind::kCheckFence && !fences_->has_room()) return false;
  return std::any_of(peer.pairs->begin(), peer.pairs->end(),
                     [](const QueuePair& pair) { return pair.can_begin(); });
}

bool VerbsTransport::can_go_on(const Peer& peer) const noexcept {
  return peer.pairs != nullptr && !peer.down &&
         std::any_of(peer.pairs->begin(), peer.pairs->end(),
                     [](const QueuePair& pair) { return pair.can_go_on(); });
}

// Each queue pair READs a word, which is nobody's affair.
Status VerbsTransport::prove(Peer& peer) {
  const KeyedSpan to = fences_->nowhere();
  for (QueuePair& pair : *peer.pairs) {
    pair.begin(chain_, 1);
    chain_.add(peer.fences.address, peer.fences.key, to.address, to.key, sizeof(std::uint64_t));
    Flight& flight = pair.flights.push(Flight());
    flight.is_proof = flight.is_posted = true;
    flight.end = pair.posted() + chain_.size();
    ++peer.num_unproved;
    if (Status posted = pair.post(chain_); !posted.ok()) return posted;
    armed_ = false;
    if (!std::exchange(peer.is_flying, true)) flying_.push_back(&peer);
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
      // One chain of one peer after the other, on one queue pair after the other.
      QueuePairs& pairs = *peer->pairs;
      for (std::size_t left = pairs.size(); left > 0; --left) {
        QueuePair& pair = pairs[peer->turn++ % pairs.size()];
        if (!pair.can_go_on() && (!pair.can_begin() || peer->queue.empty())) continue;
        post_chain(*peer, pair, num_runs);
        break;
      }
    } catch (const std::bad_alloc&) {
      fail(*peer, kNoMemory);
    }
}

void VerbsTransport::post_chain(Peer& peer, QueuePair& pair, std::uint32_t& num_runs) {
  pair.begin(chain_, verbs::kMostChained);
  while (num_runs != 0 && !chain_.is_full()) {
    if (!pair.goes_on()) {
      if (peer.queue.empty() || pair.flights.size() == QueuePair::kMostFlights) break;
      const std::size_t at = first_that_runs(peer);
      if (at == peer.queue.size()) break;
      --num_runs;  // however short it is
      if (!begin(peer, pair, at)) continue;
    }
    Flight& flight = pair.flights.back();
    const ReadCursor::Stop stop = add_requests(peer, flight, num_runs);
    flight.end = pair.posted() + chain_.size();
    if (stop == ReadCursor::Stop::kFull || stop == ReadCursor::Stop::kTired) break;
    chain_.close();  // no request is of two works
    flight.is_posted = true;
    if (stop == ReadCursor::Stop::kOutside)
      flight.stop(Code::kInternal, words(flight.cursor.outside() == Side::kSrc
                                             ? "the piece ends outside the region of " + peer.name
                                             : "the piece ends outside the region here"));
  }
  if (chain_.size() == 0) return land(peer);
  if (Status posted = pair.post(chain_); !posted.ok()) return fail(peer, posted.message());
  armed_ = false;
  if (!std::exchange(peer.is_flying, true)) flying_.push_back(&peer);
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

Status VerbsTransport::prepare_flight(Peer& peer, Flight& flight) {
  const Work& work = flight.work;
  if (work.kind == WorkKind::kCheckFence) {
    if (!peer.fence_slots.contains(work.fence_slot))
      return {Code::kInternal, "there is no fence slot " + std::to_string(work.fence_slot)};
    flight.scratch = fences_->take();
    return {};
  }
  if (work.kind != WorkKind::kFetch) return {Code::kUnsupported, "the destination fetches; nothing is sent"};
  const Move& move = *work.move;
  if (move.program->converts())
    return {Code::kUnsupported, "a NIC copies bytes as they are, and this program converts them"};
  const auto local = registered_.find(move.local->id);
  if (local == registered_.end())
    return {Code::kUnsupported, "the region here is not registered with " + device_->name()};
  if (const std::string& why = local->second->why_not_written(); !why.empty())
    return {Code::kUnsupported, "the region here may not be written by " + device_->name() + ": " + why};
  const auto remote = peer.regions.find(move.remote_region);
  if (remote == peer.regions.end())
    return {Code::kRegionGone, "the region of " + peer.name + " is not attached"};
  flight.remote = remote->second;
  flight.to_gpu = move.local->kind == MemoryKind::kGpu;
  flight.cursor = ReadCursor(move, work.piece, *flight.remote, local->second->local());
  return {};
}

ReadCursor::Stop VerbsTransport::add_requests(Peer& peer, Flight& flight, std::uint32_t& num_runs) {
  if (flight.work.kind == WorkKind::kFetch) return flight.cursor.advance(chain_, num_runs);
  // The engine asks once all that it asks about has landed.
  const KeyedSpan target = fences_->target(*flight.scratch);
  const std::uint64_t at = (flight.work.fence_slot - peer.fence_slots.first) * sizeof(std::uint64_t);
  const std::uint64_t added = chain_.add(peer.fences.address + at, peer.fences.key, target.address,
                                         target.key, sizeof(std::uint64_t));
  // A word is not read in two halves.
  if (added == sizeof(std::uint64_t)) return ReadCursor::Stop::kDone;
  return ReadCursor::Stop::kFull;
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
      const std::size_t index = verbs::pair_of(completion.id);
      if (index >= peer.pairs->size()) continue;  // no request of ours has such a number
      QueuePair& pair = (*peer.pairs)[index];
      const std::uint64_t position = verbs::position_of(completion.id);
      if (completion.status != verbs::abi::WorkStatus::kSuccess) {
        // Requests before it have ended well; whatever was behind it is flushed.
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
  // It may go on with what it had begun.
  if (came && !peer.down && can_go_on(peer)) activate(peer);
  settle(peer);
  return came;
}

void VerbsTransport::land(Peer& peer) noexcept {
  if (peer.pairs == nullptr) return;
  bool any_stopped = false;
  for (QueuePair& pair : *peer.pairs) {
    for (; pair.has_landed(); pair.flights.pop()) land(peer, pair.flights.front());
    for (std::size_t i = 0; peer.due && !any_stopped && i < pair.flights.size(); ++i)
      any_stopped = pair.flights[i].code == Code::kCancelled;
  }
  if (peer.due && !peer.down && !any_stopped) unwatch(peer);
}

void VerbsTransport::land(Peer& peer, Flight& flight) noexcept {
  if (flight.to_gpu && flight.code == Code::kOk) flush(flight);
  Code code = flight.code;
  if (flight.is_proof) {
    if (code == Code::kOk) --peer.num_unproved;
    return;
  }
  if (flight.scratch && code == Code::kOk &&
      fences_->value(*flight.scratch) != flight.work.fence_generation) {
    flight.stop(Code::kLeaseEnded, "");
    try {
      flight.why = words(peer.name + " ended the right to read while the bytes moved");
    } catch (const std::bad_alloc&) {  // its code says enough
    }
    code = flight.code;
  }
  if (flight.scratch) fences_->give_back(*flight.scratch);
  end_work(flight.work.id, code, code == Code::kOk ? std::string_view() : flight.why);
}

// One flush is for all that completed before it.
void VerbsTransport::flush(Flight& flight) noexcept {
  if (flushed_ || !gpu_->needs_flush()) return;
  try {
    if (Status seen = gpu_->flush(); !seen.ok()) return flight.stop(seen.code(), seen.message());
    flushed_ = true;
  } catch (const std::bad_alloc&) {  // of the driver's words
    flight.stop(Code::kSystem, {});
  }
}

// Nothing new begins on its queue pairs, and what is under way is flushed.
void VerbsTransport::end_requests(Peer& peer) noexcept {
  peer.channel.close();
  peer.regions.clear();
  if (peer.pairs != nullptr) {
    peer.pairs->reset();
    unwatch(peer);
    if (!peer.pairs->is_drained()) watch(peer, Clock::now() + kFlushBound);
  }
  settle(peer);
}

void VerbsTransport::settle(Peer& peer) noexcept {
  if (peer.pairs != nullptr && peer.down && peer.pairs->is_drained()) {
    land(peer);
    let_go(peer);
  }
  if (peer.is_flying && (peer.pairs == nullptr || peer.pairs->is_drained())) {
    peer.is_flying = false;
    std::erase(flying_, &peer);
  }
  if (peer.gone && peer.pairs == nullptr) erase(peer);
}

// Destroys its queue pairs: once that has returned the device touches no memory for them.
void VerbsTransport::let_go(Peer& peer) noexcept {
  unwatch(peer);
  const std::unique_ptr<QueuePairs> pairs = std::move(peer.pairs);
  pairs->destroy();
  peer.queues.release();
  for (QueuePair& pair : *pairs)
    for (; !pair.flights.empty(); pair.flights.pop()) {
      // What it ended with was said when the rail failed.
      pair.flights.front().stop(Code::kRailFailed, kNoMemory);
      land(peer, pair.flights.front());
    }
}

void VerbsTransport::stop_shared(WorkId work) noexcept {
  Peer* const peer = peer_of(work);
  if (peer == nullptr || peer->pairs == nullptr) return;
  for (QueuePair& pair : *peer->pairs)
    for (std::size_t i = 0; i < pair.flights.size(); ++i) {
      Flight& flight = pair.flights[i];
      if (flight.work.id != work) continue;
      flight.stop(Code::kCancelled, {});
      flight.stopped_at = Clock::now();
      if (!peer->due) watch(*peer, flight.stopped_at + kStopBound);
      return land(*peer);
    }
}

void VerbsTransport::stop_shared(PeerId id, Code code, std::string_view why) noexcept {
  Peer* const peer = find(id);
  if (peer == nullptr || peer->pairs == nullptr) return;
  for (QueuePair& pair : *peer->pairs)
    for (std::size_t i = 0; i < pair.flights.size(); ++i) pair.flights[i].stop(code, why);
  land(*peer);
}

// ---- in time ----

void VerbsTransport::watch(Peer& peer, Clock::time_point due) noexcept {
  if (!std::exchange(peer.due, due)) watched_.push_back(&peer);
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
  alarm_->hush();
  if (watched_.empty()) return;
  const Clock::time_point now = Clock::now();
  for (std::size_t i = 0; i < watched_.size();) {
    Peer* const peer = watched_[i];
    if (*peer->due <= now) look_at_clock(*peer, now);
    if (i < watched_.size() && watched_[i] == peer) ++i;
  }
}

void VerbsTransport::look_at_clock(Peer& peer, Clock::time_point now) noexcept {
  if (peer.down) {  // it does not flush
    let_go(peer);
    return settle(peer);
  }
  std::optional<Clock::time_point> first;
  for (const QueuePair& pair : *peer.pairs)
    for (std::size_t i = 0; i < pair.flights.size(); ++i)
      if (const Flight& flight = pair.flights[i]; flight.code == Code::kCancelled)
        first = std::min(first.value_or(flight.stopped_at), flight.stopped_at);
  if (!first) return unwatch(peer);
  if (*first + kStopBound > now) return watch(peer, *first + kStopBound);
  fail(peer, "READs that were cancelled had not ended after " + std::to_string(kStopBound.count()) +
                 " ms, so its queue pairs are reset: the peer's port, or the network, does not answer");
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
  // Each is acknowledged, or its queue could not be destroyed.
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
    // Addresses are asked for anew with each peer. A peer whose request was refused here hears it with the reason, and
    // ends the rail; were it told first that the rail has ended, it would not know why.
    default: return;
  }
}

void VerbsTransport::fail_all(const std::string& why) {
  lost_why_ = why;
  for_each_peer([&](Peer& peer) { fail(peer, why); });
}

}  // namespace kvxfer
