// State machines as tables: listed transitions happen, and no others.
#pragma once

#include <span>

namespace kvxfer {

template <class State, class Event>
struct Transition {
  State from;
  Event event;
  State to;
};

// Null if the table has no such transition.
template <class State, class Event>
const Transition<State, Event>* find_transition(std::span<const Transition<State, Event>> table, State from,
                                                Event event) noexcept {
  for (const Transition<State, Event>& transition : table)
    if (transition.from == from && transition.event == event) return &transition;
  return nullptr;
}

// Takes the table's transition. False, and nothing changes, if there is none: the event came too late (a
// DONE after the caller gave up) or does not belong there.
template <class State, class Event>
bool step(std::span<const Transition<State, Event>> table, State& state, Event event) noexcept {
  const Transition<State, Event>* const found = find_transition(table, state, event);
  if (found != nullptr) state = found->to;
  return found != nullptr;
}

}  // namespace kvxfer
