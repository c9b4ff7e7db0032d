#include "core/mailbox.h"

#include <utility>

namespace kvxfer {

std::optional<Mail> Mailbox::take(bool keeps_charge) {
  if (mail_.empty()) return std::nullopt;
  std::optional<Mail> taken(std::move(mail_.front()));
  mail_.pop_front();
  if (!keeps_charge) taken->charge.release();
  return taken;
}

std::size_t Mailbox::session_ended(SessionKey peer) {
  std::size_t num_left = 0, nbytes_left = 0;
  for (Mail& each : mail_) {
    each.was_lost = each.was_lost || each.peer == peer;
    if (!each.was_lost) continue;
    ++num_left;
    nbytes_left += each.payload.size();
  }
  if (num_left <= kMaxLeft && nbytes_left <= kMaxLeftNbytes) return 0;
  return std::erase_if(mail_, [&](const Mail& each) {
    if (!each.was_lost || (num_left <= kMaxLeft && nbytes_left <= kMaxLeftNbytes)) return false;
    --num_left;
    nbytes_left -= each.payload.size();
    return true;
  });
}

}  // namespace kvxfer
