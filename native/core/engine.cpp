#include "core/engine.h"

#include <algorithm>
#include <new>

namespace kvxfer {
namespace {

// When a process dies, the kernel ends its sockets one after the other, within a millisecond unless the
// machine is busy. Only after this time is a lost rail judged as the loss of a rail and not of the peer.
constexpr Time kAfterRailDown = 100'000'000;

constexpr Time kAfterNoMemory = 1'000'000;

// In one round: newcomers that get their name or are refused, and bytes of changes of our regions that peers
// are told. What is left waits for the next round, so that no session waits long for many others.
constexpr int kMostDecidedAtOnce = 16;
constexpr std::size_t kMostToldAtOnce = 64 * 1024;
// A small change counts as much as sending it costs.
constexpr std::size_t kLeastTold = 4096;

std::string in_words(const Rail& rail) {
  return std::string(rail.capabilities().name) + " rail " + std::to_string(rail.info().name.index);
}

std::string words_of_off(std::string_view transport, const wire::RailName& rail) {
  return std::string(transport) + " rail " + std::to_string(rail.index) + " is switched off here";
}

}  // namespace

// ---- connections --------------------------------------------------------------------------------

SessionKey Engine::add_session(Time now, SessionRole role) {
  context_.now = now;
  return sessions_.add(role).key();
}

void Engine::on_dialling(Time now, SessionKey key) {
  context_.now = now;
  if (Peer* peer = sessions_.find(key)) sessions_.dialling(*peer);
}

void Engine::on_disconnected(Time now, SessionKey key, const std::string& why) {
  serve(now, key, [&] {
    if (Peer* peer = sessions_.find(key)) lose(key, sessions_.disconnected(*peer, why));
  });
}

void Engine::on_unreachable(Time now, SessionKey key, const std::string& why) {
  serve(now, key, [&] {
    Peer* peer = sessions_.find(key);
    if (peer == nullptr) return;
    peer->session().connection_lost();
    lose(key, {Code::kUnreachable, why});
  });
}

void Engine::end_session(Time now, SessionKey key, Code code, const std::string& text) {
  serve(now, key, [&] {
    Peer* peer = sessions_.find(key);
    if (peer == nullptr) return;
    sessions_.say_goodbye(*peer, code, text);
    lose(key, {code, text});
  });
}

// Ends the sessions for which memory was lacking, which frees memory. If there is too little even for that,
// the next call goes on with it.
void Engine::end_starved() noexcept {
  context_.take_starved([&](SessionKey key) {
    const auto left = leaving_.find(key);
    context_.serve(key, [&] {
      if (left != leaving_.end()) return end_parts(key, left->second);
      const Status why(Code::kExhausted, "there was not enough memory for what the session requested");
      context_.serve(key, [&] {  // otherwise it ends without a word
        if (Peer* const peer = sessions_.find(key)) sessions_.say_goodbye(*peer, why.code(), why.message());
      });
      lose(key, why);
    });
  });
}

// False: memory is lacking for it. What is left of those sessions must not be served.
bool Engine::finish_leaving() noexcept {
  try {
    while (!leaving_.empty()) end_parts(leaving_.begin()->first, leaving_.begin()->second);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

// A new session does not take over an open name while the process that opened it answers. A restarted
// process is a new peer: its old connection ends by itself, mostly at once, or stays silent.
void Engine::opened(Peer& peer) {
  limits_.has_opened(peer);
  destinations_.apply_limit(peer.key());
  if (sessions_.take_name(peer)) admit(peer);
}

void Engine::admit(Peer& peer) {
  for (const auto& [id, region] : regions_.all()) sessions_.send(peer, region->described());
  sessions_.send(peer, wire::RegionsEnd{});
  sessions_.told_regions(peer, regions_.newest_change());
  if (peer.role() == SessionRole::kAcceptor)
    context_.host.session_open(peer.key());
  else if (peer.regions_known())
    sessions_.await_rails(peer, context_.host.session_open(peer.key()));
  check_up(peer);
}

void Engine::decide_names() {
  for (int count = 0; count < kMostDecidedAtOnce; ++count) {
    const std::optional<Sessions::Decided> next = sessions_.next_decided();
    if (!next) return;
    context_.serve(next->key, [&] {
      Peer& peer = *sessions_.find(next->key);
      if (!next->gets_name)
        return end_session(context_.now, next->key, Code::kRefused,
                           "another process is connected as " + quoted(peer.name()) +
                               " and answers heartbeats: give each agent its own name");
      sessions_.admit(peer);
      admit(peer);
    });
  }
  context_.pump_again = true;
}

// Peers hear of changes one after the other, those first that were not told for longest.
void Engine::tell_regions() {
  std::size_t left = kMostToldAtOnce;
  for (Peer* peer = sessions_.first_behind(); peer != nullptr && left != 0;) {
    Peer* const next = Sessions::next_behind(*peer);
    if (sessions_.takes_more(*peer))
      context_.serve(peer->key(), [&] { left -= std::min(left, tell_regions(*peer, left)); });
    peer = next;
  }
  if (left == 0) context_.pump_again = true;
  if (sessions_.first_behind() == nullptr) regions_.all_told();
}

// Tells a peer of about so many bytes of changes. Returns how many they were.
std::size_t Engine::tell_regions(Peer& peer, std::size_t most_nbytes) {
  std::size_t nbytes = 0;
  while (sessions_.is_behind(peer) && nbytes < most_nbytes) {
    const std::optional<Regions::Change> change = regions_.change_after(sessions_.told_regions(peer));
    if (!change) {
      sessions_.knows_all(peer);
      break;
    }
    std::size_t its = 0;
    if (const Region* const region = regions_.find(change->region)) {
      const wire::Region told = change->number == region->added
                                    ? region->described()
                                    : region->keys_after(sessions_.told_regions(peer));
      its = told.layout.size() + told.spans.size() * sizeof(MemorySpan);
      for (const wire::TransportKeys& keys : told.keys) its += keys.keys.size();
      sessions_.send(peer, told);
    } else {
      sessions_.send(peer, wire::RegionGone{change->region});
    }
    sessions_.told_regions(peer, change->number);
    nbytes += std::max(its, kLeastTold);
  }
  return nbytes;
}

void Engine::check_up(Peer& peer) {
  if (!sessions_.comes_up(peer)) return;
  const std::string missing = missing_transport(peer.key());
  if (peer.role() == SessionRole::kInitiator && (rails_.of(peer.key()).empty() || !missing.empty())) {
    std::string why = "no " + missing + (missing.empty() ? "" : " ") + "rail to " + quoted(peer.name()) +
                      " came up" + (missing.empty() ? "" : ", which this agent requires");
    for (const std::string& note : peer.notes()) why += "; " + note;
    return end_session(context_.now, peer.key(), Code::kUnreachable, why);
  }
  sessions_.set_up(peer);
  context_.host.emit({.kind = EventKind::kPeerUp, .peer = peer.key()});
  messages_.peer_up(peer);
}

std::string Engine::missing_transport(SessionKey key) const {
  const std::vector<std::string>& required = context_.config.required_transports;
  const auto found = std::find_if(required.begin(), required.end(),
                                  [&](const std::string& name) { return !rails_.any(key, name); });
  return found == required.end() ? "" : *found;
}

// The only place where a session ends: every part that holds something of it lets go of that. If memory is
// lacking on the way, the session is marked, and its end goes on later.
void Engine::lose(SessionKey key, Status reason) {
  context_.serve(key, [&] {
    Peer* peer = sessions_.find(key);
    if (peer == nullptr) return;
    if (sessions_.is_contested(*peer) &&
        (reason.code() == Code::kPeerLost || reason.code() == Code::kPeerSilent))
      reason = {Code::kPeerRestarted,
                "peer " + quoted(peer->name()) + " was restarted: it came back as a new process"};
    // Whatever the session was ended for: a caller that awaits something of it hears that the peer is lost,
    // or never came.
    if (!is_of_peer(reason.code()) && reason.code() != Code::kClosed)
      reason = {peer->was_open() ? Code::kPeerLost : Code::kUnreachable, reason.message()};
    const auto leaving = leaving_.insert_or_assign(key, reason).first;
    try {
      sessions_.remove(key, reason);
    } catch (...) {  // it is still there
      leaving_.erase(leaving);
      throw;
    }
    limits_.remove_session(key);
    end_parts(key, leaving->second);
  });
}

// Called again if memory was lacking for all of it: passes over what is gone by then.
void Engine::end_parts(SessionKey key, const Status& reason) {
  const std::vector<LeaseId> leases = leases_.of_holder(key);
  admission_.remove_session(key);
  // Local fences first: from here on nothing begins for this session, and works under way end.
  for (const TransferKey& each : sources_.all().of_session(key))
    sources_.fail(each, TransferEvent::kFail, reason, false);
  for (const TransferKey& each : destinations_.all().of_session(key))
    destinations_.fail(each, TransferEvent::kFail, reason, false);
  for (const LeaseId id : leases) end_lease(id, LeaseEvent::kPeerLost, reason);
  leases_.remove_session(key);
  end_expectations(expectations_.from(key), reason);
  // In this order: a peer that listens still hears the reason before its rails end.
  context_.host.close_session(key);
  sources_.remove_session(key);
  destinations_.remove_session(key);
  tag_memory_.remove_session(key);
  programs_.remove_session(key);
  peer_regions_.remove_session(key);
  redials_.remove_session(key);
  rails_.drop_session(key);
  messages_.remove_session(key);
  context_.host.emit(
      {.kind = EventKind::kPeerLost, .peer = key, .code = reason.code(), .message = reason.message()});
  leaving_.erase(key);
}

// ---- rails --------------------------------------------------------------------------------------

void Engine::rail_up(Time now, SessionKey key, const RailInfo& info) {
  serve(now, key, [&] {
    Peer* peer = sessions_.find(key);
    if (peer == nullptr || rails_.is_over(key, info.name)) return context_.host.drop_rail(info.id);
    if (const std::string_view transport = info.capabilities.name; rails_.is_off(transport)) {
      // The rail was coming up when its transport was switched off.
      context_.host.drop_rail(info.id);
      return rail_failed(*peer, info.name, words_of_off(transport, info.name), true);
    }
    // A peer that dials a rail anew has lost the one before, even if we have not noticed.
    if (Rail* const before = rails_.at(key, info.name.index)) {
      context_.host.drop_rail(before->id());
      take_down(*before);
    }
    Rail& rail = rails_.add(key, info);
    sources_.rail_up(rail);
    for (const RegionId region : peer_regions_.rail_up(rail)) destinations_.path_came(key, region);
    if (peer->role() == SessionRole::kInitiator) redials_.up(rail);
    sessions_.forget_rail(*peer, info.name.index);
    if (info.name.attempt == 0) {
      sessions_.rail_settled(*peer);
      return check_up(*peer);
    }
    ++context_.stats.rails_redialled;
    log(in_words(rail) + " to " + quoted(peer->name()) + " was dialled again and is up");
  });
}

void Engine::rail_failed(Time now, SessionKey key, std::optional<wire::RailName> rail, std::string note,
                         std::string_view transport) {
  serve(now, key, [&] {
    if (Peer* peer = sessions_.find(key)) rail_failed(*peer, rail, std::move(note), rails_.is_off(transport));
  });
}

void Engine::rail_failed(Peer& peer, std::optional<wire::RailName> rail, std::string note, bool is_off) {
  if (rail) {
    rails_.give_up(peer.key(), *rail);
    note_redial(peer, *rail, std::move(note), is_off);
    if (rail->attempt != 0) return;
  } else {
    sessions_.note(peer, std::move(note));
  }
  sessions_.rail_settled(peer);
  end_pathless(peer);
  check_up(peer);
}

// ---- switched off -------------------------------------------------------------------------------

Status Engine::switch_rails(Time now, const std::string& transport, bool on) {
  context_.now = now;
  if (on != rails_.is_off(transport)) return {};
  if (on) {
    rails_.set_off(transport, false);
    log("rails of " + transport + " are switched on");
    redials_.dial_held();  // holds again those whose transport is off
    return {};
  }
  const auto is_it = [&](const Rail* rail) { return rail->capabilities().name == transport; };
  const std::vector<std::string>& required = context_.config.required_transports;
  if (std::find(required.begin(), required.end(), transport) != required.end())
    return {Code::kUnsupported, "this agent requires " + transport + ": its sessions would end without it"};
  std::string last;
  std::vector<RailId> up;
  for (const SessionKey key : sessions_.keys()) {
    const std::vector<Rail*>& rails = rails_.of(key);
    if (rails.empty()) continue;
    if (std::all_of(rails.begin(), rails.end(), is_it))
      last += (last.empty() ? "" : ", ") + quoted(sessions_.find(key)->name());
    for (const Rail* rail : rails)
      if (is_it(rail)) up.push_back(rail->id());
  }
  if (!last.empty())
    return {Code::kUnsupported, "some sessions have no other rails than those of " + transport +
                                    ", and would end: those with " + last +
                                    "; disconnect these peers first, or connect them with another transport"};
  rails_.set_off(transport, true);
  log("rails of " + transport + " are switched off");
  for (const RailId id : up) {
    Rail* const rail = rails_.find(id);
    if (rail == nullptr) continue;  // its session has ended with another
    context_.serve(rail->session(), [&] {
      context_.host.drop_rail(id);
      rail_down(*rail, "it was switched off here");
    });
  }
  end_starved();
  return {};
}

void Engine::refused_rail(Time now, SessionKey key, const wire::RailName& rail, std::string_view transport) {
  serve(now, key, [&] {
    if (Peer* peer = sessions_.find(key)) note_redial(*peer, rail, words_of_off(transport, rail), true);
  });
}

void Engine::rail_down(Time now, RailId id, const std::string& why) {
  context_.now = now;
  Rail* const rail = rails_.find(id);
  if (rail != nullptr) serve(now, rail->session(), [&] { rail_down(*rail, why); });
}

void Engine::rail_down(Rail& gone, const std::string& why) {
  const SessionKey key = gone.session();
  const wire::RailName name = gone.info().name;
  const std::string kind(gone.capabilities().name);
  const std::string words = in_words(gone) + " went down: " + why;
  take_down(gone);
  Peer* peer = sessions_.find(key);
  if (peer == nullptr) return;
  // Control frames may still flow, but pages never will: the peer is lost, and that is reported at once.
  if (rails_.of(key).empty())
    return end_session(context_.now, key, Code::kPeerLost,
                       "the last rail to " + quoted(peer->name()) + " is gone: " + words);
  const std::vector<std::string>& required = context_.config.required_transports;
  if (std::find(required.begin(), required.end(), kind) != required.end() && !rails_.any(key, kind))
    return end_session(context_.now, key, Code::kPeerLost,
                       "the last " + kind + " rail to " + quoted(peer->name()) +
                           " is gone, which this agent requires: " + words);
  sessions_.send(*peer, wire::RailDown{name});
  note_redial(*peer, name, words, rails_.is_off(kind));
  log("other rails to " + quoted(peer->name()) + " stay up: " + peer->rail_note(name.index));
  context_.timers.arm(time_after(context_.now, kAfterRailDown), TimerKind::kPath, key);
}

void Engine::take_down(Rail& rail) {
  ++context_.stats.rails_lost;
  sources_.rail_down(rail);
  peer_regions_.rail_down(rail);
  rails_.remove(rail);
}

// The end that opened the session dials again; the other end notes that it waits.
void Engine::note_redial(Peer& peer, const wire::RailName& rail, std::string words, bool is_off) {
  const bool is_ours = peer.role() == SessionRole::kInitiator;
  if (is_off) {
    words += is_ours ? "; it is dialled when its transport is switched on"
                     : "; the peer's dials are refused until its transport is switched on";
    if (is_ours) redials_.hold(peer.key(), rail);
  } else {
    words +=
        is_ours ? "; dialled again in " + std::to_string(redials_.again(peer.key(), rail) / 1'000'000) + " ms"
                : "; the peer dials it again";
  }
  sessions_.note_rail(peer, rail.index, std::move(words));
}

// After a rail went down, or did not come up: transfers that only it could have brought end now, and not at
// their deadlines.
void Engine::end_pathless(Peer& peer) {
  const auto end = [&](const auto& transfers, bool fetched_here) {
    std::vector<std::pair<TransferKey, Status>> pathless;
    for (const TransferRoute& route : transfers.routes(peer.key())) {
      const Region* local = regions_.find(route.local);
      const PeerRegion* remote = peer_regions_.find(peer.key(), route.remote);
      if (local == nullptr || remote == nullptr) continue;
      const Status path = peer_regions_.check_path(peer, *local, *remote, fetched_here, false);
      const Status converting = peer_regions_.check_path(peer, *local, *remote, fetched_here, true);
      if (converting.ok()) continue;  // then those that do not convert have a path, too
      for (const TransferKey& key : transfers.of_route(route))
        if (const Status& own = transfers.find(key)->move->program->converts() ? converting : path; !own.ok())
          pathless.emplace_back(key, own);
    }
    return pathless;
  };
  auto of_destinations = end(destinations_.all(), true);
  auto of_sources = end(sources_.all(), false);
  for (auto& [key, why] : of_destinations)
    destinations_.fail(key, TransferEvent::kFail, std::move(why), true);
  for (auto& [key, why] : of_sources) sources_.fail(key, TransferEvent::kFail, std::move(why), true);
}

void Engine::on_completion(Time now, const Completion& completion) {
  context_.now = now;
  const std::optional<Rails::Completed> work = rails_.completed(completion);
  if (!work) return;
  serve(now, work->transfer.first, [&] {
    if (work->kind == WorkKind::kSend)
      sources_.sent(*work, completion);
    else
      destinations_.completed(*work, completion);
  });
}

// ---- time ---------------------------------------------------------------------------------------

void Engine::on_time(Time now) {
  context_.now = now;
  const Time late = context_.timers.next() == kNever ? 0 : now - context_.timers.next();
  while (const std::optional<Timers::Due> due = context_.timers.take_due(now))
    serve(now, session_of(*due), [&] {
      try {
        on_timer(*due, late);
      } catch (const std::bad_alloc&) {
        // A right whose time is over must end, even if later; the objects of a session end with it.
        context_.timers.arm(time_after(now, kAfterNoMemory), due->kind, due->a, due->b);
        throw;
      }
    });
}

SessionKey Engine::session_of(const Timers::Due& due) {
  switch (due.kind) {
    case TimerKind::kLease: {
      const Lease* const lease = leases_.find(due.a);
      return lease == nullptr ? kNobody : lease->holder().value_or(kNobody);
    }
    case TimerKind::kExpectation: return kNobody;
    case TimerKind::kRail: {
      const Rail* const rail = rails_.find(static_cast<RailId>(due.a));
      return rail == nullptr ? kNobody : rail->session();
    }
    default: return static_cast<SessionKey>(due.a);
  }
}

void Engine::on_timer(const Timers::Due& due, Time late) {
  const SessionKey key = static_cast<SessionKey>(due.a);
  switch (due.kind) {
    case TimerKind::kSession:
      if (Peer* peer = sessions_.find(key))
        if (Status status = sessions_.on_timer(*peer); !status.ok()) lose(key, std::move(status));
      break;
    case TimerKind::kNewcomer:
      if (Peer* peer = sessions_.find(key))
        for (const SessionKey owner : sessions_.waited_enough(*peer))
          lose(owner, {Code::kPeerLost, "it did not answer"});
      break;
    case TimerKind::kSource: sources_.on_timer({key, due.b}); break;
    case TimerKind::kDestination: destinations_.on_timer({key, due.b}); break;
    case TimerKind::kLease:
      if (Status why; leases_.has_expired(due.a, why)) end_lease(due.a, LeaseEvent::kExpire, why);
      break;
    case TimerKind::kExpectation:
      if (Status why = expectations_.late(due.a); !why.ok()) {
        why = {why.code(), why.message() + destinations_.pace_in_words(*expectations_.find(due.a))};
        expectations_.give_up(due.a, why);
        destinations_.end_expectation(due.a, TransferState::kFailed, why);
      }
      break;
    case TimerKind::kRail: {
      const RailId id = static_cast<RailId>(due.a);
      if (!rails_.is_silent(id, late)) break;
      // The rail is given up if others that could bring the same are up, although nothing reported
      // that it broke: a router on the way may forget a connection. The last one is kept; its
      // transfers have their deadlines.
      Rail& rail = *rails_.find(id);
      if (!peer_regions_.others_replace(rail)) {
        rails_.watch_on(rail);
        break;
      }
      const std::string why = std::to_string(rail.outstanding()) + " pieces were due, but none came for " +
                              std::to_string(context_.config.session.silent_ns / 1'000'000) + " ms";
      context_.host.drop_rail(id);
      rail_down(context_.now, id, why);
      break;
    }
    case TimerKind::kRedial: redials_.dial(key, static_cast<std::uint16_t>(due.b)); break;
    case TimerKind::kPace:
      limits_.on_timer(key);
      destinations_.apply_limit(key);
      break;
    case TimerKind::kPath:
      if (Peer* peer = sessions_.find(key)) {
        end_pathless(*peer);
        sessions_.flush(*peer);
      }
      break;
  }
}

void Engine::pump(Time now) {
  context_.now = now;
  context_.begin_round();
  if (!has_work()) return;  // as in most rounds of a caller that polls
  if (!finish_leaving()) {
    context_.pump_again = true;
    return;
  }
  try {
    if (sessions_.has_undecided() && !closed_) decide_names();
    if (sessions_.first_behind() != nullptr) tell_regions();
    if (expectations_.has_rest()) expectations_.end_rest();
    rails_.begin_round();
    sources_.send_waiting();
    sources_.sum_slice();
    destinations_.sum_slice();
    destinations_.post_pieces();
    destinations_.flush_credits();
    posting_.serve_backlog();
    rails_.cancel_stopped();
    sessions_.flush_stirred();
  } catch (const std::bad_alloc&) {  // the work of no session: the next round does it
    context_.pump_again = true;
  }
  if (context_.has_starved()) end_starved();
}

// ---- ends that several parts have a share in -------------------------------------------------------

void Engine::end_lease(LeaseId id, LeaseEvent event, const Status& why) {
  if (leases_.find(id) == nullptr) return;
  // The transfers of its holder, or of all peers. Those that had ended before and still drain are waited
  // for as well.
  const std::vector<TransferKey> under = leases_.transfers_under(id);
  const std::optional<Lease> lease = leases_.take(id, event, why, under.size());
  if (!lease) return;
  for (const TransferKey& key : under)
    context_.serve(key.first, [&] {
      if (lease->mode() == wire::LeaseMode::kRead)
        sources_.fail(key, TransferEvent::kFail, why, true);
      else
        destinations_.fail(key, TransferEvent::kFail, why, true);
    });
  leases_.tell_ended(*lease, why, under.size());
}

void Engine::end_expectations(const std::vector<std::uint64_t>& handles, const Status& why) {
  for (const std::uint64_t handle : handles)
    destinations_.end_expectation(handle, TransferState::kFailed, why);
}

// ---- views --------------------------------------------------------------------------------------

std::optional<PeerView> Engine::peer(SessionKey key) const {
  std::optional<PeerView> view = sessions_.view(key);
  if (view)
    for (const Rail* rail : rails_.of(key)) view->rails.emplace_back(rail->capabilities().name);
  return view;
}

std::size_t Engine::open_transfers(OpenPlace& place, std::span<Record> records) const noexcept {
  using Of = OpenPlace::Of;
  std::size_t num = 0;
  const auto walk = [&](const auto& transfers, Of next, auto&& num_pieces) {
    for (auto each = transfers.after(place.transfer); num != records.size() && each != transfers.end();
         ++each) {
      Records::describe(records[num++], *each->second, num_pieces(*each->second));
      place.transfer = each->first;
    }
    if (num == records.size()) return;
    place.transfer = {kNobody, 0};
    place.of = next;
  };
  if (place.of == Of::kSources)
    walk(sources_.all(), Of::kDestinations, [](const Source& source) { return source.num_sent; });
  if (place.of == Of::kDestinations)
    walk(destinations_.all(), Of::kExpectations,
         [](const Destination& destination) { return destination.arrivals.num_in(); });
  while (place.of == Of::kExpectations && num != records.size()) {
    if (const Expectation* const expectation = expectations_.after(place.expectation))
      Records::describe(records[num++], *expectation);
    else
      place.of = Of::kNothing;
  }
  return num;
}

EngineLoad Engine::load() const noexcept {
  return {rails_.num_works(), rails_.outstanding(), sources_.num_fences(),  expectations_.size(),
          leases_.size(),     handles_.size(),      redials_.num_waiting(), context_.timers.size(),
          tag_memory_.size(), messages_.size()};
}

void Engine::close(Time now, const Status& why) {
  context_.now = now;
  closed_ = true;
  sources_.release_streams();
  destinations_.release_streams();
  for (const SessionKey key : sessions_.keys()) end_session(now, key, why.code(), why.message());
  for (const auto& [id, region] : regions_.all())
    for (const LeaseId lease : leases_.of_region(id)) end_lease(lease, LeaseEvent::kRegionGone, why);
  end_expectations(expectations_.all(), why);
}

void Engine::abandon(Time now) {
  context_.now = now;
  sources_.abandon();
  destinations_.abandon();
  context_.workers.reset();
}

}  // namespace kvxfer
