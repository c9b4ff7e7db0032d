// When to dial again the rails that were lost, or did not come up, while their session goes on. Only in
// sessions that this end opened; in others the peer dials.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "core/engine/context.h"
#include "core/engine/rails.h"

namespace kvxfer {

class Redials {
 public:
  // The first wait. Each further wait doubles, up to the longest. A rail that had been up for as long as
  // the longest wait begins anew.
  static constexpr Time kFirstWait = 100'000'000, kLongestWait = 30'000'000'000;

  Redials(Context& context, Rails& rails) : context_(context), rails_(rails) {}

  void up(const Rail& rail);
  // The rail was lost or did not come up. Returns the time until it is dialled again: a little more than
  // its wait, so that rails that were lost together are not dialled together.
  Time again(SessionKey session, const wire::RailName& rail);
  void dial(SessionKey session, std::uint16_t index);  // on its timer
  // The rail was lost or did not come up, and stays down until all held rails are dialled.
  void hold(SessionKey session, const wire::RailName& rail);
  void dial_held();
  void remove_session(SessionKey session);
  std::size_t num_waiting() const noexcept;

 private:
  struct Place {  // of a session's rail
    std::uint32_t attempt = 0;
    Time wait = 0;
    std::optional<Time> up_at;
    bool is_held = false;
    Timers::Timer timer;
  };
  using Key = std::pair<SessionKey, std::uint16_t>;  // and its index

  Context& context_;
  Rails& rails_;
  std::map<Key, Place> places_;
};

}  // namespace kvxfer
