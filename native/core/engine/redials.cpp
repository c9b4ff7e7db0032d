#include "core/engine/redials.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace kvxfer {

void Redials::up(const Rail& rail) { places_[{rail.session(), rail.info().name.index}].up_at = context_.now; }

Time Redials::again(SessionKey session, const wire::RailName& rail) {
  Place& place = places_[{session, rail.index}];
  const bool held = place.up_at && context_.now - *place.up_at >= kLongestWait;
  place.wait = place.wait == 0 || held ? kFirstWait : std::min(2 * place.wait, kLongestWait);
  place.up_at.reset();
  place.attempt = rail.attempt + 1;
  std::array<std::byte, sizeof(std::uint64_t)> bytes;
  context_.host.random(bytes);
  std::uint64_t drawn;
  std::memcpy(&drawn, bytes.data(), sizeof drawn);
  const Time after = place.wait + static_cast<Time>(drawn % static_cast<std::uint64_t>(place.wait / 4));
  context_.timers.set(place.timer, time_after(context_.now, after), TimerKind::kRedial, session, rail.index);
  return after;
}

void Redials::dial(SessionKey session, std::uint16_t index) {
  Place& place = places_.at({session, index});
  place.timer.reset();
  rails_.expect(session, {index, place.attempt});
  context_.host.dial_rail(session, {index, place.attempt});
}

void Redials::hold(SessionKey session, const wire::RailName& rail) {
  Place& place = places_[{session, rail.index}];
  context_.timers.clear(place.timer);
  place = {};
  place.attempt = rail.attempt + 1;
  place.is_held = true;
}

void Redials::dial_held() {
  for (auto& [key, place] : places_)
    if (std::exchange(place.is_held, false)) dial(key.first, key.second);
}

void Redials::remove_session(SessionKey session) {
  const auto first = places_.lower_bound({session, 0}), last = places_.upper_bound({session, wire::kNoRail});
  for (auto it = first; it != last; ++it) context_.timers.clear(it->second.timer);
  places_.erase(first, last);
}

std::size_t Redials::num_waiting() const noexcept {
  return static_cast<std::size_t>(std::count_if(
      places_.begin(), places_.end(), [](const auto& place) { return place.second.timer.has_value(); }));
}

}  // namespace kvxfer
