// What an agent proves itself with, and whom it believes: files of one moment. Connections that began with older ones
// keep those.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/tls/identity.h"
#include "core/tls/openssl.h"
#include "core/tls/records.h"

namespace kvxfer::tls {

// Who encrypts pages. kAuto: the kernel where it renews keys, else this process.
enum class KernelUse : std::uint8_t { kAuto, kAlways, kNever };

// Paths of files in PEM, and patterns of peers.
struct CredentialFiles {
  std::string certificate;  // with those that lead to an authority, its own first
  std::string key;
  std::string authorities;
  std::string revoked;  // lists of those authorities; "": none is looked at
  std::vector<std::string> allow;  // none: the certificate's own tenant
  KernelUse kernel = KernelUse::kNever;
};

class Credentials {
 public:
  // Reads the files, which may block. kInvalidArgument with the file and what is wrong with it; kUnsupported without
  // OpenSSL, or where the kernel is to encrypt always and does not.
  static Result<std::shared_ptr<const Credentials>> load(const CredentialFiles& files);
  ~Credentials();
  Credentials(const Credentials&) = delete;
  Credentials& operator=(const Credentials&) = delete;

  // Of our own certificate: may an agent of that name use it? In words, why not.
  Status check_own_name(std::string_view agent) const;
  // The identity of a peer with these, which calls itself so; or why it is not to be had to do with.
  Result<std::string> admit(const std::vector<Identity>& identities, std::string_view agent) const;
  std::int64_t expires_at_s() const noexcept { return expires_at_s_; }  // our own, since 1970

  bool uses_kernel() const noexcept { return uses_kernel_; }

  const Library& library() const noexcept { return library_; }
  abi::Context* context() const noexcept { return context_; }

 private:
  explicit Credentials(const Library& library) : library_(library) {}
  Status read(const CredentialFiles& files);
  bool may_admit(const std::vector<Identity>& identities) const;
  static int verify(abi::Verification* verification, void* credentials);
  static void keep_secret(const abi::Connection* connection, const char* line);

  const Library& library_;
  abi::Context* context_ = nullptr;
  std::vector<Pattern> allow_;
  std::string allow_in_words_;
  std::vector<Identity> own_;
  std::int64_t expires_at_s_ = 0;
  bool uses_kernel_ = false;
};

// Names of a certificate that are identities.
std::vector<Identity> identities_of(const Library& library, const abi::Certificate* certificate);

// Of a connection that is shaking hands: its extra data of index 0.
struct Handshake {
  std::string why;  // what verify() found wrong, in words
  std::optional<TrafficSecret> client, server;  // of what each of them sends
};

}  // namespace kvxfer::tls
