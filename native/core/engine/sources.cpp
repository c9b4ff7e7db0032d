#include "core/engine/sources.h"

#include <algorithm>

#include "core/engine/arrivals.h"

namespace kvxfer {

Source& Sources::add(std::unique_ptr<Source> source) {
  source->set_timer(context_.timers, time_after(context_.now, source->timeout_ns));
  const TransferKey key = source->key;
  return *sources_.emplace(key, std::move(source)).first->second;
}

bool Sources::offer(Peer& peer, TransferKey key) {
  Source& source = *find(key);
  if (fences_.empty()) return false;
  source.fence = fences_.take();
  step(source_transitions(), source.state, TransferEvent::kTold);
  sessions_.send(
      peer, wire::Offer{source.spec(), source.layers_ready, source.fence->index, source.fence->generation});
  admission_.opened(source);
  return true;
}

void Sources::layers_ready(TransferKey key, std::uint32_t layers) {
  Source* source = find(key);
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
  const auto refuse = [&](const Status& why) {
    sessions_.refuse(peer, id, why);
    return Status();
  };
  const Result<Programs::Use> use = programs_.check(peer, spec, Footprint::Half::kSrc);
  if (!use.ok()) return refuse(use.status());
  if (!admission_.has_room(peer.key(), false, spec.grid.num_pairs) || fences_.empty())
    return refuse({Code::kRefused, "too many transfers are open at the peer: wait for some to end"});
  auto owned = std::make_unique<Source>();
  Source& source = *owned;
  source.key = {peer.key(), id};
  source.state = TransferState::kServing;
  source.take(spec, use.value().program->copies, *use.value().local, use.value().program->dst);
  if (Status status = leases_.find(source, wire::LeaseMode::kRead); !status.ok()) return refuse(status);
  source.layers_ready = source.move->grid.num_layers;
  source.fence = fences_.take();
  add(std::move(owned));
  admission_.opened(source);
  const Leases::Window window = leases_.window(source);
  sessions_.send(peer, wire::Accept{id, source.fence->index, source.fence->generation,
                                    static_cast<std::uint64_t>(window.ttl_ns), window.renewable});
  return {};
}

Status Sources::on(Peer& peer, const wire::Credit& credit) {
  Source* source = find({peer.key(), credit.transfer});
  if (source == nullptr || source->state != TransferState::kServing) return {};  // it ended meanwhile
  const PieceGrid& grid = source->move->grid;
  if (credit.num_pieces > grid.num_pieces() || credit.first_piece > grid.num_pieces() - credit.num_pieces ||
      grid.piece(credit.first_piece + credit.num_pieces - 1).layer - grid.first_layer >= source->layers_ready)
    return {Code::kProtocol, "CREDIT for pieces that are not there or not ready"};
  // Which of a rail that is not up at this end yet is not known.
  const std::vector<Rail*>& rails = rails_.of(peer.key());
  const bool sends =
      credit.rail == wire::kNoRail
          ? source->memory == MemoryKind::kHost
          : std::none_of(rails.begin(), rails.end(), [&](const Rail* rail) {
              return rail->info().index == credit.rail && !rail->capabilities().memory.has(source->memory);
            });
  if (!sends) return {Code::kProtocol, "CREDIT for pages that no rail sends: they lie on a GPU"};
  // A receiver asks for every piece once, and again for those that it may redo.
  source->num_credited += credit.num_pieces;
  if (source->num_credited > grid.num_pieces() + Arrivals::max_redone(grid))
    return {Code::kProtocol, "CREDIT for the same pieces over and over"};
  if (source->integrity) {
    // The pages are ours and at rest, so the sums can be told before the bytes arrive.
    wire::Checksums sums{credit.transfer, credit.first_piece, {}};
    for (std::uint32_t i = 0; i < credit.num_pieces; ++i)
      sums.crc32c.push_back(context_.host.checksum(*source->move, credit.first_piece + i, Side::kSrc));
    sessions_.send(peer, sums);
  }
  if (credit.rail == wire::kNoRail) return {};
  for (std::uint32_t i = 0; i < credit.num_pieces; ++i)
    source->to_send.emplace_back(credit.rail, credit.first_piece + i);
  send_pieces(*source);
  return {};
}

void Sources::on(Peer& peer, const wire::Done& done) {
  Source* source = find({peer.key(), done.transfer});
  if (source == nullptr || !step(source_transitions(), source->state, TransferEvent::kPeerDone)) return;
  // A send of a piece that another rail brought, or that the peer asked for in vain, reads pages
  // that are the caller's again when the last of them has completed.
  admission_.closed(*source);
  if (source->posted.empty()) return drained(*source);
  source->to_send.clear();
  sending_.erase(source->key);
  release_fence(*source);
  draining_.begin(*source);
}

// ---- what happens to them -----------------------------------------------------------------------

void Sources::sent(const Rails::Completed& work, const Completion& completion) {
  Source* source = find(work.transfer);
  if (source == nullptr) return;
  source->forget_work(completion.work);
  if (completion.code == Code::kOk) ++context_.stats.pieces_sent;
  if (completion.code == Code::kOk && source->handle && work.rail != nullptr)
    source->handle->add_rail(work.rail->capabilities().name);
  // A piece that did not go out is the destination's to ask for again, where it hears of it by the rail's
  // end. Of one that this end cannot send it hears nothing: it waits for what never comes.
  if (completion.code != Code::kOk && completion.code != Code::kRailFailed &&
      completion.code != Code::kCancelled && !is_draining(source->state)) {
    const Code code = completion.code == Code::kSystem ? Code::kRailFailed : completion.code;
    return fail(*source, TransferEvent::kFail, {code, completion.detail}, true);
  }
  if (is_draining(source->state) && source->posted.empty()) drained(*source);
}

void Sources::send_pieces(Source& source) {
  // Pieces of a rail that is not up at this end yet wait; of one that went down they are not
  // wanted any more: the destination sees that too and asks elsewhere.
  std::list<std::pair<std::uint16_t, std::uint32_t>> later;
  while (!source.to_send.empty() && source.state == TransferState::kServing) {
    const auto [index, piece] = source.to_send.front();
    source.to_send.pop_front();
    Rail* rail = nullptr;
    for (Rail* each : rails_.of(source.key.first))
      if (each->info().index == index && !each->capabilities().one_sided &&
          each->capabilities().memory.has(source.memory))
        rail = each;
    if (rail == nullptr || rail->rests()) {
      later.emplace_back(index, piece);
      continue;
    }
    Work work;
    work.kind = WorkKind::kSend;
    work.piece = piece;
    work.move = source.move;
    const PostResult result = rails_.post(*rail, WorkUse::kSend, work, source);
    if (result.accepted == 0 && result.code == Code::kAgain) {
      rails_.rest(*rail);
      context_.pump_again = true;
      later.emplace_back(index, piece);
    }
  }
  source.to_send = std::move(later);
  if (source.to_send.empty())
    sending_.erase(source.key);
  else
    sending_.insert(source.key);
}

void Sources::send_waiting() {
  if (sending_.empty()) return;
  for (const TransferKey& key : std::vector(sending_.begin(), sending_.end()))
    if (Source* source = find(key); source != nullptr && sessions_.find_open(key.first) != nullptr)
      send_pieces(*source);
}

void Sources::rail_down(const Rail& rail) {
  for (const TransferKey& key : sending_)
    if (Source* source = key.first == rail.session() ? find(key) : nullptr)
      std::erase_if(source->to_send, [&](const auto& entry) { return entry.first == rail.info().index; });
}

void Sources::on_timer(TransferKey key) {
  Source* source = find(key);
  if (source == nullptr) return;
  source->timer.reset();
  if (is_draining(source->state)) return draining_.tell(*source);
  std::string why =
      source->layers_ready < source->move->grid.num_layers
          ? source->unreleased("here")
          : "the peer had not fetched every page when the transfer's time was over: no lease or "
            "expectation there let it in so long, or the peer is slow";
  fail(*source, TransferEvent::kFail, {Code::kDeadline, std::move(why)}, true);
}

// ---- ends ---------------------------------------------------------------------------------------

void Sources::release_fence(Source& source) {
  if (!source.fence) return;
  fences_.give_back(*source.fence);
  source.fence.reset();
}

void Sources::fail(TransferKey key, TransferEvent event, Status why, bool tell_peer) {
  if (Source* source = find(key)) fail(*source, event, std::move(why), tell_peer);
}

void Sources::fail(Source& source, TransferEvent event, Status why, bool tell_peer) {
  const bool told = source.state == TransferState::kServing;
  if (!step(source_transitions(), source.state, event)) return;
  context_.timers.clear(source.timer);
  source.reason = std::move(why);
  if (source.handle) source.handle->let_streams_go(outcome_of(source.state));
  release_fence(source);  // a peer that still reads finds out before it says done
  source.to_send.clear();
  admission_.closed(source);
  if (!source.posted.empty()) draining_.begin(source);
  if (Peer* peer = sessions_.find_open(source.key.first); peer != nullptr && tell_peer && told)
    sessions_.refuse(*peer, source.key.second, source.reason);
  if (source.posted.empty()) drained(source);
}

// The one way out: done, or nothing of it is posted any more.
void Sources::drained(Source& source) {
  step(source_transitions(), source.state, TransferEvent::kDrained);
  const bool done = source.state == TransferState::kDone;
  release_fence(source);
  context_.timers.clear(source.timer);
  if (source.ours && !done) admission_.forget(source);
  if (done && !source.ours && !source.notify.empty() && sessions_.find(source.key.first) != nullptr)
    context_.host.emit(
        {.kind = EventKind::kNotification, .peer = source.key.first, .payload = std::move(source.notify)});
  ++(done ? context_.stats.transfers_done : context_.stats.transfers_failed);
  // What the destination has of it is not known here; all of it may have to be written again.
  std::vector<std::uint32_t> failed;
  if (!done)
    failed =
        blocks_of(*source.move, Footprint::Half::kSrc, std::vector<bool>(source.move->grid.num_pairs, true));
  handles_.end(source.handle, source.state, source.reason, std::move(failed));
  sending_.erase(source.key);
  auto found = sources_.find(source.key);
  context_.keep_for_this_round(std::move(found->second));
  sources_.erase(found);
  draining_.ended(source);
}

std::vector<TransferKey> Sources::find(std::optional<SessionKey> session, const Meant& meant) const {
  std::vector<TransferKey> keys;
  for (auto it = sources_.lower_bound({session.value_or(0), 0});
       it != sources_.end() && (!session || it->first.first == *session); ++it)
    if (meant(*it->second)) keys.push_back(it->first);
  return keys;
}

// All of them, before the first rail lets memory go: that may wait for the whole device, and a stream that waits
// for a transfer holds the device up.
void Sources::let_streams_go() {
  for (const auto& [key, source] : sources_)
    if (source->handle) source->handle->let_streams_go(Outcome::kFailed);
}

void Sources::abandon() {
  while (!sources_.empty()) {
    Source& source = *sources_.begin()->second;
    source.posted.clear();
    drained(source);
  }
}

}  // namespace kvxfer
