// Works under way: reads, and pieces that are sent and awaited.
#include <algorithm>
#include <new>

#include "core/copy/run_cursor.h"
#include "core/in_room.h"

#include "transports/fabric/fabric_rail.h"

namespace kvxfer {

using fabric::Message;
using fabric::MessageKind;
using fabric::Request;

namespace {

// The most runs that one poll posts. If the processor copies them at once, they take 0.3 ms.
constexpr std::uint32_t kRunsPerPoll = 256;
constexpr std::uint64_t kNbytesPerPoll = 2 * 1024 * 1024;
constexpr int kRoundsPerPoll = 16;  // of the library's own progress, for one peer
// A run of this size has a request of its own. Measured over libfabric's tcp with up to four runs in a read:
// runs of 4 KiB went 1.7 times as fast as with a read each, of 16 KiB 1.4 times, of 32 KiB 0.95 times (two
// runs: 0.8).
constexpr std::uint64_t kLargeRun = 32 * 1024;

}  // namespace

struct FabricRail::Budget {
  std::uint32_t num_runs = kRunsPerPoll;
  std::uint64_t nbytes = kNbytesPerPoll;
  bool is_spent() const noexcept { return num_runs == 0 || nbytes == 0; }
};

// The runs of a flight on their way to the endpoint: merged where they touch, as many in one request as the
// library takes. The last request is held back until it is known what follows.
class FabricRail::Batch {
 public:
  Batch(const fabric::Fabric& fabric, Peer& peer, Flight& flight, Budget& budget)
      : most_(fabric.num_requests()),
        most_nbytes_(fabric.most_request_nbytes()),
        most_runs_(std::min(fabric.most_runs(), Request::kMostRuns)),
        peer_(peer),
        flight_(flight),
        budget_(budget) {}

  std::uint64_t add(std::uint64_t remote, std::uint64_t remote_key, std::uint64_t local,
                    std::uint64_t local_key, std::uint64_t nbytes) noexcept {
    Request& next = flight_.next;
    nbytes = std::min(nbytes, most_nbytes_);
    if (next.num_runs != 0) {
      fabric::Run& last = next.runs[next.num_runs - 1];
      const bool fits = nbytes <= most_nbytes_ - next.nbytes;
      if (fits && remote == last.remote + last.nbytes && local == last.local + last.nbytes &&
          remote_key == last.remote_key && local_key == last.local_key) {
        last.nbytes += nbytes;
        next.nbytes += nbytes;
        return nbytes;
      }
      if (fits && next.num_runs < most_runs_ && nbytes < kLargeRun && last.nbytes < kLargeRun) {
        next.add({remote, remote_key, local, local_key, nbytes});
        return nbytes;
      }
      if (budget_.nbytes == 0) return 0;
      const bool has_room = peer_.endpoint->num_under_way() + 1 < most_;
      if (!post(has_room && budget_.nbytes > next.nbytes)) return 0;
    }
    next.add({remote, remote_key, local, local_key, nbytes});
    return nbytes;
  }
  void finish() noexcept {
    if (flight_.next.nbytes != 0) post(false);
  }

 private:
  // `has_more`: this batch posts another one after it, and there is room for that.
  bool post(bool has_more) noexcept {
    Endpoint& endpoint = *peer_.endpoint;
    if (endpoint.num_under_way() >= most_) return false;
    switch (endpoint.post(flight_.next, flight_, has_more)) {
      case Endpoint::Posted::kUnderWay:
      case Endpoint::Posted::kDone: break;
      case Endpoint::Posted::kAgain: peer_.lacks_room = true; return false;
      case Endpoint::Posted::kFailed: return false;
    }
    budget_.nbytes -= std::min(budget_.nbytes, flight_.next.nbytes);
    flight_.next.clear();
    return true;
  }

  const std::uint32_t most_;
  const std::uint64_t most_nbytes_;
  const std::uint32_t most_runs_;
  Peer& peer_;
  Flight& flight_;
  Budget& budget_;
};

bool FabricRail::takes_works(const Peer& peer) const noexcept {
  return peer.up && peer.endpoint != nullptr && (peer.way != fabric::Way::kRead || has_room(peer));
}

bool FabricRail::can_run(const Peer& peer, const Work& work) const noexcept {
  if (!peer.up || peer.endpoint == nullptr) return false;
  if (work.kind == WorkKind::kReceive)
    return peer.writes() ? peer.awaited.has_room()
                         : peer.endpoint->num_flights < kMostFlights + WorkQueue::kMost;
  if (work.kind == WorkKind::kSend && peer.writes() && !peer.asked.has(work.move->transfer, work.piece))
    return false;
  if (work.kind == WorkKind::kFetch && !fences_->has_room()) return false;
  return has_room(peer);
}

bool FabricRail::has_room(const Peer& peer) const noexcept {
  return peer.current == nullptr && peer.endpoint->num_under_way() < fabric_->num_requests() &&
         peer.endpoint->num_flights < kMostFlights;
}

// Requests end one by one, and several in a row cost less to post: a piece goes on once a quarter has ended.
bool FabricRail::can_go_on(const Peer& peer) const noexcept {
  if (peer.lacks_room || peer.down || peer.endpoint == nullptr) return false;
  const std::uint32_t most = fabric_->num_requests();
  if (peer.current == nullptr) return !peer.fetched.empty() && peer.endpoint->num_under_way() < most;
  return peer.endpoint->num_under_way() < most - most / 4;
}

fabric::Flight& FabricRail::spare_flight(Peer& peer) {
  auto spare = std::find_if(peer.flights.begin(), peer.flights.end(),
                            [](const auto& flight) { return !flight->is_used; });
  if (spare == peer.flights.end()) spare = peer.flights.insert(spare, std::make_unique<Flight>());
  **spare = Flight();
  (*spare)->is_used = true;
  ++peer.endpoint->num_flights;
  return **spare;
}

void FabricRail::post_some() noexcept {
  Budget budget;
  while (!budget.is_spent()) {
    Peer* const peer = next_turn();
    if (peer == nullptr) return;
    end_turn();
    try {
      post_some(*peer, budget);
    } catch (const std::bad_alloc&) {
      fail(*peer, kNoMemory);
    }
  }
}

void FabricRail::post_some(Peer& peer, Budget& budget) {
  --budget.num_runs;  // a short work counts, too
  // An awaited piece need not wait for what is posted.
  if (peer.writes() && peer.up) {
    await_some(peer);
    if (peer.down) return;
  }
  if (peer.sends() && peer.up) {
    const std::size_t at = peer.queue.first([](const Work& work) { return work.kind == WorkKind::kReceive; });
    if (at != peer.queue.size() && can_run(peer, peer.queue[at])) {
      begin(peer, at);
      return wake(peer);
    }
  }
  if (peer.current == nullptr && !peer.fetched.empty()) {
    peer.current = peer.fetched.front();
    peer.fetched.erase(peer.fetched.begin());
  } else if (peer.current == nullptr) {
    if (peer.queue.empty()) return;
    const std::size_t at = first_that_runs(peer);
    if (at == peer.queue.size() || !begin(peer, at)) return;
  }
  Flight& flight = *peer.current;
  peer.lacks_room = false;
  Batch batch(*fabric_, peer, flight, budget);
  using Cursor = RequestCursorOf<std::uint64_t>;
  if (peer.sends() && (flight.work.kind == WorkKind::kSend || flight.is_proof)) {
    if (peer.endpoint->num_under_way() < fabric_->num_requests()) switch (peer.endpoint->post_send(flight)) {
        case Endpoint::Posted::kUnderWay:
        case Endpoint::Posted::kDone: flight.is_named = true; break;
        case Endpoint::Posted::kAgain: peer.lacks_room = true; break;
        case Endpoint::Posted::kFailed: break;
      }
    budget.nbytes -= std::min(budget.nbytes, flight.header.nbytes);
  } else if (!flight.is_named) {
    switch (flight.cursor.advance(batch, budget.num_runs)) {
      case Cursor::Stop::kDone: flight.is_named = true; break;
      case Cursor::Stop::kFull:
      case Cursor::Stop::kTired: break;
      case Cursor::Stop::kOutside:
        flight.stop(Code::kInternal, words((flight.cursor.outside() == Side::kSrc) != flight.is_write
                                               ? "the piece ends outside the region of " + peer.name
                                               : "the piece ends outside the region here"));
        break;
    }
  }
  batch.finish();
  if (flight.is_named && flight.next.nbytes == 0 && !flight.is_flushed && !peer.lacks_room)
    switch (peer.endpoint->post_flush(flight)) {
      case Endpoint::Posted::kUnderWay:
      case Endpoint::Posted::kDone: flight.is_flushed = true; break;
      case Endpoint::Posted::kAgain: peer.lacks_room = true; break;
      case Endpoint::Posted::kFailed: break;
    }
  wake(peer);
  if (!flight.has_more()) peer.current = nullptr;
  if (!peer.endpoint->failure().empty()) return fail(peer, peer.endpoint->failure());
  land(peer);
}

bool FabricRail::begin(Peer& peer, std::size_t at) {
  Flight& flight = spare_flight(peer);
  flight.work = peer.queue.take(at);
  const bool is_awaited = flight.work.kind == WorkKind::kReceive;
  if (!is_awaited) peer.current = &flight;
  if (peer.endpoint->fd() < 0) peer.quiet_since = Clock::now();
  Status ready;
  std::string why;
  try {
    ready = prepare_flight(peer, flight);
    if (!ready.ok()) why = words(ready.message());
  } catch (const std::bad_alloc&) {
    flight.stop(Code::kRailFailed, kNoMemory);  // the rail's end ends it
    throw;
  }
  if (ready.ok()) return true;
  if (!is_awaited) peer.current = nullptr;
  flight.is_used = false;
  --peer.endpoint->num_flights;
  const std::uint32_t number = flight.number;
  end_work(failed(flight.work.id, ready.code(), std::move(why)));
  tell_dropped(peer, flight.work, ready.code() == Code::kUnsupported);  // may end the rail, and its flights
  if (number != 0) tell_of_piece(peer, MessageKind::kDropped, {0, 0, number});
  return false;
}

Status FabricRail::prepare_flight(Peer& peer, Flight& flight) {
  const Work& work = flight.work;
  const Move& move = *work.move;
  flight.is_write = work.kind == WorkKind::kSend && peer.writes();
  if (flight.is_write) {
    const auto [ticket, is_given_up] = peer.asked.take(move.transfer, work.piece);
    if (is_given_up) return {Code::kCancelled, peer.name + " no longer awaits the piece"};
    flight.number = ticket.number;
  }
  const Result<const Registration*> local = registered(move);
  if (!local.ok()) return local.status();
  if (work.kind != WorkKind::kFetch && !flight.is_write) return prepare_piece(peer, flight);
  const auto remote = peer.regions.find(move.remote_region);
  if (remote == peer.regions.end())
    return {Code::kRegionGone, "the region of " + peer.name + " is not attached"};
  flight.remote = remote->second;
  flight.cursor = {move, work.piece, flight.remote->spans, local.value()->local(),
                   flight.is_write ? Side::kSrc : Side::kDst};
  flight.is_flushed = !flight.is_write;
  if (flight.is_write) return {};
  if (move.fence.slot >= FenceTable::kNumSlots)
    return {Code::kInternal, "there is no fence slot " + std::to_string(move.fence.slot)};
  peer.fetched.reserve(kMostFlights);
  flight.scratch = fences_->take();
  return {};
}

Result<const fabric::Registration*> FabricRail::registered(const Move& move) const {
  if (move.program->converts())
    return Status(Code::kUnsupported,
                  fabric_->library() + " copies bytes unchanged, and this program converts them");
  const auto local = registered_.find(move.local->id);
  if (local == registered_.end())
    return Status(Code::kUnsupported, "the region here is not registered with " + fabric_->library());
  return local->second.get();
}

Status FabricRail::prepare_piece(Peer& peer, Flight& flight) {
  if (!peer.sends()) return {Code::kUnsupported, "this rail cannot send: the destination fetches"};
  const Move& move = *flight.work.move;
  const bool is_sent = flight.work.kind == WorkKind::kSend;
  RunCursor cursor(move, flight.work.piece, is_sent ? Side::kSrc : Side::kDst);
  flight.header = {move.transfer, flight.work.piece, 0, cursor.append(flight.segments, SIZE_MAX, UINT64_MAX)};
  flight.is_named = flight.is_awaited = !is_sent;
  return {};
}

// A piece's data may come before its work was begun here: the work is posted first, but its turn comes later.
fabric::Flight* FabricRail::begin_receive(Peer& peer, const fabric::PieceHeader& header) noexcept {
  const auto find_awaited = [&]() -> Flight* {
    for (const auto& flight : peer.flights) {
      if (!flight->is_used || !flight->is_awaited || flight->is_proof != (header.is_proof != 0)) continue;
      if (flight->is_proof) return flight.get();
      if (flight->work.move->transfer == header.transfer && flight->work.piece == header.piece)
        return flight.get();
    }
    return nullptr;
  };
  Flight* found = find_awaited();
  if (found == nullptr && header.is_proof == 0) try {
      const std::size_t at = peer.queue.first([&](const Work& work) {
        return work.kind == WorkKind::kReceive && work.move->transfer == header.transfer &&
               work.piece == header.piece;
      });
      if (at != peer.queue.size() && begin(peer, at)) found = find_awaited();
    } catch (const std::bad_alloc&) {  // then the piece counts as not awaited
    }
  // The proof may come before the message that the peer is ready.
  if (found == nullptr && header.is_proof != 0) peer.proof_has_come = true;
  if (found == nullptr) return nullptr;
  found->is_awaited = false;
  if (found->header.nbytes == header.nbytes) return found;
  found->stop(Code::kRailFailed, "a piece of another length arrived");
  return nullptr;
}

void FabricRail::tell_dropped(Peer& peer, const Work& work, bool cannot) noexcept {
  if (work.kind != WorkKind::kSend || !peer.sends()) return;
  Message message = Message::about(MessageKind::kDropped);
  message.ticket = {work.move->transfer, work.piece, 0};
  message.flag = cannot ? 1 : 0;
  tell(peer, message);
}

void FabricRail::dropped(Peer& peer, const Message& message) {
  const Code code = message.flag != 0 ? Code::kUnsupported : Code::kLeaseEnded;
  const char* const why = message.flag != 0 ? "the source's end of the rail cannot send the piece"
                                            : "the source stopped before it sent the piece";
  const auto is_it = [&](const Work& work) {
    return work.kind == WorkKind::kReceive && work.move->transfer == message.ticket.transfer &&
           work.piece == message.ticket.piece;
  };
  if (const std::size_t at = peer.queue.first(is_it); at != peer.queue.size())
    return end_work(failed(peer.queue.take(at).id, code, words(why)));
  for (const auto& flight : peer.flights)
    if (flight->is_used && flight->is_awaited && !flight->is_proof && is_it(flight->work)) {
      flight->stop(code, words(why));
      return land(peer);
    }
}

// A piece that has not gone out: the destination is told, and the engine at either end may try again.
void FabricRail::cancel(std::span<const WorkId> works) noexcept {
  for (const WorkId id : works) {
    Peer* const peer = peer_of(id);
    if (peer == nullptr || peer->down) continue;
    if (peer->writes()) drop_piece(*peer, id);
    if (!peer->sends()) continue;
    const std::size_t at = peer->queue.first([id](const Work& work) { return work.id == id; });
    // A copy: if the peer cannot be told, the rail fails and its queue is emptied.
    if (at != peer->queue.size())
      tell_dropped(*peer, Work(peer->queue[at]), false);
    else if (peer->current != nullptr && peer->current->work.id == id && !peer->current->is_proof)
      tell_dropped(*peer, Work(peer->current->work), false);
  }
  RailPeers::cancel(works);
}

void FabricRail::progress() noexcept {
  for (std::size_t i = 0; i < awake_.size();) {
    Peer* const peer = awake_[i];
    progress(*peer);
    if (i < awake_.size() && awake_[i] == peer) ++i;
  }
}

// Returns whether something came.
bool FabricRail::progress(Peer& peer) noexcept {
  bool came = false;
  for (int round = 0; round < kRoundsPerPoll && peer.endpoint->progress(); ++round) came = true;
  if (came) {
    if (peer.endpoint->fd() < 0) peer.quiet_since = Clock::now();
    peer.lacks_room = false;
    land(peer);
    if (peer.down) return came;  // it does not read what it was told
  }
  if (!peer.endpoint->failure().empty()) {
    fail(peer, peer.endpoint->failure());
  } else if (came && can_go_on(peer)) {
    try {
      activate(peer);
    } catch (const std::bad_alloc&) {
      fail(peer, kNoMemory);
    }
  }
  return came;
}

void FabricRail::land(Peer& peer) noexcept {
  bool any_cancelled = false, any_landed = false;
  for (const auto& flight : peer.flights) {
    if (flight->has_landed()) {
      land(peer, *flight);
      any_landed = true;
    } else {
      any_cancelled = any_cancelled || (flight->is_used && flight->is_cancelled);
    }
  }
  for (const AwaitedPieces::Piece& piece : peer.awaited)
    any_cancelled = any_cancelled || piece.code == Code::kCancelled;
  if (!any_cancelled) peer.due.reset();
  tell_what_was_written(peer);
  if (any_landed && !peer.leaving.empty()) tell_what_is_let_go(peer);
}

// The word is read only after all bytes of the piece have landed.
void FabricRail::confirm(Peer& peer, Flight& flight) noexcept {
  const std::uint64_t at = flight.work.move->fence.slot * sizeof(std::uint64_t);
  const fabric::KeyedSpan& from = *peer.fences->spans.find(at);
  const fabric::KeyedSpan to = fences_->target(*flight.scratch);
  flight.next.add({from.address + (at - from.offset), from.key, to.address, to.key, sizeof(std::uint64_t)});
  flight.is_confirming = true;
  add_in_room(peer.fetched, &flight);
}

void FabricRail::land(Peer& peer, Flight& flight) noexcept {
  const bool is_fetched = flight.scratch && flight.code == Code::kOk;
  if (is_fetched && !flight.is_confirming) return confirm(peer, flight);
  flight.is_used = false;
  flight.remote.reset();
  if (peer.endpoint != nullptr) --peer.endpoint->num_flights;
  if (flight.is_proof) {
    const bool is_last = std::none_of(peer.flights.begin(), peer.flights.end(),
                                      [](const auto& each) { return each->is_used && each->is_proof; });
    if (flight.code != Code::kOk || peer.down || !is_last) return;
    try {
      peer.path = peer.endpoint->path() + " (" + fabric_->library() + "; " + peer.introduction->library +
                  ")" +
                  (peer.sends()    ? ", sent"
                   : peer.writes() ? ", written"
                                   : ", read");
    } catch (const std::bad_alloc&) {  // its name is enough
    }
    return come_up(peer);
  }
  const Code code = flight.code;
  if (flight.is_confirming) std::erase(peer.fetched, &flight);  // where it was stopped
  const bool is_stale = is_fetched && fences_->value(*flight.scratch) != flight.work.move->fence.generation;
  if (flight.scratch) fences_->give_back(*flight.scratch);
  if (is_stale) return end_stale(peer, flight.work.id);
  if (flight.is_write && !peer.down)
    add_in_room(peer.written, Peer::Written{flight.number, code == Code::kOk});
  end_work(flight.work.id, code, code == Code::kOk ? std::string_view() : flight.why);
}

std::chrono::milliseconds FabricRail::stop_bound(const Flight& flight) noexcept {
  const WorkKind kind = flight.work.kind;
  return kind == WorkKind::kFetch ? kStopBound : kSendStopBound;
}

void FabricRail::stop_shared(WorkId work) noexcept {
  Peer* const peer = peer_of(work);
  if (peer == nullptr || peer->endpoint == nullptr || stop_awaited(*peer, work)) return;
  for (const auto& flight : peer->flights) {
    if (!flight->is_used || flight->is_proof || flight->work.id != work) continue;
    flight->stop(Code::kCancelled, {});
    flight->is_cancelled = true;
    flight->due_at = Clock::now() + stop_bound(*flight);
    if (peer->current == flight.get() && !flight->has_more()) peer->current = nullptr;
    if (!peer->due || flight->due_at < *peer->due) watch(*peer, flight->due_at);
    return land(*peer);
  }
}

void FabricRail::stop_shared(PeerId id, Code code, std::string_view why) noexcept {
  Peer* const peer = find(id);
  if (peer == nullptr) return;
  for (const auto& flight : peer->flights)
    if (flight->is_used) flight->stop(code, why);
  for (AwaitedPieces::Piece& piece : peer->awaited) try {
      if (piece.code == Code::kOk) piece.code = code;
      piece.why = why;
    } catch (const std::bad_alloc&) {  // the code is enough
    }
  peer->current = nullptr;
  if (peer->endpoint != nullptr) land(*peer);
}

}  // namespace kvxfer
