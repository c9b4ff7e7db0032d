#include "core/tls/kernel_channel.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>

#include "kvxfer/transport.h"

namespace kvxfer::tls {
namespace {

// From linux/tls.h, which is too old on the machines that build wheels.
namespace uapi {
constexpr int kSolTls = 282, kUpperProtocol = 31;  // SOL_TLS; TCP_ULP
constexpr int kSends = 1, kReceives = 2;  // TLS_TX, TLS_RX
constexpr int kRecordType = 1, kRecordTypeFound = 2;  // TLS_SET_RECORD_TYPE, TLS_GET_RECORD_TYPE

struct Aes128Gcm {  // tls12_crypto_info_aes_gcm_128
  std::uint16_t version = 0x0304, cipher = 51;
  std::array<std::byte, 8> iv{};
  std::array<std::byte, 16> key{};
  std::array<std::byte, 4> salt{};
  std::array<std::byte, 8> next{};  // record; the highest byte first
};
static_assert(sizeof(Aes128Gcm) == 40);
}  // namespace uapi

constexpr std::size_t kSendNbytes = 256 * 1024;  // of one call

// In one call the kernel opens as many records as fill it; if a peer's records have one byte each, other
// peers wait.
constexpr std::size_t kSliceNbytes = kMostPlainNbytes;
constexpr std::chrono::microseconds kMostOfACall{1000};

constexpr std::size_t kMostKeysOfACall = 64;

constexpr std::size_t kAlertNbytes = 2;

bool attach(int socket) noexcept {
  return ::setsockopt(socket, IPPROTO_TCP, uapi::kUpperProtocol, "tls", sizeof "tls") == 0;
}

bool give_keys(int socket, int direction, const TrafficKeys::Material& keys, std::uint64_t next) noexcept {
  uapi::Aes128Gcm said;
  said.key = keys.key;
  std::ranges::copy_n(keys.base.begin(), said.salt.size(), said.salt.begin());
  std::ranges::copy_n(keys.base.begin() + said.salt.size(), said.iv.size(), said.iv.begin());
  for (std::size_t i = 0; i < said.next.size(); ++i) said.next[7 - i] = static_cast<std::byte>(next >> 8 * i);
  const bool is_given = ::setsockopt(socket, uapi::kSolTls, direction, &said, sizeof said) == 0;
  const int error = errno;
  ::explicit_bzero(&said, sizeof said);
  errno = error;
  return is_given;
}

ssize_t send_word(int socket, RecordKind kind, std::span<const std::byte> word) noexcept {
  iovec run{const_cast<std::byte*>(word.data()), word.size()};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(1)> control{};
  msghdr message{};
  message.msg_iov = &run;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const said = CMSG_FIRSTHDR(&message);
  said->cmsg_level = uapi::kSolTls;
  said->cmsg_type = uapi::kRecordType;
  said->cmsg_len = CMSG_LEN(1);
  std::memcpy(CMSG_DATA(said), &kind, 1);
  ssize_t sent;
  do {
    sent = ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent;
}

KernelTls probe() {
  const auto nothing = [](const char* what) {
    return KernelTls{KernelTls::Offer::kNothing,
                     std::string(what) + ": " + std::generic_category().message(errno)};
  };
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const UniqueFd writer(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof place;
  auto* const address = reinterpret_cast<sockaddr*>(&place);
  if (!listener || !writer || ::bind(listener.get(), address, length) != 0 ||
      ::listen(listener.get(), 1) != 0 || ::getsockname(listener.get(), address, &length) != 0 ||
      ::connect(writer.get(), address, length) != 0)
    return nothing("it cannot be tested without TCP on this host");
  const UniqueFd reader(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!reader) return nothing("it cannot be tested without TCP on this host");
  if (!attach(writer.get()) || !attach(reader.get()))
    return nothing("the kernel has no module tls, or it is not loaded (modprobe tls)");
  const TrafficKeys::Material keys{};
  if (!give_keys(reader.get(), uapi::kReceives, keys, 0) || !give_keys(writer.get(), uapi::kSends, keys, 0))
    return nothing("the kernel does not support AES-128-GCM of TLS 1.3");
  const timeval second{.tv_sec = 1, .tv_usec = 0};
  ::setsockopt(reader.get(), SOL_SOCKET, SO_RCVTIMEO, &second, sizeof second);
  const char out = 'k';
  char in = 0;
  if (::send(writer.get(), &out, 1, MSG_NOSIGNAL) != 1 || ::recv(reader.get(), &in, 1, 0) != 1 || in != out)
    return nothing("the kernel does not return the bytes that it encrypted");
  const bool renews = give_keys(writer.get(), uapi::kSends, keys, 0);
  return {renews ? KernelTls::Offer::kNewKeys : KernelTls::Offer::kOneKey, ""};
}

}  // namespace

const KernelTls& KernelTls::get() {
  static const KernelTls& tried = *new KernelTls(probe());  // for threads that outlive static objects
  return tried;
}

std::unique_ptr<KernelChannel> KernelChannel::create(int socket, const TrafficKeys& sends,
                                                     std::uint64_t num_sent, const TrafficKeys& receives,
                                                     std::uint64_t num_received) {
  std::unique_ptr<KernelChannel> out(new KernelChannel(socket, sends, receives, num_sent));
  // A socket with the protocol but without keys behaves like any other.
  if (!attach(socket) || !give_keys(socket, uapi::kReceives, receives.material(), num_received))
    return nullptr;
  if (!give_keys(socket, uapi::kSends, sends.material(), num_sent)) out->is_broken_ = true;
  return out;
}

KernelChannel::KernelChannel(int socket, const TrafficKeys& sends, const TrafficKeys& receives,
                             std::uint64_t num_sent)
    : socket_(socket), sends_(sends), receives_(receives), num_sent_(num_sent) {
  runs_.reserve(Runs::kMost);
}

ssize_t KernelChannel::fail(const char* why) noexcept {
  why_ = why;
  errno = EPROTO;
  return -1;
}

// ---- out ----------------------------------------------------------------------------------------

bool KernelChannel::renew_key() noexcept {
  if (send_word(socket_, RecordKind::kHandshake, kKeyUpdate) < 0) return false;
  if (sends_.advance() && give_keys(socket_, uapi::kSends, sends_.material(), 0)) {
    num_sent_ = 0;
    return true;
  }
  fail("TLS: this kernel cannot renew keys (before Linux 6.14), so the connection ends with its first ones");
  return false;
}

ssize_t KernelChannel::send(std::span<const iovec> bytes) noexcept {
  if (is_broken_) return fail("TLS: the kernel accepted the keys of one direction only");
  Runs from{bytes};
  std::size_t total = 0;
  while (!from.empty()) {
    ssize_t sent = -1;
    std::size_t nbytes = 0;
    const Runs before = from;
    if (num_sent_ < records_of_a_key_ || renew_key()) {
      runs_.clear();
      nbytes = from.take(kSendNbytes, runs_);
      msghdr message{};
      message.msg_iov = runs_.data();
      message.msg_iovlen = runs_.size();
      do {
        sent = ::sendmsg(socket_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      } while (sent < 0 && errno == EINTR);
    }
    if (sent < 0) return total != 0 && would_block() ? static_cast<ssize_t>(total) : -1;
    const auto count = static_cast<std::size_t>(sent);
    num_sent_ += count / kMostPlainNbytes + 1;
    total += count;
    if (count < nbytes) {
      from = before;
      from.skip(count);
    }
  }
  return static_cast<ssize_t>(total);
}

// ---- in -----------------------------------------------------------------------------------------

ssize_t KernelChannel::obey(RecordKind kind, std::size_t nbytes) noexcept {
  // Copies it out of the caller's room, if it landed there: the next bytes are written over it.
  for (std::size_t i = 0; i < runs_.size() && nbytes != 0; ++i) {
    const std::size_t length = std::min(nbytes, runs_[i].iov_len);
    if (length > said_.size() - num_said_) return fail("TLS: the peer sent an unexpected record");
    std::memcpy(said_.data() + num_said_, runs_[i].iov_base, length);
    num_said_ += length;
    nbytes -= length;
  }
  if (kind == RecordKind::kHandshake) {
    if (num_said_ < kKeyUpdate.size()) return 1;
    num_said_ = 0;
    if (said_ != kKeyUpdate) return fail("TLS: the peer sent an unexpected record");
    if (!receives_.advance() || !give_keys(socket_, uapi::kReceives, receives_.material(), 0))
      return fail("TLS: the peer renewed its keys, which this kernel does not support (before Linux 6.14)");
    return 1;
  }
  if (kind == RecordKind::kAlert && num_said_ < kAlertNbytes) return 1;
  if (kind == RecordKind::kAlert && num_said_ == kAlertNbytes && said_[1] == kCloseNotify) return 0;
  return fail("TLS: the peer ended the connection, or sent an unexpected record");
}

ssize_t KernelChannel::receive(std::span<const iovec> runs) noexcept {
  if (is_broken_) return fail("TLS: the kernel accepted the keys of one direction only");
  Runs into{runs};
  std::size_t total = 0, num_words = 0;
  has_unread_ = false;
  const auto until = std::chrono::steady_clock::now() + kMostOfACall;
  while (!into.empty()) {
    runs_.clear();
    Runs ahead = into;
    ahead.take(kSliceNbytes, runs_);
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(1)> control{};
    msghdr message{};
    message.msg_iov = runs_.data();
    message.msg_iovlen = runs_.size();
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t got = ::recvmsg(socket_, &message, MSG_DONTWAIT);
    if (got < 0) {
      if (errno == EINTR) continue;
      if (would_block()) return total != 0 ? static_cast<ssize_t>(total) : -1;
      if (errno == EBADMSG) return fail("TLS: a record is not what the peer sent (bad record mac)");
      if (errno == EMSGSIZE || errno == EINVAL)
        return fail("TLS: what the peer sent is not a record of pages");
      return -1;
    }
    auto kind = RecordKind::kData;
    const cmsghdr* const said = CMSG_FIRSTHDR(&message);
    if (said != nullptr && said->cmsg_level == uapi::kSolTls && said->cmsg_type == uapi::kRecordTypeFound)
      std::memcpy(&kind, CMSG_DATA(said), 1);
    if (kind != RecordKind::kData) {
      if (++num_words > kMostKeysOfACall) return fail("TLS: the peer renews its keys too often");
      const ssize_t obeyed = obey(kind, static_cast<std::size_t>(got));
      if (obeyed <= 0) return obeyed == 0 ? static_cast<ssize_t>(total) : -1;
      continue;
    }
    if (got == 0) return static_cast<ssize_t>(total);
    into.skip(static_cast<std::size_t>(got));
    total += static_cast<std::size_t>(got);
    has_unread_ = !into.empty() && std::chrono::steady_clock::now() > until;
    if (has_unread_) break;
  }
  return static_cast<ssize_t>(total);
}

}  // namespace kvxfer::tls
