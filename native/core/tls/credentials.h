// What an agent proves itself with, and which peers it believes: the contents of files at one moment.
// Connections that began with older credentials keep those.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/tls/identity.h"
#include "core/tls/openssl.h"
#include "core/tls/records.h"

namespace kvxfer::tls {

// What encrypts pages. kAuto: the kernel if it can renew keys, else this process.
enum class KernelUse : std::uint8_t { kAuto, kAlways, kNever };

// Paths of files in PEM, and patterns of peers.
struct CredentialFiles {
  std::string certificate;  // followed by those that lead to an authority
  std::string key;
  std::string authorities;
  std::string revoked;  // revocation lists of those authorities; "": revocation is not checked
  std::vector<std::string> allow;  // patterns; none: the certificate's own tenant
  KernelUse kernel = KernelUse::kNever;
};

class Credentials {
 public:
  // Reads the files, which may block. kInvalidArgument names the file and what is wrong with it.
  // kUnsupported: without OpenSSL, or if the kernel is to encrypt always and cannot.
  static Result<std::shared_ptr<const Credentials>> load(const CredentialFiles& files);
  ~Credentials();
  Credentials(const Credentials&) = delete;
  Credentials& operator=(const Credentials&) = delete;

  // May an agent of that name use our own certificate? If not, the status says why.
  Status check_own_name(std::string_view agent) const;
  // The identity of a peer that has these and uses that name; or why this agent refuses the peer.
  Result<std::string> admit(const std::vector<Identity>& identities, std::string_view agent) const;
  // Our own certificate's, in seconds since 1970.
  std::int64_t expires_at_s() const noexcept { return expires_at_s_; }

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

// The names in a certificate that are identities.
std::vector<Identity> identities_of(const Library& library, const abi::Certificate* certificate);

// State of a connection during its handshake: its extra data of index 0.
struct Handshake {
  std::string why;  // what verify() found wrong, in words
  std::optional<TrafficSecret> client, server;  // for what each of them sends
};

}  // namespace kvxfer::tls
