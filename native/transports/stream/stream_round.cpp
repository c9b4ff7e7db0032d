#include "transports/stream/stream_round.h"

#include "core/in_room.h"
#include "transports/stream/stream_transport.h"

namespace kvxfer {

void StreamRound::add(StreamTransport& rail) {
  moved_.reserve(rails_.size() + 1);
  tasks_.reserve(rails_.size() + 1);
  rails_.push_back(&rail);
}

void StreamRound::remove(StreamTransport& rail) noexcept { std::erase(rails_, &rail); }

void StreamRound::move(const StreamTransport& polled) noexcept {
  if (!polled.is_worth_a_thread(least_nbytes_)) return;
  moved_.clear();
  tasks_.clear();
  for (StreamTransport* const rail : rails_) {
    if (!rail->is_worth_a_thread(least_nbytes_)) continue;
    add_in_room(moved_, rail);
    add_in_room(tasks_, rail);
  }
  if (moved_.size() < 2) return;
  workers_->run_all(tasks_);
  for (StreamTransport* const rail : moved_) rail->end_turn_in_round();
}

}  // namespace kvxfer
