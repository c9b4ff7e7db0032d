// What peers' callers sent to ours, until somebody reads it: one kind of it, notifications or messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "core/event.h"

namespace kvxfer {

enum class MailKind : std::uint8_t { kNotification, kMessage };
inline constexpr std::size_t kNumMailKinds = 2;

struct Mail {
  SessionKey peer = 0;
  wire::Bytes payload;
  Charge charge = {};  // of the peer's budget, until it is taken
  bool tells = false;  // as an Event's
  bool was_lost = false;  // its peer
  wire::Bytes context = {};  // of a notification: whose request it is of
};

// Oldest first. An open session's budget bounds what it has here; of what sessions left that have ended, the oldest
// beyond the limits is dropped. Guarded by whoever has it.
class Mailbox {
 public:
  // As many notifications as one open session may have wait (budgets.h), of their full length.
  static constexpr std::size_t kMaxLeft = 1 << 14;
  static constexpr std::size_t kMaxLeftNbytes = kMaxLeft * wire::kMaxNotify;

  bool empty() const noexcept { return mail_.empty(); }
  void add(Mail mail) { mail_.push_back(std::move(mail)); }
  // `keeps_charge`: until the mail goes, else no longer.
  std::optional<Mail> take(bool keeps_charge);
  // How much was dropped.
  std::size_t session_ended(SessionKey peer);

 private:
  std::deque<Mail> mail_;
};

}  // namespace kvxfer
