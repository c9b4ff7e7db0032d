// Mail from peers' callers to ours, until a caller reads it. One box holds one kind: notifications or
// messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "core/event.h"

namespace kvxfer {

enum class MailKind : std::uint8_t { kNotification, kMessage };
inline constexpr std::size_t kNumMailKinds = 2;

struct Mail {
  SessionKey peer = 0;
  wire::Bytes payload;
  Charge charge = {};  // to the peer's budget, until the mail is taken
  bool tells = false;  // see Event::tells
  bool was_lost = false;  // its peer's session has ended
  wire::Bytes context = {};  // of a notification: whose request it concerns
  // Mail may be read when the agent has long forgotten the session.
  std::shared_ptr<const Sender> sender = {};
};

// Oldest first. The budget of an open session bounds its mail here. Of the mail of ended sessions, the
// oldest beyond the limits is dropped. The box's owner locks it.
class Mailbox {
 public:
  // As many as the notifications that one open session may have waiting (budgets.h), at their full length.
  static constexpr std::size_t kMaxLeft = 1 << 14;
  static constexpr std::size_t kMaxLeftNbytes = kMaxLeft * wire::kMaxNotify;

  bool empty() const noexcept { return mail_.empty(); }
  void add(Mail mail) { mail_.push_back(std::move(mail)); }
  // `keeps_charge`: the charge lasts as long as the mail; else it ends here.
  std::optional<Mail> take(bool keeps_charge);
  // Returns how many were dropped.
  std::size_t session_ended(SessionKey peer);

 private:
  std::deque<Mail> mail_;
};

}  // namespace kvxfer
