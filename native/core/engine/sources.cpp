#include "core/engine/sources.h"

#include <algorithm>

#include "core/engine/arrivals.h"
#include "core/engine/eager.h"

namespace kvxfer {
namespace {

// A list's entry, with what allocating it takes.
constexpr std::uint64_t kRunNbytes = 64;

}  // namespace

bool Sources::offer(Peer& peer, TransferKey key) {
  Source& source = *ends_.find(key);
  if (!fences_.has_room(key.first)) return false;
  source.program = programs_.number(peer, source);
  source.fence = fences_.take(key.first);
  step(source_transitions(), source.state, TransferEvent::kAnnounced);
  source.begun_at = context_.now;
  wire::Offer offer{{}, source.layers_ready, source.fence->index, source.fence->generation};
  if (source.layers_ready < source.move->grid.num_layers ||
      !admission_.has_eager_room(key.first, source.eager_nbytes))
    source.eager_nbytes = 0;
  if (source.eager_nbytes != 0) offer.pages = pack_pages(*source.move, source.eager_nbytes);
  wire::Message message(std::move(offer));
  const TransferEnd::LentTables lent(source, std::get<wire::Offer>(message).spec);
  sessions_.send(peer, message);
  admission_.opened(source);
  return true;
}

void Sources::layers_ready(TransferKey key, std::uint32_t layers) {
  Source* source = ends_.find(key);
  if (source == nullptr || layers <= source->layers_ready) return;
  source->layers_ready = std::min(layers, source->move->grid.num_layers);
  Peer* peer = sessions_.find(key.first);
  if (peer == nullptr || source->state != TransferState::kServing) return;
  sessions_.send(*peer, wire::LayersReady{key.second, source->layers_ready});
  sessions_.flush(*peer);
}

// ---- what peers say -----------------------------------------------------------------------------

Status Sources::on(Peer& peer, wire::Request& request) {
  wire::TransferSpec& spec = request.spec;
  const TransferId id = spec.transfer;
  auto owned = std::make_unique<Source>();
  Source& source = *owned;
  source.key = {peer.key(), id};
  const auto refuse = [&](const Status& why) {
    records_.refused(source, spec, why);
    sessions_.refuse(peer, id, why);
    return Status();
  };
  const Result<Programs::Use> use = programs_.find(peer, spec, Side::kSrc);
  if (!use.ok()) return refuse(use.status());
  source.state = TransferState::kServing;
  source.take(spec, use.value().program->copies, *use.value().local, use.value().program->dst);
  source.layers_ready = source.move->grid.num_layers;
  // Before anything is spent on it: is there a right?
  if (Status status = leases_.find_any(source, wire::LeaseMode::kRead); !status.ok()) return refuse(status);
  if (Status status = admission_.admit(peer, source); !status.ok()) return refuse(status);
  if (Status status = programs_.check(use.value(), *source.move, Side::kSrc); !status.ok())
    return refuse(status);
  if (Status status = leases_.find(source, wire::LeaseMode::kRead); !status.ok()) return refuse(status);
  const FenceSlots::Slot none;
  if (source.move->grid.num_pairs != 0) {  // otherwise there is nothing that it could read too late
    Charge charge = Charge::take(peer.budget(), Resource::kFenceSlots, 1);
    if (!charge)
      return refuse({Code::kRefused, "too many of your reads are open at the peer: " +
                                         peer.budget()->in_words(Resource::kFenceSlots) +
                                         "; wait for some to end"});
    if (!fences_.has_room(peer.key()))
      return refuse(
          {Code::kRefused,
           "transfers with you use too many of the " + std::to_string(FenceTable::kNumSlots) +
               " fence slots of the peer, at least twice as many as are free: wait for some to end"});
    source.fence = fences_.take(peer.key(), std::move(charge));
  }
  const FenceSlots::Slot& fence = source.fence ? *source.fence : none;
  add(std::move(owned));
  source.begun_at = context_.now;
  admission_.opened(source);
  leases_.let_in(source);
  const Leases::Window window = leases_.window(source);
  sessions_.send(peer, wire::Accept{id, fence.index, fence.generation,
                                    static_cast<std::uint64_t>(window.ttl_ns), window.renewable});
  return {};
}

Status Sources::on(Peer& peer, const wire::Credit& credit) {
  Source* source = ends_.find({peer.key(), credit.transfer});
  if (source == nullptr || source->state != TransferState::kServing) return {};  // it ended meanwhile
  const PieceGrid& grid = source->move->grid;
  if (credit.num_pieces > grid.num_pieces() || credit.first_piece > grid.num_pieces() - credit.num_pieces ||
      grid.piece(credit.first_piece + credit.num_pieces - 1).layer - grid.first_layer >= source->layers_ready)
    return {Code::kProtocol, "CREDIT for pieces that do not exist or are not ready"};
  const Rail* rail = rails_.at(peer.key(), credit.rail.index);
  if (rail != nullptr && rail->info().name != credit.rail) rail = nullptr;
  const bool sums_alone = credit.rail.index == wire::kNoRail;
  if (sums_alone ? source->memory != MemoryKind::kHost
                 : rail != nullptr && !rail->capabilities().memory.has(source->memory))
    return {Code::kProtocol, "CREDIT for pages in GPU memory, which are not sent this way"};
  // A receiver asks for every piece once, and again for pieces that it may move again.
  source->num_credited += credit.num_pieces;
  if (source->num_credited > grid.num_pieces() + Arrivals::max_redone(grid))
    return {Code::kProtocol, "CREDIT for the same pieces too often"};
  const Run run{credit.first_piece, credit.num_pieces};
  if (rail != nullptr && !rail->capabilities().two_sided)
    return {Code::kProtocol, "CREDIT for rail " + std::to_string(credit.rail.index) +
                                 ", over which pieces are fetched, not sent"};
  if (source->integrity) sums_.add(*source, run);
  if (sums_alone) return charge_runs(peer, *source);
  if (rail == nullptr) {
    // A credit for a rail that went down is ignored: the destination notices that too, and asks
    // elsewhere. A rail that is coming up may be seen by the session's acceptor later than by its peer.
    if (rails_.is_over(peer.key(), credit.rail)) return {};
    if (peer.role() == SessionRole::kInitiator && peer.rails_pending() == 0 &&
        !rails_.is_expected(peer.key(), credit.rail))
      return {Code::kProtocol,
              "CREDIT for rail " + std::to_string(credit.rail.index) + ", which does not exist"};
    source->num_early += credit.num_pieces;
    if (source->num_early > grid.num_pieces())
      return {Code::kProtocol, "CREDIT for more pieces than there are, over rails that are not up"};
  }
  append(source->to_send[credit.rail], run);
  if (rail != nullptr) send_pieces(*source);
  return charge_runs(peer, *source);
}

Status Sources::charge_runs(const Peer& peer, Source& source) const {
  std::size_t num_runs = sums_.num_runs(source.key);
  for (const auto& [rail, runs] : source.to_send) num_runs += 1 + runs.size();
  if (num_runs <= source.most_runs) return {};
  source.most_runs = 2 * num_runs;
  source.runs.release();
  source.runs = Charge::take(peer.budget(), Resource::kBytes, source.most_runs * kRunNbytes);
  if (source.runs) return {};
  return {Code::kExhausted,
          "CREDIT for too many separate runs of pieces: " + peer.budget()->in_words(Resource::kBytes)};
}

void Sources::on(Peer& peer, const wire::Done& done) {
  Source* source = ends_.find({peer.key(), done.transfer});
  if (source == nullptr) return;
  source->owes_word = false;
  if (!step(source_transitions(), source->state, TransferEvent::kPeerDone)) return end_again(*source);
  hear(*source, done.context);
  if (source->eager_nbytes != 0 && source->num_credited == 0 &&  // not dropped by the peer and asked for
      source->rails.add(kEagerRail) && source->handle)
    source->handle->add_rail(kEagerRail);
  // A send that the peer did not need, because another rail brought the piece or the peer asked in vain,
  // still reads pages. They are the caller's again when the last send has completed.
  admission_.closed(*source);
  if (source->posted.empty()) return drained(*source);
  give_back(*source);
  draining_.begin(*source);
}

// ---- what happens to them -----------------------------------------------------------------------

void Sources::sent(const Rails::Completed& work, const Completion& completion) {
  Source* source = ends_.find(work.transfer);
  if (source == nullptr) return;
  source->forget_work(completion.work);
  if (completion.code == Code::kOk) {
    ++context_.stats.pieces_sent;
    if (source->num_sent++ == 0) source->first_piece_at = context_.now;
    if (work.rail != nullptr && source->rails.add(work.rail->capabilities().name) && source->handle)
      source->handle->add_rail(work.rail->capabilities().name);
  }
  // If a piece did not go out because its rail ended, the destination notices that, and asks again. If
  // this end cannot send a piece, the destination hears nothing, and would wait for ever.
  if (completion.code != Code::kOk && completion.code != Code::kRailFailed &&
      completion.code != Code::kCancelled && !is_draining(source->state)) {
    return fail(*source, TransferEvent::kFail, {completion.code, completion.detail}, true);
  }
  if (is_draining(source->state) && !is_under_way(*source)) drained(*source);
}

// Pieces that were asked for over a rail that is not up wait in its queue; it is not looked at before the
// rail is up.
void Sources::send_pieces(Source& source) {
  bool waits = false;
  for (Rail* rail : rails_.of(source.key.first)) {
    auto queue = source.to_send.find(rail->info().name);
    if (queue == source.to_send.end() || !rail->capabilities().two_sided ||
        !rail->capabilities().memory.has(source.memory))
      continue;
    while (!queue->second.empty() && !rail->lane(source.priority).said_again()) {
      Run& run = queue->second.front();
      Work work;
      work.kind = WorkKind::kSend;
      work.piece = run.first_piece;
      work.move = source.move;
      if (rails_.post(*rail, work, source) == Code::kAgain) {
        rails_.note_again(*rail, source.priority);
        context_.pump_again = true;
        break;
      }
      ++run.first_piece;
      if (--run.num_pieces == 0) queue->second.pop_front();
    }
    if (queue->second.empty())
      source.to_send.erase(queue);
    else
      waits = true;
  }
  if (waits)
    sending_.insert(source.key);
  else
    sending_.erase(source.key);
}

void Sources::send_waiting() {
  if (sending_.empty()) return;
  for (const TransferKey& key : std::vector(sending_.begin(), sending_.end()))
    context_.serve(key.first, [&] {
      if (Source* source = ends_.find(key); source != nullptr && sessions_.find_open(key.first) != nullptr)
        send_pieces(*source);
    });
}

void Sources::rail_up(const Rail& rail) {
  const wire::RailName& name = rail.info().name;
  for (const TransferKey& key : ends_.of_session(rail.session())) {
    Source& source = *ends_.find(key);
    // Pieces are early no more: they were asked for over this rail, or over an attempt at it that never came
    // up here.
    auto queue = source.to_send.lower_bound({name.index, 0});
    while (queue != source.to_send.end() && queue->first <= name) {
      for (const Run& run : queue->second) source.num_early -= run.num_pieces;
      if (queue->first == name) {
        sending_.insert(key);
        break;
      }
      queue = source.to_send.erase(queue);
    }
  }
}

void Sources::rail_down(const Rail& rail) {
  for (const TransferKey& key : ends_.of_session(rail.session()))
    ends_.find(key)->to_send.erase(rail.info().name);
}

// The pages are ours and do not change, so their sums can be told before the bytes arrive.
void Sources::sum_slice() {
  if (sums_.empty()) return;
  sums_.round([this](SessionKey session, auto&& turn) { context_.serve(session, turn); },
              [this](Sums::Finished& finished) {
                sessions_.send(*sessions_.find(finished.transfer.first),
                               wire::Checksums{finished.transfer.second, finished.first_piece,
                                               std::move(finished.sums)});
              });
  if (!sums_.empty()) context_.pump_again = true;
}

void Sources::on_timer(TransferKey key) {
  Source* source = ends_.find(key);
  if (source == nullptr) return;
  source->timer.reset();
  if (is_draining(source->state)) return draining_.tell(*source);
  std::string why = source->layers_ready < source->move->grid.num_layers
                        ? source->unreleased("here")
                        : "the peer had not fetched every page when the transfer's time was over: no lease "
                          "there covers the blocks, no expectation there has this tag, or the peer is slow";
  fail(*source, TransferEvent::kFail, {Code::kDeadline, std::move(why)}, true);
}

// ---- ends ---------------------------------------------------------------------------------------

void Sources::give_back(Source& source) {
  if (source.fence) {
    fences_.give_back(*source.fence);
    source.fence.reset();
  }
  source.to_send.clear();
  sending_.erase(source.key);
  sums_.forget(source.key);
}

void Sources::on(Peer& peer, const wire::Fail& told, Status why) {
  Source* source = ends_.find({peer.key(), told.transfer});
  if (source == nullptr) return;
  source->owes_word = false;
  hear(*source, told.context);
  fail(*source, TransferEvent::kFail, std::move(why), false);
}

// Notes how the destination names the request.
void Sources::hear(Source& source, const wire::Bytes& context) {
  if (context.empty() || !source.context.empty()) return;
  source.context = context;
  if (source.handle) source.handle->set_other_context(context);
}

void Sources::fail(TransferKey key, TransferEvent event, Status why, bool tell_peer) {
  if (Source* source = ends_.find(key)) fail(*source, event, std::move(why), tell_peer);
}

void Sources::fail(Source& source, TransferEvent event, Status why, bool tell_peer) {
  const bool told = source.state == TransferState::kServing;
  if (why.code() == Code::kCancelled) event = TransferEvent::kCancel;  // also if the peer's caller asked
  if (!step(source_transitions(), source.state, event)) return end_again(source);
  if (!told) source.owes_word = false;  // the destination has never heard of it
  context_.timers.clear(source.timer);
  source.reason = as_loss(std::move(why));
  if (source.handle) source.handle->release_streams(outcome_of(source.state));
  give_back(source);  // a peer that still reads finds out before it says done
  admission_.closed(source);
  if (is_under_way(source)) draining_.begin(source);
  // A destination that owes its last word has to hear of each end.
  if (Peer* peer = sessions_.find_open(source.key.first);
      peer != nullptr && told && (tell_peer || source.owes_word))
    sessions_.refuse(*peer, source.key.second, source.reason);
  if (!is_under_way(source)) drained(source);
}

// Works of it are posted, or its destination, which may still move bytes, owes its last word. A session that
// is lost owes none.
bool Sources::is_under_way(const Source& source) const {
  return !source.posted.empty() ||
         (source.ours && source.owes_word && sessions_.find_open(source.key.first) != nullptr);
}

void Sources::drained(Source& source) {
  context_.make_room();
  // This end does not know what the destination has; all of it may have to be written again.
  std::vector<std::uint32_t> failed;
  if (source.state != TransferState::kFinishing && source.handle)
    failed = blocks_of(*source.move, Side::kSrc, std::vector<bool>(source.move->grid.num_pairs, true));
  step(source_transitions(), source.state, TransferEvent::kDrained);
  report(source, source.num_sent, true, std::move(failed));
  retire(source);
}

// Releases all of them before the first rail drops memory. Dropping memory may wait for the whole device,
// and a stream that waits for a transfer holds up the device.
void Sources::release_streams() {
  for (const auto& [key, source] : ends_)
    if (source->handle) source->handle->release_streams(Outcome::kFailed);
}

}  // namespace kvxfer
