#include "core/runtime/rail_table.h"

#include <algorithm>
#include <new>

#include "core/faulty_transport.h"
#include "core/runtime/clock.h"

namespace kvxfer {
namespace {

// The driving thread releases the gate, or looks at other things, when rails have taken so long; the rest
// have the next turn. Each rail that moves takes as long at most.
constexpr Time kPollNs = 50'000;

std::string_view stage_of(WorkKind kind) {
  switch (kind) {
    case WorkKind::kFetch: return "fetch";
    case WorkKind::kSend: return "send";
    case WorkKind::kReceive: return "receive";
  }
  return "";
}

}  // namespace

Status RailTable::add_transports(const RuntimeOptions& options, Reactor& reactor, const FenceTable& fences,
                                 const std::shared_ptr<CopyWorkers>& workers) {
  Result<Faults> faults = Faults::parse(options.faults);
  if (!faults.ok()) return faults.status();
  if (options.gpus.size() > 1)
    return {Code::kUnsupported, "an agent supports one GPU for now: make an agent for each GPU"};
  if (Status status = check_options(options.transport_options); !status.ok()) return status;
  Result<std::vector<const TransportKind*>> used = transports_in_use(options.transports);
  if (!used.ok()) return used.status();
  kinds_ = std::move(used).value();
  SharedParts shared;
  const RailParts parts{reactor, fences, options.gpus, shared, workers};
  for (const TransportKind* kind : kinds_) {
    const auto failed = [&](Code code, const std::string& why) -> Status {
      return {code, "transport " + std::string(kind->name) + ": " + why};
    };
    if (const std::string why = kind->why_off(options.gpus); !why.empty())
      return failed(Code::kUnsupported, why);
    auto rails = kind->make(parts, OptionValues(*kind, options.transport_options));
    if (!rails.ok()) return failed(rails.status().code(), rails.status().message());
    for (std::unique_ptr<Transport>& rail : rails.value()) {
      if (!options.faults.empty()) {
        Faults own = faults.value();
        // Each instance fails differently: rails that fail in step would hide what failover does.
        own.seed += transports_.size();
        rail = std::make_unique<FaultyTransport>(std::move(rail), own);
      }
      transports_.push_back(std::move(rail));
      kind_of_.push_back(kind);
    }
  }
  return {};
}

// ---- what there is --------------------------------------------------------------------------------

std::uint16_t RailTable::instance_of(std::size_t transport) const {
  const auto first = std::find(kind_of_.begin(), kind_of_.end(), kind_of_[transport]);
  return static_cast<std::uint16_t>(transport - static_cast<std::size_t>(first - kind_of_.begin()));
}

// Ranks are two apart: a rail that is far from the memory comes behind the near ones of its kind, and before
// the next kind.
std::uint32_t RailTable::rank_of(const TransportKind& kind) const {
  const auto found = std::find(kinds_.begin(), kinds_.end(), &kind);
  return 2 * static_cast<std::uint32_t>(found - kinds_.begin());
}

bool RailTable::any(bool (*is_so)(const TransportKind&)) const {
  return std::any_of(kinds_.begin(), kinds_.end(), [&](const auto* kind) { return is_so(*kind); });
}

bool RailTable::hands_out_memory(std::size_t transport) const {
  return kind_of_[transport]->reach == Reach::kHost && transports_[transport]->capabilities().one_sided;
}

std::size_t RailTable::instance_for(std::string_view transport, SessionKey session,
                                    const wire::RailName& rail) const {
  static const std::vector<Place> none;
  const auto found = of_session_.find(session);
  const std::vector<Place>& bound = found == of_session_.end() ? none : found->second;
  std::size_t best = SIZE_MAX, fewest = SIZE_MAX;
  for (std::size_t i = 0; i < transports_.size(); ++i) {
    if (transports_[i]->capabilities().name != transport) continue;
    const auto num_bound =
        static_cast<std::size_t>(std::count_if(bound.begin(), bound.end(), [&](const Place& place) {
          return place.first == i && bound_.at(place).name.index != rail.index;
        }));
    if (num_bound < fewest) {
      fewest = num_bound;
      best = i;
    }
  }
  return best;
}

// ---- rails come and go ----------------------------------------------------------------------------

Status RailTable::bind(NewRail rail, UniqueFd socket, const ConnectInfo& info, Time due_at) {
  due_.push_back({due_at, {rail.transport, 0}});
  Result<PeerId> peer = Status(Code::kExhausted, "there is not enough memory for it");
  try {
    std::vector<Place>& all = of_session_[rail.session];
    all.reserve(all.size() + 1);
    peer = transports_[rail.transport]->connect(std::move(socket), info);
    if (peer.ok()) {
      bound_[{rail.transport, peer.value()}] = {
          rail.session, rail.name, 0, due_at, std::move(rail.descriptor), rail.peer_instance};
      all.emplace_back(rail.transport, peer.value());
    }
  } catch (const std::bad_alloc&) {
    if (peer.ok()) transports_[rail.transport]->disconnect(peer.value());
    peer = Status(Code::kExhausted, "there is not enough memory for it");
  }
  if (peer.ok()) {
    due_.back().second.second = peer.value();
  } else {
    due_.pop_back();
    forget_empty(rail.session);
  }
  return peer.ok() ? Status() : peer.status();
}

void RailTable::unbind(Place place) {
  auto found = bound_.find(place);
  if (found == bound_.end()) return;
  const SessionKey session = found->second.session;
  places_.erase(found->second.id);
  bound_.erase(found);
  std::erase(of_session_.at(session), place);
  forget_empty(session);
  transports_[place.first]->disconnect(place.second);
}

void RailTable::forget_empty(SessionKey session) {
  if (const auto found = of_session_.find(session); found != of_session_.end() && found->second.empty())
    of_session_.erase(found);
}

template <class Meant>
void RailTable::unbind_all(SessionKey session, Meant&& meant) {
  const auto all = of_session_.find(session);
  if (all == of_session_.end()) return;
  // From the end: each rail that goes leaves the list, and the list goes with the last one.
  for (std::size_t left = all->second.size(); left > 0; --left)
    if (const Place place = all->second[left - 1]; meant(bound_.at(place))) unbind(place);
}

void RailTable::unbind_session(SessionKey session) {
  unbind_all(session, [](const Bound&) { return true; });
}

void RailTable::drop_unready(SessionKey session, std::uint16_t index) {
  unbind_all(session, [index](const Bound& rail) { return rail.name.index == index && rail.id == 0; });
}

// A peer may withhold what its end of a rail must say first; a caller that connects waits for the rails.
void RailTable::expire(Time now, const std::string& limit, Engine& engine) {
  while (next_due() <= now) {
    const auto [due_at, place] = due_.front();
    due_.pop_front();
    const auto found = bound_.find(place);
    // It is up, or it is gone and another rail has its number.
    if (found == bound_.end() || found->second.id != 0 || found->second.due_at != due_at) continue;
    const SessionKey session = found->second.session;
    const wire::RailName rail = found->second.name;
    unbind(place);
    engine.rail_failed(now, session, rail,
                       std::string(kind_of_[place.first]->name) + " rail " + std::to_string(rail.index) +
                           ": the peer's end was not ready within " + limit,
                       kind_of_[place.first]->name);
  }
}

void RailTable::disconnect_all() {
  for (const auto& [place, rail] : bound_) transports_[place.first]->disconnect(place.second);
  bound_.clear();
  of_session_.clear();
  places_.clear();
}

// ---- driving --------------------------------------------------------------------------------------

bool RailTable::poll(Time now, Engine& engine, bool all) {
  bool more = false, has_moved = false;
  for (std::size_t n = 0; n < transports_.size(); ++n) {
    const std::size_t i = (first_ + n) % transports_.size();
    if (!transports_[i]->wants_poll()) continue;
    if (has_moved && !all && monotonic_now() - now > kPollNs) {
      first_ = i;
      return true;
    }
    const std::size_t count = transports_[i]->poll(completions_);
    for (std::size_t k = 0; k < count; ++k) pass_on(i, completions_[k], now, engine);
    more = more || count != 0;
    has_moved = true;
  }
  return more;
}

bool RailTable::busy() const {
  for (const auto& transport : transports_)
    if (transport->busy()) return true;
  return false;
}

bool RailTable::arm() {
  bool armed = true;
  for (const auto& transport : transports_) armed = transport->arm() && armed;
  return armed;
}

void RailTable::pass_on(std::size_t transport, const Completion& completion, Time now, Engine& engine) {
  if (completion.kind == CompletionKind::kWork) {
    if (!ranges_.empty()) ranges_.erase(completion.work);
    engine.on_completion(now, completion);
    return;
  }
  const Place place{transport, completion.peer};
  auto found = bound_.find(place);
  if (found == bound_.end()) return;
  Bound& rail = found->second;
  const SessionKey session = rail.session;
  try {
    if (completion.kind == CompletionKind::kRailUp) {
      places_[next_rail_] = place;
      rail.id = next_rail_++;
      Capabilities capabilities = transports_[transport]->capabilities();
      capabilities.rank = rank_of(*kind_of_[transport]);
      engine.rail_up(now, session, {rail.id, rail.name, capabilities, rail.peer_instance});
      return;
    }
    const std::string why =
        rail.id != 0 ? completion.detail : std::string(kind_of_[transport]->name) + ": " + completion.detail;
    const RailId id = rail.id;
    const wire::RailName name = rail.name;
    unbind(place);
    if (id != 0)
      engine.rail_down(now, id, why);
    else
      engine.rail_failed(now, session, name, why, kind_of_[transport]->name);
  } catch (const std::bad_alloc&) {
    engine.starve(now, session);
  }
}

// ---- as EngineHost's ------------------------------------------------------------------------------

Code RailTable::post(RailId rail, const Work& work) {
  const Place* const place = find(rail);
  if (place == nullptr) return Code::kRailFailed;
  Transport& transport = *transports_[place->first];
  if (nvtx::tool() == nullptr) return transport.post(place->second, work);
  ranges_.insert_or_assign(work.id,
                           nvtx::Range(stage_of(work.kind), transport.capabilities().name, work.piece));
  const Code posted = transport.post(place->second, work);
  if (posted != Code::kOk) ranges_.erase(work.id);
  return posted;
}

WorkKind RailTable::choose(RailId rail, const Move& move, std::uint32_t piece) const {
  const Place* const place = find(rail);
  return place == nullptr ? WorkKind::kFetch  // post does not accept it
                          : transports_[place->first]->choose(place->second, move, piece);
}

void RailTable::cancel(RailId rail, std::span<const WorkId> works) {
  // A rail that is gone has cancelled its works already. The stage lasts until its work has completed.
  if (nvtx::tool() != nullptr)
    for (const WorkId work : works) ranges_.insert_or_assign(work, nvtx::Range("fence", work));
  if (const Place* const place = find(rail)) transports_[place->first]->cancel(works);
}

Status RailTable::attach(RailId rail, const RemoteRegion& region) {
  const Place* const place = find(rail);
  if (place == nullptr) return {Code::kRailFailed, "the rail is down"};
  return transports_[place->first]->attach(place->second, region);
}

void RailTable::detach(RailId rail, RegionId region) {
  if (const Place* const place = find(rail)) transports_[place->first]->detach(place->second, region);
}

void RailTable::drop_rail(RailId rail) {
  if (const Place* const place = find(rail)) unbind(*place);
}

void RailTable::region_fenced(RegionId region) {
  for (auto& transport : transports_) transport->deregister_memory(region);
}

// ---- memory that peers map ------------------------------------------------------------------------

bool RailTable::held_by_peers(RegionId region) const {
  return std::any_of(transports_.begin(), transports_.end(), [&](const auto& transport) {
    MemoryLender* const lender = transport->lender();
    return lender != nullptr && lender->held_by_peers(region);
  });
}

std::vector<std::string> RailTable::give_up_holders(RegionId region) {
  std::vector<std::string> names;
  for (auto& transport : transports_)
    if (MemoryLender* const lender = transport->lender())
      for (std::string& name : lender->give_up_holders(region)) names.push_back(std::move(name));
  return names;
}

std::vector<std::string> RailTable::paths(SessionKey session) const {
  std::vector<std::string> all;
  const auto found = of_session_.find(session);
  if (found == of_session_.end()) return all;
  for (const Place& place : found->second) {
    const auto& [transport, peer] = place;
    if (bound_.at(place).id == 0) continue;
    if (const std::string path = transports_[transport]->path_to(peer); !path.empty())
      all.push_back(std::string(kind_of_[transport]->name) + ": " + path);
  }
  return all;
}

std::string RailTable::path(RailId rail) const {
  const Place* const place = find(rail);
  return place == nullptr ? std::string() : transports_[place->first]->path_to(place->second);
}

std::vector<std::shared_ptr<Transport>> RailTable::take_transports() {
  std::vector<std::shared_ptr<Transport>> taken = std::move(transports_);
  transports_.clear();
  return taken;
}

}  // namespace kvxfer
