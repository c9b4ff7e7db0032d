#include "core/engine/peer_limits.h"

#include <algorithm>
#include <utility>

namespace kvxfer {
namespace {

// If the bucket would have enough sooner than this, several pieces go at once instead: a wake-up costs more
// than a small piece.
constexpr Time kLeastRest = 1'000'000;

}  // namespace

Result<std::vector<SessionKey>> PeerLimits::set(const std::string& name, const PeerLimit& limit) {
  if (limit != PeerLimit() && !names_.contains(name) && names_.size() == kMostNames)
    return Status(Code::kExhausted, "limits are set for " + std::to_string(kMostNames) +
                                        " names of peers, the most that are possible: remove some limits");
  const std::vector<SessionKey> sessions = sessions_.named(name);
  if (limit != PeerLimit()) {
    const bool is_new = !names_.contains(name);
    OfName& of_name = names_[name];
    try {  // what takes memory comes first
      if (limit.max_bytes_per_s != 0)
        for (const SessionKey session : sessions)
          paced_.try_emplace(session).first->second.of_name = &of_name;
    } catch (...) {
      if (of_name.limit.max_bytes_per_s == 0)
        for (const SessionKey session : sessions) remove_session(session);
      if (is_new) names_.erase(name);
      throw;
    }
    of_name.limit = limit;
    of_name.pace.set(context_.now, limit.max_bytes_per_s);
  }
  for (const SessionKey session : sessions) {
    if (limit.max_bytes_per_s == 0)
      remove_session(session);
    else
      context_.timers.clear(paced_.at(session).timer);
  }
  if (limit == PeerLimit()) names_.erase(name);
  return sessions;
}

PeerLimit PeerLimits::of(const std::string& name) const {
  const auto found = names_.find(name);
  return found == names_.end() ? PeerLimit() : found->second.limit;
}

std::vector<std::pair<std::string, PeerLimit>> PeerLimits::all() const {
  std::vector<std::pair<std::string, PeerLimit>> all;
  for (const auto& [name, of_name] : names_) all.emplace_back(name, of_name.limit);
  return all;
}

void PeerLimits::has_opened(const Peer& peer) {
  if (const auto found = names_.find(peer.name());
      found != names_.end() && found->second.limit.max_bytes_per_s != 0)
    paced_.emplace(peer.key(), Paced{&found->second, {}});
}

void PeerLimits::remove_session(SessionKey session) {
  const auto found = paced_.find(session);
  if (found == paced_.end()) return;
  context_.timers.clear(found->second.timer);
  paced_.erase(found);
}

bool PeerLimits::may_post(SessionKey session) {
  const auto found = paced_.find(session);
  if (found == paced_.end()) return true;
  Paced& paced = found->second;
  const Pace& pace = paced.of_name->pace;
  if (pace.is_free(context_.now)) return true;
  if (!paced.timer)
    context_.timers.set(paced.timer, std::max(pace.free_at(), time_after(context_.now, kLeastRest)),
                        TimerKind::kPace, session);
  return false;
}

void PeerLimits::took(SessionKey session, std::uint64_t nbytes) {
  if (const auto found = paced_.find(session); found != paced_.end())
    found->second.of_name->pace.spend(context_.now, nbytes);
}

void PeerLimits::on_timer(SessionKey session) {
  if (const auto found = paced_.find(session); found != paced_.end()) found->second.timer.reset();
}

std::string PeerLimits::in_words(SessionKey session) const {
  const auto found = paced_.find(session);
  if (found == paced_.end()) return "";
  return ", at no more than " + std::to_string(found->second.of_name->limit.max_bytes_per_s) +
         " bytes per second, this agent's limit for " + quoted(sessions_.find(session)->name());
}

}  // namespace kvxfer
