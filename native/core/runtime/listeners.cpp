#include "core/runtime/listeners.h"

#include <fcntl.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "core/control/socket_address.h"
#include "core/runtime/clock.h"
#include "core/system/fork_guard.h"
#include "core/system/random.h"

namespace kvxfer {
namespace {

// Callers that are accepted before other work has its turn: each costs 20 us or so.
constexpr int kAcceptsInTurn = 16;

// While no descriptor is left, a listener looks again after this time, which doubles each time. Descriptors
// that sessions give back end the rest at once.
constexpr Time kFirstPause = 10'000'000, kLongestPause = 1'000'000'000;

bool is_shortage(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte b : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[static_cast<unsigned>(b) >> 4];
    text += kDigits[static_cast<unsigned>(b) & 15];
  }
  return text;
}

}  // namespace

Status Listeners::open(const std::string& where, bool has_secret) {
  const Result<std::vector<TcpAddress>> resolved = TcpAddress::resolve(where);
  if (!resolved.ok()) return resolved.status();
  const TcpAddress& first = resolved.value().front();
  if (!first.loopback && !has_secret)
    return {Code::kInvalidArgument,
            "listening on " + where +
                " needs a secret: without one, anyone who can reach it could read and write the cache"};
  Result<UniqueFd> listening = listen_tcp(first);
  if (!listening.ok()) return listening.status();
  Result<std::string> address = listening_address(listening.value().get());
  if (!address.ok()) return address.status();
  address_ = address.value();
  unix_name_ = name_beside(address_);
  Result<UniqueFd> local = listen_unix(unix_name_);
  if (!local.ok()) {  // another process has that name
    std::array<std::byte, 16> drawn;
    if (Status status = fill_random(drawn); !status.ok()) return status;
    unix_name_ = "kvxfer-" + hex(drawn);
    local = listen_unix(unix_name_);
  }
  if (!local.ok()) return local.status();
  reserve_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (Status status = add(tcp_, std::move(listening).value()); !status.ok()) return status;
  return add(unix_, std::move(local).value());
}

Status Listeners::add(Listener& listener, UniqueFd fd) {
  listener.all = this;
  listener.fd = std::move(fd);
  guard_fd(listener.fd.get());
  return reactor_.add(listener.fd.get(), EPOLLIN, listener);
}

void Listeners::close() noexcept {
  due_at_ = kNever;
  for (Listener* listener : {&tcp_, &unix_})
    if (listener->fd) {
      listener->paused_until = kNever;
      reactor_.remove(listener->fd.get());
      // If a number stayed guarded, a forked child would close it, even when another file has it by
      // then.
      unguard_fd(listener->fd.get());
      listener->fd.reset();
    }
}

void Listeners::accept(Listener& listener) {
  for (int i = 0; i < kAcceptsInTurn; ++i) {
    int error = 0;
    UniqueFd fd = accept_from(listener.fd.get(), error);
    if (fd) {
      listener.pause_ns = 0;
      is_short_ = false;
      try {
        host_.take_in(std::move(fd));
      } catch (const std::bad_alloc&) {  // memory is lacking for it: it is closed
      }
    } else if (error == 0) {
      return;
    } else if (is_shortage(error) && !host_.close_oldest_stranger()) {
      return pause(listener, error);
    }
  }
}

void Listeners::pause(Listener& listener, int error) {
  // Turns away at once the caller that has waited longest, and not only when its time is over.
  reserve_.reset();
  int ignored = 0;
  accept_from(listener.fd.get(), ignored).reset();
  reserve_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  reactor_.remove(listener.fd.get());
  listener.pause_ns = std::clamp(2 * listener.pause_ns, kFirstPause, kLongestPause);
  listener.paused_until = monotonic_now() + listener.pause_ns;
  due_at_ = std::min(due_at_, listener.paused_until);
  if (!std::exchange(is_short_, true))
    host_.log("no connection can be accepted: " + words_of(error) +
              ". Open sessions continue, and listening resumes when the shortage is over");
}

void Listeners::wake(Time now) {
  if (now < due_at_) return;
  due_at_ = kNever;
  for (Listener* listener : {&tcp_, &unix_}) {
    if (now >= listener->paused_until && reactor_.add(listener->fd.get(), EPOLLIN, *listener).ok())
      listener->paused_until = kNever;
    else if (listener->paused_until != kNever)
      listener->paused_until = std::max(listener->paused_until, now + listener->pause_ns);
    due_at_ = std::min(due_at_, listener->paused_until);
  }
}

}  // namespace kvxfer
