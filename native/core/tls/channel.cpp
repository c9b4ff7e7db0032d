#include "core/tls/channel.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "core/tls/kernel_channel.h"
#include "core/tls/page_channel.h"

namespace kvxfer::tls {
namespace {

// How much ciphertext is gathered for one system call; it is still in the cache when the kernel copies it.
constexpr std::size_t kBatchNbytes = 256 * 1024;

// How much a peer may make this end owe without reading it: answers to its key updates.
constexpr std::size_t kMostUnsentNbytes = 1024 * 1024;

constexpr std::size_t kKeyNbytes = 32;

constexpr std::size_t kMostRecordsOfACall = 64;

const char* why_refused(int alert) noexcept {
  if (alert == 40 || alert == 49) return "it allows none of the names in the certificate";
  if (alert == 45) return "for the peer it is out of date, so one of the two clocks may be wrong";
  return "it does not trust the certificate";
}

constexpr const char* kClosedInHandshake =
    "it closed the connection in the TLS handshake: does it have certificates, too?";

// Is the alert (RFC 8446, 6.2) about our certificate? These are the alerts from handshake_failure, which a
// peer sends that does not allow our certificate, to certificate_required.
bool is_about_certificates(int alert) noexcept {
  return alert == 40 || (alert >= 42 && alert <= 46) || alert == 48 || alert == 49 || alert == 116;
}

}  // namespace

std::unique_ptr<Channel> Channel::create(std::shared_ptr<const Credentials> credentials, bool initiator) {
  std::unique_ptr<Channel> out(new Channel(std::move(credentials), initiator));
  const Library& library = out->library_;
  library.ERR_clear_error();
  const abi::BioMethod* const kind = method(library);
  out->connection_ = library.SSL_new(out->credentials_->context());
  if (kind == nullptr || out->connection_ == nullptr) return nullptr;
  abi::Bio* const bio = library.BIO_new(kind);
  if (bio == nullptr) return nullptr;
  library.BIO_set_data(bio, out.get());
  library.BIO_set_init(bio, 1);
  library.SSL_set_bio(out->connection_, bio, bio);  // the connection owns it from now on
  library.SSL_set_ex_data(out->connection_, 0, &out->handshake_);
  if (initiator)
    library.SSL_set_connect_state(out->connection_);
  else
    library.SSL_set_accept_state(out->connection_);
  return out;
}

Channel::Channel(std::shared_ptr<const Credentials> credentials, bool initiator)
    : credentials_(std::move(credentials)), library_(credentials_->library()), initiator_(initiator) {}

Channel::~Channel() {
  if (connection_ != nullptr) library_.SSL_free(connection_);
  for (auto* const secret : {&handshake_.client, &handshake_.server})
    if (*secret) library_.OPENSSL_cleanse((*secret)->data(), (*secret)->size());
}

// ---- what OpenSSL reads and writes ---------------------------------------------------------------

const abi::BioMethod* Channel::method(const Library& library) {
  static const abi::BioMethod* const made = [&]() -> const abi::BioMethod* {
    abi::BioMethod* const out = library.BIO_meth_new(abi::kBioSource, "kvxfer socket");
    if (out == nullptr) return nullptr;
    library.BIO_meth_set_read(out, &Channel::read_socket);
    library.BIO_meth_set_write(out, &Channel::write_later);
    library.BIO_meth_set_ctrl(out, &Channel::control);
    return out;
  }();
  return made;
}

int Channel::read_socket(abi::Bio* bio, char* into, int nbytes) {
  // Any channel will do: all use the one library of the process.
  const Library& library = *Library::load().value();
  auto& self = *static_cast<Channel*>(library.BIO_get_data(bio));
  library.BIO_clear_flags(bio, abi::kBioRetryAny);
  ssize_t got;
  do {
    got = ::recv(self.socket_, into, static_cast<std::size_t>(nbytes), MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  self.error_ = got < 0 ? errno : 0;
  if (got < 0 && (self.error_ == EAGAIN || self.error_ == EWOULDBLOCK))
    library.BIO_set_flags(bio, abi::kBioRetryRead);
  if (got == 0) self.has_ended_ = true;
  return static_cast<int>(got);
}

// Records are gathered, and one call sends several.
int Channel::write_later(abi::Bio* bio, const char* bytes, int nbytes) {
  auto& self = *static_cast<Channel*>(Library::load().value()->BIO_get_data(bio));
  try {
    if (self.sent_ == self.unsent_.size()) {
      self.unsent_.clear();
      self.sent_ = 0;
    }
    if (self.unsent_.size() - self.sent_ > kMostUnsentNbytes) {
      self.error_ = ENOBUFS;
      return -1;
    }
    const auto* const from = reinterpret_cast<const std::byte*>(bytes);
    self.unsent_.insert(self.unsent_.end(), from, from + nbytes);
    return nbytes;
  } catch (const std::bad_alloc&) {
    self.error_ = ENOMEM;
    return -1;
  }
}

long Channel::control(abi::Bio* bio, int command, long, void*) {
  const auto& self = *static_cast<const Channel*>(Library::load().value()->BIO_get_data(bio));
  if (command == abi::kBioEnd) return self.has_ended_;
  return command == abi::kBioFlush;
}

bool Channel::transmit() noexcept {
  while (sent_ < unsent_.size()) {
    const ssize_t sent =
        ::send(socket_, unsent_.data() + sent_, unsent_.size() - sent_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    sent_ += static_cast<std::size_t>(sent);
  }
  unsent_.clear();
  sent_ = 0;
  return true;
}

ssize_t Channel::fail(int result) noexcept {
  const int kind = library_.SSL_get_error(connection_, result);
  if (kind == abi::kErrorZeroReturn) return 0;
  if (kind == abi::kErrorWantRead || kind == abi::kErrorWantWrite) {
    errno = EAGAIN;
    return -1;
  }
  if (kind == abi::kErrorSyscall && error_ != 0) {
    errno = error_;
    return -1;
  }
  try {
    const auto reason = static_cast<int>(library_.ERR_peek_error() & 0x7f'ffff);
    const std::string words = last_error(library_);
    if (!handshake_.why.empty()) {
      was_refused_ = true;
      why_ = "its certificate is refused: " + handshake_.why;
    } else if (is_about_certificates(reason - abi::kFirstAlert)) {
      was_refused_ = true;
      why_ = "it refuses this agent's certificate (" + words +
             "): " + why_refused(reason - abi::kFirstAlert) + "; its log says why";
    } else if (!is_secure_ && has_ended_) {
      why_ = kClosedInHandshake;
    } else {
      why_ = "TLS: " + (words.empty() ? "the connection failed" : words);
      if (!is_secure_) why_ += "; does it have certificates, too?";
    }
  } catch (const std::bad_alloc&) {
    why_.clear();
  }
  errno = EPROTO;
  return -1;
}

// ---- the handshake ------------------------------------------------------------------------------

Channel::Step Channel::shake_hands() noexcept {
  library_.ERR_clear_error();
  const int result = library_.SSL_do_handshake(connection_);
  ssize_t outcome = 1;
  if (result != 1) {
    outcome = fail(result);
    if (outcome == 0) {
      try {
        why_ = kClosedInHandshake;
      } catch (const std::bad_alloc&) {  // its end is enough
      }
      errno = EPROTO;
    }
  }
  const int error = errno;
  // The alert that tells the peer of a failure goes out as well.
  if (!transmit() && errno != EAGAIN && errno != EWOULDBLOCK && result == 1) return Step::kFailed;
  if (result == 1) {
    try {
      if (abi::Certificate* const certificate = library_.SSL_get1_peer_certificate(connection_)) {
        identities_ = identities_of(library_, certificate);
        library_.X509_free(certificate);
      }
    } catch (const std::bad_alloc&) {}
    if (identities_.empty()) return Step::kFailed;
    is_secure_ = true;
    return Step::kDone;
  }
  errno = error;
  return outcome < 0 && (error == EAGAIN || error == EWOULDBLOCK) ? Step::kAgain : Step::kFailed;
}

std::string Channel::export_key(std::string_view label) const {
  std::string out(kKeyNbytes, '\0');
  if (library_.SSL_export_keying_material(connection_, reinterpret_cast<unsigned char*>(out.data()),
                                          out.size(), label.data(), label.size(), nullptr, 0, 0) != 1)
    throw std::bad_alloc();  // no other failure is possible
  return out;
}

std::shared_ptr<Cipher> Channel::for_pages(std::unique_ptr<Channel> channel) {
  Channel& self = *channel;
  const Library& library = self.library_;
  if (library.SSL_pending(self.connection_) != 0) return nullptr;
  const std::optional<TrafficSecret>&client = self.handshake_.client, &server = self.handshake_.server;
  const std::uint16_t suite =
      library.SSL_CIPHER_get_protocol_id(library.SSL_get_current_cipher(self.connection_));
  if (suite != abi::kAes128GcmSha256 || !client || !server) return channel;
  TrafficKeys our(library, self.initiator_ ? *client : *server);
  TrafficKeys their(library, self.initiator_ ? *server : *client);
  if (!our.derive() || !their.derive()) return nullptr;
  // Bytes that wait here would be encrypted once more by the kernel.
  if (self.credentials_->uses_kernel() && self.transmit())
    if (auto kernel = KernelChannel::create(self.socket_, our, self.num_sent_, their, self.num_received_))
      return kernel;
  auto sends = RecordCipher::create(our, self.num_sent_);
  auto receives = RecordCipher::create(their, self.num_received_);
  if (sends == nullptr || receives == nullptr) return nullptr;
  return std::make_shared<PageChannel>(self.socket_, std::move(sends), std::move(receives),
                                       std::span(self.unsent_).subspan(self.sent_));
}

// ---- bytes --------------------------------------------------------------------------------------

ssize_t Channel::receive(std::span<const iovec> into) noexcept {
  std::size_t total = 0, num_records = 0;
  has_unread_ = false;
  for (const iovec& part : into) {
    std::size_t done = 0;
    while (done < part.iov_len) {
      std::size_t got = 0;
      library_.ERR_clear_error();
      const bool is_next = library_.SSL_pending(connection_) == 0;
      const int result = library_.SSL_read_ex(connection_, static_cast<std::byte*>(part.iov_base) + done,
                                              part.iov_len - done, &got);
      if (result != 1) {
        if (has_unsent()) static_cast<void>(transmit());  // an answer to the peer's new keys, or why it ends
        const ssize_t outcome = fail(result);
        // The stream's end can still be read from the socket. An error was taken from it, and
        // nothing would report it again.
        const bool is_wrong = outcome < 0 && errno != EAGAIN && errno != EWOULDBLOCK;
        return total != 0 && !is_wrong ? static_cast<ssize_t>(total) : outcome;
      }
      num_received_ += is_next;
      num_records += is_next;
      done += got;
      total += got;
      // A whole call of full records is far fewer; records of one byte each would keep all other peers
      // waiting.
      has_unread_ = num_records == kMostRecordsOfACall;
      if (has_unread_) return static_cast<ssize_t>(total);
    }
  }
  return static_cast<ssize_t>(total);
}

bool Channel::encrypt(const void* bytes, std::size_t nbytes) noexcept {
  std::size_t taken = 0;
  library_.ERR_clear_error();
  if (++num_sent_ % kRecordsOfAKey == 0) library_.SSL_key_update(connection_, abi::kOwnKeyAlone);
  const int result = library_.SSL_write_ex(connection_, bytes, nbytes, &taken);
  if (result == 1) return true;
  if (fail(result) == 0) errno = EPIPE;
  if (errno == EAGAIN) errno = EPROTO;  // its own write never has to wait
  return false;
}

ssize_t Channel::send(std::span<const iovec> bytes) noexcept {
  if (!transmit()) return -1;
  std::size_t total = 0, at = 0;  // `at`: of the first part that is left
  while (!bytes.empty()) {
    while (!bytes.empty() && unsent_.size() < kBatchNbytes) {
      const iovec& part = bytes.front();
      const auto* from = static_cast<const std::byte*>(part.iov_base) + at;
      std::size_t nbytes = std::min(part.iov_len - at, kMostPlainNbytes);
      if (nbytes == kMostPlainNbytes || bytes.size() == 1) {
        at += nbytes;
        if (at == part.iov_len) {
          bytes = bytes.subspan(1);
          at = 0;
        }
      } else {
        try {
          plain_.resize(kMostPlainNbytes);
        } catch (const std::bad_alloc&) {
          errno = ENOMEM;
          return total != 0 ? static_cast<ssize_t>(total) : -1;
        }
        nbytes = 0;
        while (!bytes.empty() && nbytes < kMostPlainNbytes) {
          const std::size_t more = std::min(bytes.front().iov_len - at, kMostPlainNbytes - nbytes);
          std::memcpy(plain_.data() + nbytes, static_cast<const std::byte*>(bytes.front().iov_base) + at,
                      more);
          nbytes += more;
          at += more;
          if (at < bytes.front().iov_len) continue;
          bytes = bytes.subspan(1);
          at = 0;
        }
        from = plain_.data();
      }
      if (nbytes != 0 && !encrypt(from, nbytes)) return -1;
      total += nbytes;
    }
    if (transmit()) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) break;
    return -1;
  }
  return static_cast<ssize_t>(total);
}

}  // namespace kvxfer::tls
