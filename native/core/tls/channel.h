// One connection that TLS 1.3 encrypts: first a handshake that does not block, then a Cipher.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/tls/credentials.h"
#include "core/tls/openssl.h"
#include "kvxfer/cipher.h"

namespace kvxfer::tls {

class Channel final : public Cipher {
 public:
  // Null if there is no memory for it.
  static std::unique_ptr<Channel> create(std::shared_ptr<const Credentials> credentials, bool initiator);
  ~Channel() override;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // Before the first step, and whenever the socket changes.
  void use(int socket) noexcept { socket_ = socket; }

  enum class Step : std::uint8_t { kDone, kAgain, kFailed };
  // Continues the handshake as far as the socket permits. kAgain: call it when the socket is readable, or
  // writable if has_unsent().
  Step shake_hands() noexcept;
  bool is_secure() const noexcept { return is_secure_; }
  // The peer refused our certificate, or we refused the peer's. The owner decides whom to tell.
  bool was_refused() const noexcept { return was_refused_; }

  // ---- once it is secure
  // 32 bytes that only the two ends have; each label gives others.
  std::string export_key(std::string_view label) const;
  const std::vector<Identity>& identities() const noexcept { return identities_; }
  const std::shared_ptr<const Credentials>& credentials() const noexcept { return credentials_; }
  // The cipher that carries pages over the same connection from now on: the kernel's records or kvxfer's
  // own; the channel itself if its cipher suits neither. Null: more bytes have come than were read.
  static std::shared_ptr<Cipher> for_pages(std::unique_ptr<Channel> channel);

  ssize_t receive(std::span<const iovec> into) noexcept override;
  ssize_t send(std::span<const iovec> bytes) noexcept override;
  bool has_unread() const noexcept override { return has_unread_; }
  bool has_unsent() const noexcept override { return sent_ < unsent_.size(); }
  std::string why() const override { return why_; }

 private:
  Channel(std::shared_ptr<const Credentials> credentials, bool initiator);
  static int read_socket(abi::Bio* bio, char* into, int nbytes);
  static int write_later(abi::Bio* bio, const char* bytes, int nbytes);
  static long control(abi::Bio* bio, int command, long number, void* pointer);
  static const abi::BioMethod* method(const Library& library);
  bool transmit() noexcept;  // what waits; false with errno: some is left
  bool encrypt(const void* bytes, std::size_t nbytes) noexcept;
  ssize_t fail(int result) noexcept;  // -1, with errno

  const std::shared_ptr<const Credentials> credentials_;
  const Library& library_;
  const bool initiator_;
  abi::Connection* connection_ = nullptr;
  int socket_ = -1;
  bool is_secure_ = false, was_refused_ = false, has_ended_ = false, has_unread_ = false;
  std::uint64_t num_sent_ = 0, num_received_ = 0;  // counts records
  int error_ = 0;  // of the socket's last call
  Handshake handshake_;
  std::string why_;
  std::vector<Identity> identities_;
  std::vector<std::byte> unsent_;  // ciphertext
  std::size_t sent_ = 0;  // how much of unsent_ is sent
  std::vector<std::byte> plain_;  // short runs that are gathered into one record
};

}  // namespace kvxfer::tls
