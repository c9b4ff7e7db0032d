#include "transports/fabric/fabric_rail.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <new>

#include "core/in_room.h"

namespace kvxfer {

using fabric::Introduction;
using fabric::Message;
using fabric::MessageKind;
using fabric::RemoteMemory;

namespace fabric {

void Peer::Bell::on_ready(std::uint32_t) { rail.wake(peer); }

Flight* Peer::begin_receive(const PieceHeader& header) noexcept {
  return bell.rail.begin_receive(*this, header);
}

}  // namespace fabric

namespace {

// A timer that is this late means that the thread itself stood still.
constexpr std::chrono::milliseconds kStandstill{100};
// The descriptor stays readable until arm() has taken what made it so, and while there is more.
constexpr std::uint32_t kEdges = EPOLLIN | EPOLLET;
template <class Name>
std::vector<std::byte> socket_name(int fd, Name name) {
  sockaddr_storage storage{};
  socklen_t nbytes = sizeof storage;
  if (name(fd, reinterpret_cast<sockaddr*>(&storage), &nbytes) != 0) return {};
  const auto* const first = reinterpret_cast<const std::byte*>(&storage);
  return {first, first + std::min<std::size_t>(nbytes, sizeof storage)};
}

// For each peer; more regions than it may register at a time. The oldest have the smallest ids.
constexpr std::size_t kMostGone = 8192;

}  // namespace

// What a thread does with an endpoint.
struct FabricRail::Job final : Connector::SetUp {
  enum class Kind : std::uint8_t { kOpen, kConnect, kClose };
  Job(const Peer& of, Kind its_kind, std::shared_ptr<fabric::Fabric> its_fabric)
      : SetUp(of.id, of.name), kind(its_kind), fabric(std::move(its_fabric)) {}
  ~Job() override {
    fences.reset();
    end(endpoint, flights);
  }
  static void end(std::unique_ptr<Endpoint>& endpoint,
                  const std::vector<std::unique_ptr<Flight>>& flights) noexcept {
    if (endpoint == nullptr) return;
    endpoint->close();
    for (const auto& flight : flights) flight->remote.reset();  // they hold objects of the endpoint
    endpoint.reset();
  }

  Status run() override {
    if (kind == Kind::kClose) {
      end(endpoint, flights);
      return {};
    }
    if (kind == Kind::kConnect) {
      if (Status connected = endpoint->connect(introduction->address); !connected.ok()) return connected;
      Result<std::shared_ptr<const RemoteMemory>> words =
          RemoteMemory::unpack(introduction->fences, *endpoint);
      if (words.ok()) fences = std::move(words).value();
      return words.ok() ? Status() : words.status();
    }
    Result<std::unique_ptr<Endpoint>> opened = fabric->open(route);
    if (!opened.ok()) return opened.status();
    endpoint = std::move(opened).value();
    ours.address = endpoint->address();
    messages = ours.encode();
    return {};
  }

  const Kind kind;
  const std::shared_ptr<fabric::Fabric> fabric;
  fabric::Route route;  // kOpen
  Introduction ours;    // likewise
  std::vector<Message> messages;
  std::optional<Introduction> introduction;  // kConnect
  std::unique_ptr<Endpoint> endpoint;
  std::vector<std::unique_ptr<Flight>> flights;  // kClose
  std::shared_ptr<const RemoteMemory> fences;  // kConnect; released before the endpoint
};

Result<std::unique_ptr<FabricRail>> FabricRail::create(Reactor& reactor, const FenceTable& fences,
                                                       std::shared_ptr<fabric::Fabric> fabric) {
  Result<std::unique_ptr<FenceWords>> words = FenceWords::create(
      [fabric](const LocalRegion& region) { return Registration::create(fabric, region, false); }, fences);
  if (!words.ok()) return words.status();
  Result<std::unique_ptr<Alarm>> alarm = Alarm::create(reactor);
  if (!alarm.ok()) return alarm.status();
  Result<std::unique_ptr<Connector>> connector = Connector::create();
  if (!connector.ok()) return connector.status();
  std::unique_ptr<FabricRail> made(new FabricRail(reactor, std::move(fabric), std::move(alarm).value(),
                                                  std::move(connector).value(), std::move(words).value()));
  if (Status added = reactor.add(made->connector_->fd(), EPOLLIN, made->set_ups_); !added.ok()) return added;
  return made;
}

FabricRail::FabricRail(Reactor& reactor, std::shared_ptr<fabric::Fabric> fabric, std::unique_ptr<Alarm> alarm,
                       std::unique_ptr<Connector> connector, std::unique_ptr<FenceWords> fences)
    : WrittenPieces(reactor),
      reactor_(reactor),
      fabric_(std::move(fabric)),
      fences_(std::move(fences)),
      alarm_(std::move(alarm)),
      connector_(std::move(connector)) {}

FabricRail::~FabricRail() {
  reactor_.remove(connector_->fd());
  // Endpoints go first, so that nothing lands any more while the rest is destroyed.
  for_each_peer([this](Peer& peer) {
    unwatch_endpoint(peer);
    peer.regions.clear();
    peer.fences.reset();
    Job::end(peer.endpoint, peer.flights);
  });
  connector_.reset();
}

Capabilities FabricRail::capabilities() const noexcept {
  return {.name = fabric_->transport(),
          .one_sided = true,
          .two_sided = fabric_->can_send() || fabric_->takes_writes(),
          .window = 64,
          .memory = fabric_->memory(),
          .converts = false,
          .pins = true};
}

// ---- our memory ----

Result<Pinned> FabricRail::prepare(const LocalRegion& region) {
  Result<std::shared_ptr<const Registration>> made =
      Registration::create(fabric_, region, fabric_->takes_writes());
  if (!made.ok()) return made.status();
  return Pinned(std::move(made).value());
}

Result<RegionKeys> FabricRail::register_memory(const LocalRegion& region, const Pinned& pinned) {
  auto registration = std::static_pointer_cast<const Registration>(pinned);
  RegionKeys keys = registration->keys();
  registered_[region.id] = std::move(registration);
  return keys;
}

void FabricRail::deregister_memory(RegionId region) noexcept {
  auto found = registered_.extract(region);
  if (found.empty() || !fabric_->serves_peers()) return;
  for_each_peer([&](Peer& peer) {
    if (!peer.is_introduced || (peer.endpoint == nullptr && !peer.is_being_set_up)) return;
    try {
      Leaving& leaving = leaving_[region];
      leaving.registration = found.mapped();
      leaving.held_by.insert(peer.id);
    } catch (const std::bad_alloc&) {
      fail(peer, kNoMemory);
      return;
    }
    tell(peer, Message::about(MessageKind::kGone, region));
  });
}

bool FabricRail::held_by_peers(RegionId region) const noexcept {
  return region == kEveryRegion ? !leaving_.empty() : leaving_.contains(region);
}

std::vector<std::string> FabricRail::give_up_holders(RegionId region) {
  std::vector<std::string> names;
  std::set<PeerId> holders;
  for (const auto& [id, leaving] : leaving_)
    if (region == kEveryRegion || id == region)
      holders.insert(leaving.held_by.begin(), leaving.held_by.end());
  for (const PeerId id : holders) {
    Peer* const peer = find(id);
    if (peer == nullptr) continue;
    names.push_back(peer->name);
    fail(*peer, "it did not confirm in time that it has stopped reading a deregistered region");
    connector_->await(id);
  }
  on_set_up();
  // Endpoints that are still there are being opened or connected, and are closed next.
  for (const PeerId id : holders)
    if (find(id) != nullptr) connector_->await(id);
  on_set_up();
  return names;
}

void FabricRail::forget_holder(PeerId peer, RegionId region) noexcept {
  const auto leaving = leaving_.find(region);
  if (leaving == leaving_.end()) return;
  leaving->second.held_by.erase(peer);
  if (leaving->second.held_by.empty()) leaving_.erase(leaving);
}

// ---- peers' memory ----

std::string FabricRail::path_to(PeerId id) const {
  const Peer* const peer = find(id);
  return peer == nullptr ? std::string() : peer->path;
}

WorkKind FabricRail::choose(PeerId id, const Move&, std::uint32_t) const noexcept {
  const Peer* const peer = find(id);
  return peer != nullptr && peer->way != fabric::Way::kRead ? WorkKind::kReceive : WorkKind::kFetch;
}

Status FabricRail::attach(PeerId id, const RemoteRegion& region) {
  const Result<Peer*> found = find_up(id);
  if (!found.ok()) return found.status();
  Peer& peer = *found.value();
  if (peer.endpoint == nullptr) return {Code::kRailFailed, words("not connected to this peer")};
  if (peer.gone_regions.contains(region.id))
    return {Code::kUnsupported, words("the region of " + peer.name + " is gone already")};
  Result<std::shared_ptr<const RemoteMemory>> memory = RemoteMemory::unpack(region.keys, *peer.endpoint);
  if (!memory.ok())
    return {memory.status().code(), words("the region of " + peer.name + ": " + memory.status().message())};
  peer.regions[region.id] = std::move(memory).value();
  return {};
}

void FabricRail::detach(PeerId id, RegionId region) noexcept {
  if (Peer* const peer = find(id)) peer->regions.erase(region);
}

// ---- an endpoint's life ----

Result<PeerId> FabricRail::connect(UniqueFd socket, const ConnectInfo& info) {
  if (const Result<const Registration*> shared = fences_->share(); !shared.ok())
    return refuse(std::move(socket), info, shared.status());
  Charge charge = Charge::take(info.budget, Resource::kBytes, fabric_->endpoint_nbytes());
  if (!charge)
    return refuse(
        std::move(socket), info,
        {Code::kExhausted, "no endpoint is opened for it: " + info.budget->in_words(Resource::kBytes)});
  std::size_t num_peers = 1;
  for_each_peer([&](const Peer&) { ++num_peers; });
  awake_.reserve(num_peers);
  Result<PeerId> added = add_peer(std::move(socket), info, *this);
  if (!added.ok()) return added;
  Peer& peer = *find(added.value());
  peer.charge = std::move(charge);
  return added;
}

void FabricRail::greet(Peer& peer) {
  auto job = std::make_unique<Job>(peer, Job::Kind::kOpen, fabric_);
  job->route = {socket_name(peer.channel.fd(), ::getsockname), socket_name(peer.channel.fd(), ::getpeername)};
  job->ours.library = fabric_->library();
  job->ours.terms = fabric_->terms();
  job->ours.fences = fences_->share().value()->keys();
  if (Status begun = begin_set_up(peer, job); !begun.ok()) fail(peer, begun.message());
}

Status FabricRail::begin_set_up(Peer& peer, std::unique_ptr<Job>& job) {
  std::unique_ptr<Connector::SetUp> set_up = std::move(job);
  peer.is_being_set_up = true;
  try {
    Status begun = connector_->begin(set_up);
    if (begun.ok()) return begun;
    peer.is_being_set_up = false;
    job.reset(static_cast<Job*>(set_up.release()));
    return begun;
  } catch (const std::bad_alloc&) {
    peer.is_being_set_up = false;
    job.reset(static_cast<Job*>(set_up.release()));
    throw;
  }
}

void FabricRail::on_set_up() {
  connector_->acknowledge();
  while (const std::unique_ptr<Connector::SetUp> any = connector_->take_ended()) {
    Job& ended = static_cast<Job&>(*any);
    Peer* const peer = find(ended.peer);  // the peer is kept until its endpoint is closed
    if (peer == nullptr) continue;
    peer->is_being_set_up = false;
    if (ended.kind == Job::Kind::kClose) {
      peer->flights = std::move(ended.flights);
      closed(*peer);
      continue;
    }
    try {
      take_endpoint(*peer, std::move(ended.endpoint));
      Status status = peer->down ? Status() : on_set_up(*peer, ended);
      if (peer->down)
        end_requests(*peer);  // a thread had the endpoint
      else if (!status.ok())
        fail(*peer, status.code() == Code::kExhausted && status.message().empty() ? std::string(kNoMemory)
                                                                                  : status.message());
    } catch (const std::bad_alloc&) {
      fail(*peer, kNoMemory);
    }
  }
}

Status FabricRail::on_set_up(Peer& peer, Job& ended) {
  if (!ended.status.ok() && ended.introduction)
    return {ended.status.code(), ended.status.message() + "; the peer has " + ended.introduction->library};
  if (!ended.status.ok()) return ended.status;
  if (ended.kind == Job::Kind::kOpen) {
    peer.is_introduced = true;
    for (const Message& message : ended.messages) tell(peer, message);
    return peer.down ? Status() : meet(peer);
  }
  peer.fences = std::move(ended.fences);
  const fabric::KeyedSpan* const words = peer.fences->spans.find(0);
  if (words == nullptr || words->end < FenceTable::kNbytes)
    return {Code::kRailFailed, "its fence table has another length than ours"};
  peer.is_connected = true;
  peer.preferred = peer.endpoint->preferred_way();
  Message ready = Message::about(MessageKind::kReady);
  ready.flag = static_cast<std::uint32_t>(peer.preferred);
  tell(peer, ready);
  return peer.is_ready && !peer.down ? prove(peer) : Status();
}

void FabricRail::take_endpoint(Peer& peer, std::unique_ptr<Endpoint> endpoint) {
  peer.endpoint = std::move(endpoint);
  if (peer.endpoint == nullptr) return;
  peer.endpoint->receive_for(&peer);
  peer.quiet_since = Clock::now();
  if (!peer.down && peer.endpoint->fd() >= 0) {
    if (Status added = reactor_.add(peer.endpoint->fd(), kEdges, peer.bell); !added.ok())
      return fail(peer, added.message());
    peer.is_watched = true;
  }
  wake(peer);
}

void FabricRail::unwatch_endpoint(Peer& peer) noexcept {
  if (std::exchange(peer.is_watched, false)) reactor_.remove(peer.endpoint->fd());
  if (std::exchange(peer.is_awake, false)) std::erase(awake_, &peer);
}

Status FabricRail::on_hello(Peer& peer, const Message& hello, UniqueFd) {
  peer.whole_nbytes = hello.whole_nbytes;
  return hear(peer, hello);
}

Status FabricRail::hear(Peer& peer, const Message& part) {
  const std::size_t left = peer.whole_nbytes - peer.heard.size();
  if (peer.introduction || part.part_nbytes == 0 || part.part_nbytes > left)
    return {Code::kRailFailed, "its introduction is not as long as announced"};
  peer.heard.insert(peer.heard.end(), part.part.begin(), part.part.begin() + part.part_nbytes);
  if (peer.heard.size() < peer.whole_nbytes) return {};
  Result<Introduction> decoded = Introduction::decode(peer.heard);
  if (!decoded.ok()) return decoded.status();
  peer.heard = {};
  peer.introduction = std::move(decoded).value();
  if (peer.introduction->terms != fabric_->terms())
    return {Code::kUnsupported, "it has " + peer.introduction->library + " with " + peer.introduction->terms +
                                    ", and this end " + fabric_->library() + " with " + fabric_->terms() +
                                    ": both ends need the same"};
  return meet(peer);
}

Status FabricRail::meet(Peer& peer) {
  if (!peer.introduction || !peer.is_introduced || peer.endpoint == nullptr || peer.is_connected) return {};
  unwatch_endpoint(peer);
  auto job = std::make_unique<Job>(peer, Job::Kind::kConnect, fabric_);
  job->introduction = *peer.introduction;
  job->endpoint = std::move(peer.endpoint);
  return begin_set_up(peer, job);
}

Status FabricRail::on_message(Peer& peer, const Message& message, UniqueFd) {
  switch (message.kind) {
    case MessageKind::kMore: return hear(peer, message);
    case MessageKind::kReady:
      if (std::exchange(peer.is_ready, true)) return {Code::kRailFailed, "it said twice that it is ready"};
      if (message.flag > static_cast<std::uint32_t>(fabric::Way::kWrite))
        return {Code::kRailFailed, "it wants pages in a way that this version does not know"};
      peer.theirs = static_cast<fabric::Way>(message.flag);
      if (peer.theirs == fabric::Way::kSend && !fabric_->can_send())
        return {Code::kUnsupported,
                "it asks for pieces to be sent, which " + fabric_->library() + " does not"};
      return peer.is_connected ? prove(peer) : Status();
    case MessageKind::kDropped:
      if (peer.sends()) return dropped(peer, message), Status();
      [[fallthrough]];
    case MessageKind::kAwait:
    case MessageKind::kGiveUp:
    case MessageKind::kWritten: return on_piece(peer, message);
    case MessageKind::kGone: {
      peer.gone_regions.insert(message.region);
      if (peer.gone_regions.size() > kMostGone) peer.gone_regions.erase(peer.gone_regions.begin());
      const auto found = peer.regions.find(message.region);
      peer.leaving.emplace_back(message.region, found == peer.regions.end()
                                                    ? std::weak_ptr<const RemoteMemory>()
                                                    : std::weak_ptr<const RemoteMemory>(found->second));
      peer.regions.erase(message.region);
      tell_what_is_let_go(peer);
      return {};
    }
    case MessageKind::kLetGo: forget_holder(peer.id, message.region); return {};
    case MessageKind::kHello: break;
  }
  return {};
}

void FabricRail::tell_what_is_let_go(Peer& peer) noexcept {
  for (std::size_t i = 0; i < peer.leaving.size() && !peer.down;) {
    if (!peer.leaving[i].second.expired()) {
      ++i;
      continue;
    }
    const RegionId region = peer.leaving[i].first;
    peer.leaving.erase(peer.leaving.begin() + static_cast<std::ptrdiff_t>(i));
    tell(peer, Message::about(MessageKind::kLetGo, region));
  }
}

// Proves that the rail carries something: reads one of the peer's fence words, whose value does not matter,
// or exchanges messages without bytes.
Status FabricRail::prove(Peer& peer) {
  peer.way = fabric::agreed(peer.preferred, peer.theirs);
  if (peer.writes()) {
    peer.awaited.reserve(kMostAwaited, 1);
    peer.asked.reserve(kMostAwaited);
    peer.written.reserve(kMostFlights);
  }
  if (peer.sends()) {
    if (!peer.proof_has_come) {
      Flight& awaited = spare_flight(peer);
      awaited.is_proof = awaited.is_named = awaited.is_awaited = true;
    }
    Flight& sent = spare_flight(peer);
    sent.header.is_proof = 1;
    sent.is_proof = true;  // "named" once it is sent
    peer.current = &sent;
    activate(peer);
    wake(peer);
    return {};
  }
  const fabric::KeyedSpan& from = *peer.fences->spans.find(0);
  const fabric::KeyedSpan to = fences_->nowhere();
  Flight& flight = spare_flight(peer);
  flight.is_proof = flight.is_named = true;
  flight.next.add({from.address, from.key, to.address, to.key, sizeof(std::uint64_t)});
  peer.current = &flight;
  activate(peer);
  wake(peer);
  return {};
}

// Begins nothing new; a thread ends what is under way.
void FabricRail::end_requests(Peer& peer) noexcept {
  peer.channel.close();
  peer.regions.clear();
  peer.leaving.clear();
  peer.fences.reset();
  peer.current = nullptr;
  peer.fetched.clear();
  peer.due.reset();
  peer.look_at.reset();
  if (peer.is_being_set_up) return;  // goes on when the endpoint is back
  if (peer.endpoint == nullptr) return closed(peer);
  unwatch_endpoint(peer);
  std::unique_ptr<Job> job;
  try {
    job = std::make_unique<Job>(peer, Job::Kind::kClose, fabric_);
    job->endpoint = std::move(peer.endpoint);
    job->flights = std::move(peer.flights);
    if (begin_set_up(peer, job).ok()) return;
  } catch (const std::bad_alloc&) {}
  // There is no thread, or no memory for one, so the endpoint is ended here.
  if (job != nullptr) {
    peer.endpoint = std::move(job->endpoint);
    peer.flights = std::move(job->flights);
  }
  Job::end(peer.endpoint, peer.flights);
  closed(peer);
}

void FabricRail::closed(Peer& peer) noexcept {
  for (const auto& flight : peer.flights) {
    if (!flight->is_used) continue;
    flight->stop(Code::kRailFailed, kNoMemory);  // it got its result when the rail failed
    flight->num_under_way = 0;
    land(peer, *flight);
  }
  peer.flights.clear();
  while (!peer.awaited.empty()) {
    AwaitedPieces::Piece& piece = *peer.awaited.begin();
    end_awaited(peer, piece, piece.code == Code::kOk ? Code::kRailFailed : piece.code, piece.why);
  }
  peer.endpoint.reset();
  peer.charge.release();
  for (auto leaving = leaving_.begin(); leaving != leaving_.end();) {
    leaving->second.held_by.erase(peer.id);
    leaving = leaving->second.held_by.empty() ? leaving_.erase(leaving) : std::next(leaving);
  }
  if (peer.gone) erase(peer);
}

void FabricRail::forget(Peer& peer) noexcept {
  peer.gone = true;
  end_requests(peer);
}

void FabricRail::wake(Peer& peer) noexcept {
  if (peer.endpoint == nullptr || std::exchange(peer.is_awake, true)) return;
  add_in_room(awake_, &peer);
}

// ---- in time ----

void FabricRail::watch(Peer& peer, Clock::time_point due) noexcept {
  peer.due = due;
  ring_by(due);
}

void FabricRail::ring_by(Clock::time_point at) noexcept {
  if (rings_at_ && *rings_at_ <= at) return;
  rings_at_ = at;
  alarm_->set(at);
}

// A descriptor reports that something has come. An endpoint without one must be polled. So must one that
// waits for room for another request while nothing is under way.
bool FabricRail::arm(Peer& peer) noexcept {
  Endpoint& endpoint = *peer.endpoint;
  const bool has_descriptor = endpoint.fd() >= 0;
  const bool is_at_work = endpoint.num_under_way() != 0 || !peer.awaited.empty();
  if (has_descriptor) {
    if (!endpoint.arm()) return false;  // something came
    reactor_.modify(endpoint.fd(), kEdges);  // reports once more what is there already
    // What is awaited need not come: the peer may rest in the same way.
    if (!peer.lacks_room || endpoint.num_under_way() != 0) return true;
  }
  const Clock::time_point now = Clock::now();
  const Clock::duration quiet = now - peer.quiet_since;
  if (!has_descriptor && is_at_work && quiet < kNoPause) return false;
  // What the peer writes is not reported, so it never ends the quiet.
  const Clock::duration longest = !has_descriptor && !peer.awaited.empty() ? kNoPause
                                  : is_at_work || has_descriptor           ? kLongestPauseAtWork
                                                                           : kLongestPause;
  peer.look_at = now + std::clamp<Clock::duration>(quiet / 4, kShortestPause, longest);
  ring_by(*peer.look_at);
  return true;
}

void FabricRail::look_at_clock() noexcept {
  if (!alarm_->has_rung()) return;
  alarm_->acknowledge();
  rings_at_.reset();
  const Clock::time_point now = Clock::now();
  for_each_peer([&](Peer& peer) {
    if (peer.down) return;
    if (peer.look_at && *peer.look_at <= now) {
      peer.look_at.reset();
      peer.lacks_room = false;
      wake(peer);
      try {
        if (can_go_on(peer)) activate(peer);
      } catch (const std::bad_alloc&) {
        return fail(peer, kNoMemory);
      }
    }
    if (peer.look_at) ring_by(*peer.look_at);
    if (!peer.due) return;
    if (*peer.due > now) return ring_by(*peer.due);
    bool is_late = false;
    // If this thread itself stood still, it has not yet taken in all that came meanwhile.
    const bool stood_still = now - *peer.due > kStandstill;
    std::optional<Clock::time_point> first;
    for (const auto& flight : peer.flights) {
      if (!flight->is_used || !flight->is_cancelled) continue;
      if (stood_still) flight->due_at = now + kStopBound;
      is_late = is_late || flight->due_at <= now;
      first = std::min(first.value_or(flight->due_at), flight->due_at);
    }
    for (AwaitedPieces::Piece& piece : peer.awaited) {
      if (piece.code != Code::kCancelled) continue;
      if (stood_still) piece.due_at = now + kStopBound;
      is_late = is_late || piece.due_at <= now;
      first = std::min(first.value_or(piece.due_at), piece.due_at);
    }
    peer.due = first;
    if (is_late)
      fail_saying(peer, [] {
        return "cancelled reads or pieces did not end in time (" + std::to_string(kStopBound.count()) +
               " and " + std::to_string(kSendStopBound.count()) +
               " ms), so its endpoint is closed: the peer, or the network, does not answer";
      });
    else if (peer.due)
      ring_by(*peer.due);
  });
}

// ---- for the core ----

std::size_t FabricRail::poll(std::span<Completion> completions) noexcept {
  progress();
  look_at_clock();
  post_some();
  return ready_.take(completions);
}

bool FabricRail::busy() const noexcept {
  return !ready_.empty() ||
         std::any_of(active().begin(), active().end(), [this](const Peer* peer) { return has_turn(*peer); });
}

bool FabricRail::wants_poll() const noexcept { return alarm_->has_rung() || !awake_.empty() || busy(); }

bool FabricRail::arm() noexcept {
  for (std::size_t i = 0; i < awake_.size();) {
    Peer& peer = *awake_[i];
    if (!arm(peer)) return false;
    peer.is_awake = false;
    awake_.erase(awake_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return !wants_poll();
}

}  // namespace kvxfer
