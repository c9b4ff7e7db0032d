#include "transports/stream/stream_round.h"

#include "core/in_room.h"
#include "transports/stream/stream_transport.h"

namespace kvxfer {

void StreamRound::add(StreamTransport& rail) {
  moved_.reserve(rails_.size() + 1);
  errands_.reserve(rails_.size() + 1);
  rails_.push_back(&rail);
}

void StreamRound::remove(StreamTransport& rail) noexcept { std::erase(rails_, &rail); }

void StreamRound::move(const StreamTransport& polled) noexcept {
  if (!polled.is_worth_a_thread(least_nbytes_)) return;
  moved_.clear();
  errands_.clear();
  for (StreamTransport* const rail : rails_) {
    if (!rail->is_worth_a_thread(least_nbytes_)) continue;
    add_in_room(moved_, rail);
    add_in_room(errands_, rail);
  }
  if (moved_.size() < 2) return;
  workers_->run_all(errands_);
  for (StreamTransport* const rail : moved_) rail->end_turn_in_round();
}

}  // namespace kvxfer
