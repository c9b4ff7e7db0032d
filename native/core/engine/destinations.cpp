#include "core/engine/destinations.h"

#include <algorithm>

#include "core/engine/eager.h"

namespace kvxfer {
namespace {

// May a write that is not permitted now be permitted later? A lease or an expectation may still come. A
// write that does not fit its expectation is never permitted.
bool may_come_true(const Status& refusal) {
  return refusal.code() == Code::kNotPermitted || refusal.code() == Code::kLeaseEnded;
}

// The caller that expects the write names the request in other words than its writer, or is the only one to
// name it.
void call_it(Destination& destination, const wire::Bytes& context) {
  if (context.empty()) return;
  destination.context = context;
  destination.tells_context = true;
}

std::vector<std::uint32_t> failed_blocks(const Destination& destination) {
  const Move& move = *destination.move;
  const PieceGrid& grid = move.grid;
  const Arrivals& arrivals = destination.arrivals;
  const bool all = !arrivals.has_begun() || destination.reason.code() == Code::kIntegrity;
  std::vector<bool> bad(grid.num_pairs, all);
  const std::uint32_t num_columns = all ? 0 : grid.pieces_per_layer();
  for (std::uint32_t column = 0; column < num_columns; ++column) {
    bool whole = true;
    for (std::uint32_t index = column; whole && index < grid.num_pieces(); index += num_columns)
      whole = arrivals.has(index);
    const Piece piece = grid.piece(column);
    if (!whole) std::fill_n(bad.begin() + piece.first_pair, piece.num_pairs, true);
  }
  return blocks_of(move, Side::kDst, bad);
}

}  // namespace

void Destinations::request(Peer& peer, TransferKey key) {
  Destination& destination = *find(key);
  destination.program = programs_.number(peer, destination);
  step(destination_transitions(), destination.state, TransferEvent::kAnnounced);
  destination.asked_at = context_.now;
  wire::Message message = wire::Request();
  const TransferEnd::LentTables lent(destination, std::get<wire::Request>(message).spec);
  sessions_.send(peer, message);
  admission_.opened(destination);
}

void Destinations::layers_ready(TransferKey key, std::uint32_t layers) {
  Destination* destination = find(key);
  if (destination == nullptr || layers <= destination->layers_ready) return;
  destination->layers_ready = std::min(layers, destination->move->grid.num_layers);
  if (destination->state == TransferState::kMoving) list(*destination);
}

// ---- what peers say -----------------------------------------------------------------------------

Status Destinations::on(Peer& peer, wire::Offer& offer) {
  wire::TransferSpec& spec = offer.spec;
  const TransferId id = spec.transfer;
  auto owned = std::make_unique<Destination>();
  owned->key = {peer.key(), id};
  const auto refuse = [&](const Status& why, const wire::Bytes& context) {
    call_it(*owned, context);
    records_.refused(*owned, spec, why);
    sessions_.refuse(peer, id, why, context);
    return Status();
  };
  if (offer.layers_ready > spec.grid.num_layers)
    return {Code::kProtocol, "OFFER: transfer " + std::to_string(id) + " has more layers ready than layers"};
  if (offer.pages.size() > context_.config.session.features.eager_nbytes)
    return {Code::kProtocol, "OFFER: transfer " + std::to_string(id) + " brings " +
                                 std::to_string(offer.pages.size()) + " bytes of pages, but at most " +
                                 std::to_string(context_.config.session.features.eager_nbytes) +
                                 " are accepted"};
  const Result<Programs::Use> use = programs_.find(peer, spec, Side::kDst);
  if (!use.ok()) return refuse(use.status(), {});
  owned->state = TransferState::kParked;
  owned->take(spec, use.value().program->copies, *use.value().local, use.value().program->src);
  // Before anything is spent on the write: is there a right, or may one come?
  const bool is_tagged = !owned->notify.empty() && !owned->lease_named;
  const std::optional<Expectations::GivenUp> given_up =
      is_tagged ? expectations_.given_up(*owned) : std::nullopt;
  const bool may_wait = is_tagged && !given_up;
  if (!may_wait && expectations_.find(*owned) == nullptr)
    if (Status status = leases_.find_any(*owned, wire::LeaseMode::kWrite); !status.ok())
      return given_up ? refuse(given_up->why, given_up->context) : refuse(status, {});
  if (Status status = admission_.admit(peer, *owned); !status.ok()) return refuse(status, {});
  if (Status status = programs_.check(use.value(), *owned->move, Side::kDst); !status.ok())
    return refuse(status, {});
  if (!offer.pages.empty() && eager_nbytes_of(*owned->move) != offer.pages.size())
    return {Code::kProtocol, "OFFER: transfer " + std::to_string(id) + " brings " +
                                 std::to_string(offer.pages.size()) +
                                 " bytes of pages, which differs from its program"};
  owned->layers_ready = offer.layers_ready;
  owned->move->fence = {offer.fence_slot, offer.fence_generation};
  Destination& destination = add(std::move(owned));
  admission_.opened(destination);
  if (is_tagged && tag_memory_.size() != 0)  // its tag begins anew
    tag_memory_.take_written(wire::text_of(destination.notify), [](const TagMemory::Ended&) { return true; });
  if (Status status = authorize(destination); status.ok())
    begin_moving(destination, offer.pages);
  else if (!may_wait || !may_come_true(status)) {
    if (given_up && status.code() == Code::kNotPermitted) {
      status = given_up->why;
      call_it(destination, given_up->context);
    }
    fail(destination, TransferEvent::kFail, std::move(status), true);
  } else  // until a caller expects its tag, a lease comes, or its time is over; its pages are asked for then
    parked_.add(destination, destination.parked);
  return {};
}

Status Destinations::on(Peer& peer, const wire::Accept& accept) {
  Destination* destination = find({peer.key(), accept.transfer});
  if (destination == nullptr || destination->state != TransferState::kRequested) return {};
  destination->move->fence = {accept.fence_slot, accept.fence_generation};
  destination->lease_ttl_ns = static_cast<Time>(accept.ttl_ns);
  destination->lease_renewable = accept.renewable;
  step(destination_transitions(), destination->state, TransferEvent::kAccepted);
  begin_moving(*destination);
  return {};
}

void Destinations::on(Peer& peer, const wire::LayersReady& ready) {
  Destination* destination = find({peer.key(), ready.transfer});
  // For a read our caller, and no peer, says how far it may go.
  if (destination == nullptr || destination->ours || ready.layers_ready > destination->move->grid.num_layers)
    return;
  destination->layers_ready = std::max(destination->layers_ready, ready.layers_ready);
  if (destination->state == TransferState::kMoving) list(*destination);
}

// ---- rights -------------------------------------------------------------------------------------

// A write may go ahead under an expectation of its tag, or under leases.
Status Destinations::authorize(Destination& destination) {
  Status unlike;
  if (const std::shared_ptr<Expectation> expectation = expectations_.find(destination)) {
    if (expectation->handle()->has_own_context()) call_it(destination, expectation->handle()->context());
    unlike = expectation->covers(*destination.move);
    if (unlike.ok()) {
      if (Status status = expectation->follow(*destination.move, destination); !status.ok()) return status;
      destination.expectation = expectation;
      destination.leases.clear();
      if (!destination.context.empty()) expectation->handle()->set_other_context(destination.context);
      return {};
    }
  }
  Status found = leases_.find(destination, wire::LeaseMode::kWrite);
  return found.ok() || unlike.ok() ? found : unlike;
}

std::vector<TransferKey> Destinations::parked_for(const LeaseTerms& lease) const {
  return parked_.of_blocks(*lease.holder, lease.region, lease.all_blocks, lease.blocks);
}

void Destinations::let_in(std::span<const TransferKey> parked) {
  for (const TransferKey& key : parked)
    context_.serve(key.first, [&] {
      Destination* destination = find(key);
      if (destination == nullptr || destination->state != TransferState::kParked) return;
      if (Status status = authorize(*destination); status.ok())
        begin_moving(*destination);
      else if (may_come_true(status))
        parked_.add(*destination, destination->parked);
      else
        fail(*destination, TransferEvent::kFail, std::move(status), true);
    });
}

void Destinations::let_in(const Expectation& expectation, std::span<const TransferKey> parked) {
  let_in(parked);
  if (tag_memory_.size() == 0 || expectation.complete() || !expectation.writers().empty()) return;
  const auto written = tag_memory_.take_written(
      wire::text_of(expectation.tag()),
      [&](const TagMemory::Ended& ended) { return expectation.concerns(*ended.peer, ended.region); });
  if (!written) return;
  expectation.handle()->set_other_context(written->context);
  end_expectation(expectation.handle()->id(), TransferState::kFailed, written->why);
}

void Destinations::begin_moving(Destination& destination, wire::ByteSpan pages) {
  if (destination.state == TransferState::kParked)
    step(destination_transitions(), destination.state, TransferEvent::kAuthorized);
  destination.begun_at = context_.now;
  parked_.remove(destination.parked);
  leases_.let_in(destination);
  const PieceGrid& grid = destination.move->grid;
  if (destination.integrity) destination.sums = std::make_unique<Destination::PieceSums>();
  destination.arrivals.begin(grid);
  if (!pages.empty() && destination.memory == MemoryKind::kHost && !destination.integrity)
    return land(destination, pages);
  if (grid.num_pieces() != 0) return list(destination);
  for (std::uint32_t row = 0; row < grid.num_layers; ++row)
    layer_in(destination, row);  // there are no blocks
  all_in(destination);
}

// ---- ends ---------------------------------------------------------------------------------------

void Destinations::on_timer(TransferKey key) {
  Destination* destination = find(key);
  if (destination == nullptr) return;
  destination->timer.reset();
  if (is_draining(destination->state)) return draining_.tell(*destination);
  if (destination->is_stale)
    return fail(*destination, TransferEvent::kFail,
                {Code::kLeaseEnded, "the lease on the source's pages ended while they were read"}, true);
  Status why{Code::kDeadline, std::string("the transfer's time was over while it was ") +
                                  std::string(name_of(destination->state))};
  if (destination->state == TransferState::kMoving)
    why = {Code::kDeadline, why.message() + limits_.in_words(key.first)};
  if (destination->layers_ready < destination->move->grid.num_layers)
    why = {Code::kDeadline, destination->unreleased(destination->ours ? "here" : "at the source")};
  if (destination->state == TransferState::kParked) {
    remember(*destination, why);
    why = {Code::kNotPermitted,
           "no lease of the sender covers the blocks, and no expectation with its tag was made in time"};
  }
  fail(*destination, TransferEvent::kFail, std::move(why), true);
}

void Destinations::fail(TransferKey key, TransferEvent event, Status why, bool tell_peer) {
  Destination* destination = find(key);
  if (destination == nullptr) return;
  remember(*destination, why);
  fail(*destination, event, std::move(why), tell_peer);
}

// Remembers a write that waited to be expected, for a caller that expects it later.
void Destinations::remember(const Destination& destination, const Status& why) {
  if (destination.state != TransferState::kParked || destination.notify.empty() || destination.lease_named)
    return;
  const SessionKey session = destination.key.first;
  const auto view = sessions_.view(session);  // of a lost session, too
  const Peer* const peer = sessions_.find(session);
  const Status loss = as_loss(why);
  tag_memory_.remember(session, peer == nullptr ? nullptr : peer->budget(), wire::text_of(destination.notify),
                       {destination.region,
                        session,
                        {loss.code(), "the write with its tag by " + quoted(view ? view->name : "?") +
                                          " had ended before the tag was expected: " + loss.message()},
                        destination.context});
}

void Destinations::finish(Destination& destination) {
  if (!step(destination_transitions(), destination.state, TransferEvent::kAllIn)) return;
  if (Peer* peer = sessions_.find(destination.key.first))
    sessions_.send(*peer, wire::Done{destination.key.second,
                                     destination.tells_context ? destination.context : wire::Bytes()});
  drained(destination);
}

void Destinations::fail(Destination& destination, TransferEvent event, Status why, bool tell_peer) {
  const bool told = destination.state != TransferState::kQueued;
  if (why.code() == Code::kCancelled) event = TransferEvent::kCancel;  // also if the peer's caller asked
  if (!step(destination_transitions(), destination.state, event)) return end_again(destination);
  parked_.remove(destination.parked);
  context_.timers.clear(destination.timer);
  destination.reason = as_loss(std::move(why));
  destination.to_credit.clear();
  give_back(destination);
  if (destination.handle) destination.handle->release_streams(outcome_of(destination.state));
  if (destination.expectation && expectations_.contains(destination.expectation->handle()->id()))
    destination.expectation->handle()->release_streams(outcome_of(destination.state));
  admission_.closed(destination);
  if (!destination.posted.empty()) draining_.begin(destination);  // the fence
  if (tell_peer && told && !destination.owes_word) tell_failure(destination);
  if (destination.posted.empty()) drained(destination);
}

void Destinations::tell_failure(const Destination& destination) {
  if (Peer* peer = sessions_.find_open(destination.key.first))
    sessions_.refuse(*peer, destination.key.second, destination.reason,
                     destination.tells_context ? destination.context : wire::Bytes());
}

void Destinations::drained(Destination& destination) {
  context_.make_room();
  const bool done = destination.state == TransferState::kDone;
  if (!done) step(destination_transitions(), destination.state, TransferEvent::kDrained);
  if (!done && std::exchange(destination.owes_word, false)) tell_failure(destination);
  report(destination, destination.arrivals.num_in(), destination.expectation == nullptr,
         done ? std::vector<std::uint32_t>{} : failed_blocks(destination));
  const std::shared_ptr<Expectation> expectation = std::move(destination.expectation);
  if (expectation != nullptr) expectation->drained(destination);
  retire(destination);
  if (expectation == nullptr || expectations_.drained(*expectation)) return;
  const std::uint64_t id = expectation->handle()->id();
  if (!done) {
    // So that the failure names its request.
    expectation->handle()->set_other_context(destination.context);
    end_expectation(id, TransferState::kFailed, destination.reason);
  } else if (expectation->complete()) {
    end_expectation(id, TransferState::kDone, {});
  }
}

void Destinations::end_expectation(std::uint64_t handle, TransferState state, Status why) {
  const std::shared_ptr<Expectation> expectation = expectations_.find(handle);
  if (expectation == nullptr) return;
  if (why.code() == Code::kCancelled) state = TransferState::kCancelled;  // also if the writer's caller asked
  std::vector<TransferKey> writers;
  for (const Writer* each = expectation->writers().first(); each != nullptr;
       each = LinkedList<Writer>::after(*each))
    writers.push_back(static_cast<const Destination*>(each)->key);
  expectations_.end(expectation, state, why, writers.size());
  const Status reason = state == TransferState::kDone
                            ? Status(Code::kRefused, "all of its blocks had arrived in other transfers")
                            : why;
  for (const TransferKey& writer : writers)
    context_.serve(writer.first, [&] { fail(writer, TransferEvent::kFail, reason, true); });
}

std::string Destinations::pace_in_words(const Expectation& expectation) const {
  if (!limits_.has_paced()) return "";
  for (const Writer* each = expectation.writers().first(); each != nullptr;
       each = LinkedList<Writer>::after(*each))
    if (std::string words = limits_.in_words(static_cast<const Destination*>(each)->key.first);
        !words.empty())
      return words;
  return "";
}

// See Sources::release_streams.
void Destinations::release_streams() {
  for (const auto& [key, destination] : ends_) {
    if (destination->handle) destination->handle->release_streams(Outcome::kFailed);
    if (destination->expectation) destination->expectation->handle()->release_streams(Outcome::kFailed);
  }
}

}  // namespace kvxfer
