#include "core/tls/credentials.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <ctime>
#include <new>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/tls/kernel_channel.h"

namespace kvxfer::tls {
namespace {

// Ciphers that processors compute fastest come first; the acceptor's order counts.
constexpr const char* kCiphers = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";

std::string in_words(const std::tm& time) {
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &time);
  return text.data();
}

std::string now_in_words() {
  const std::time_t now = std::time(nullptr);
  std::tm time{};
  gmtime_r(&now, &time);
  return in_words(time);
}

std::string in_words(const Library& library, const abi::Instant* instant) {
  std::tm time{};
  return library.ASN1_TIME_to_tm(instant, &time) == 1 ? in_words(time) : "?";
}

// It cannot be known which of two clocks is wrong, so both are named.
std::string why_not(const Library& library, int error, const abi::Certificate* certificate) {
  std::string why = library.X509_verify_cert_error_string(error);
  if ((error == abi::kExpired || error == abi::kNotYetValid) && certificate != nullptr)
    why += ": it is valid from " + in_words(library, library.X509_get0_notBefore(certificate)) + " to " +
           in_words(library, library.X509_get0_notAfter(certificate)) + ", and this host's clock says " +
           now_in_words() + "; is this clock right, and that of the issuer?";
  if (error == abi::kListExpired || error == abi::kListNotYetValid)
    why += ": renew the list of revoked certificates; this host's clock says " + now_in_words();
  return why;
}

}  // namespace

std::vector<Identity> identities_of(const Library& library, const abi::Certificate* certificate) {
  std::vector<Identity> out;
  auto* const names = static_cast<abi::Stack*>(
      library.X509_get_ext_d2i(certificate, abi::kAlternativeNames, nullptr, nullptr));
  if (names == nullptr) return out;
  for (int i = 0; i < library.OPENSSL_sk_num(names); ++i) {
    int kind = 0;
    void* const value = library.GENERAL_NAME_get0_value(
        static_cast<const abi::Name*>(library.OPENSSL_sk_value(names, i)), &kind);
    if (kind != abi::kUri) continue;
    const auto* const text = static_cast<const abi::Text*>(value);
    const std::string_view uri(reinterpret_cast<const char*>(library.ASN1_STRING_get0_data(text)),
                               static_cast<std::size_t>(library.ASN1_STRING_length(text)));
    if (std::optional<Identity> identity = Identity::parse(uri)) out.push_back(std::move(*identity));
  }
  library.GENERAL_NAMES_free(names);
  return out;
}

Result<std::shared_ptr<const Credentials>> Credentials::load(const CredentialFiles& files) {
  const Result<const Library*> library = Library::load();
  if (!library.ok()) return library.status();
  std::shared_ptr<Credentials> out(new Credentials(*library.value()));
  if (Status status = out->read(files); !status.ok()) return status;
  return std::shared_ptr<const Credentials>(std::move(out));
}

Credentials::~Credentials() { library_.SSL_CTX_free(context_); }

Status Credentials::read(const CredentialFiles& files) {
  for (const std::string& text : files.allow) {
    const Result<Pattern> pattern = Pattern::parse(text);
    if (!pattern.ok()) return pattern.status();
    allow_.push_back(pattern.value());
    allow_in_words_ += (allow_in_words_.empty() ? "" : ", ") + text;
  }
  if (files.kernel != KernelUse::kNever) {
    using Offer = KernelTls::Offer;
    const KernelTls& kernel = KernelTls::get();
    if (files.kernel == KernelUse::kAlways && kernel.offer == Offer::kNothing)
      return {Code::kUnsupported, "the kernel must encrypt (tls kernel='always'), but cannot: " + kernel.why};
    uses_kernel_ = kernel.offer == Offer::kNewKeys || files.kernel == KernelUse::kAlways;
  }
  library_.ERR_clear_error();
  context_ = library_.SSL_CTX_new(library_.TLS_method());
  if (context_ == nullptr) return {Code::kSystem, "OpenSSL cannot create a context: " + last_error(library_)};
  library_.SSL_CTX_ctrl(context_, abi::kLeastVersionCommand, abi::kTls13, nullptr);
  library_.SSL_CTX_ctrl(context_, abi::kCacheCommand, abi::kNoCache, nullptr);
  library_.SSL_CTX_ctrl(context_, abi::kModeCommand, abi::kReleaseBuffers, nullptr);
  library_.SSL_CTX_set_options(context_, abi::kIgnoreUnexpectedEnd | abi::kNoTickets);
  library_.SSL_CTX_set_num_tickets(context_, 0);
  library_.SSL_CTX_set_ciphersuites(context_, kCiphers);
  const auto wrong = [&](const std::string& path, const char* what) {
    const std::string why = last_error(library_);
    return Status(Code::kInvalidArgument,
                  path + " cannot be used as " + what + (why.empty() ? "" : ": " + why));
  };
  if (library_.SSL_CTX_use_certificate_chain_file(context_, files.certificate.c_str()) != 1)
    return wrong(files.certificate, "certificate (PEM)");
  if (library_.SSL_CTX_use_PrivateKey_file(context_, files.key.c_str(), abi::kPem) != 1)
    return wrong(files.key, "the certificate's key (PEM, without a password)");
  if (library_.SSL_CTX_check_private_key(context_) != 1)
    return wrong(files.key, ("key of " + files.certificate).c_str());
  if (library_.SSL_CTX_load_verify_locations(context_, files.authorities.c_str(), nullptr) != 1)
    return wrong(files.authorities, "certificates of authorities (PEM)");
  if (!files.revoked.empty()) {
    abi::Store* const store = library_.SSL_CTX_get_cert_store(context_);
    if (library_.X509_STORE_load_file(store, files.revoked.c_str()) != 1)
      return wrong(files.revoked, "list of revoked certificates (PEM)");
    library_.X509_STORE_set_flags(store, abi::kCheckRevoked);
  }
  const abi::Certificate* const own = library_.SSL_CTX_get0_certificate(context_);
  own_ = identities_of(library_, own);
  if (own_.empty())
    return {Code::kInvalidArgument, files.certificate +
                                        " names no agent: its alternative names must include a URI "
                                        "kvxfer://TENANT/ENGINE/AGENT or kvxfer://TENANT/ENGINE"};
  std::tm end{};
  if (library_.ASN1_TIME_to_tm(library_.X509_get0_notAfter(own), &end) == 1) expires_at_s_ = timegm(&end);
  if (files.allow.empty())
    for (const Identity& identity : own_) {
      const std::string own_tenant = identity.tenant + "/*/*";
      allow_.push_back(Pattern::parse(own_tenant).value());
      allow_in_words_ += (allow_in_words_.empty() ? "" : ", ") + own_tenant;
    }
  library_.SSL_CTX_set_verify(context_, abi::kVerifyPeer | abi::kFailWithoutCertificate, nullptr);
  library_.SSL_CTX_set_cert_verify_callback(context_, &Credentials::verify, this);
  library_.SSL_CTX_set_keylog_callback(context_, &Credentials::keep_secret);
  return {};
}

Status Credentials::check_own_name(std::string_view agent) const {
  for (const Identity& identity : own_)
    if (identity.is_of(agent)) return {};
  return {Code::kInvalidArgument, "the certificate is for agent '" + own_.front().name +
                                      "', but this agent is called '" + std::string(agent) + "'"};
}

bool Credentials::may_admit(const std::vector<Identity>& identities) const {
  return std::ranges::any_of(identities, [&](const Identity& identity) {
    return std::ranges::any_of(
        allow_, [&](const Pattern& pattern) { return pattern.matches(identity, identity.name); });
  });
}

Result<std::string> Credentials::admit(const std::vector<Identity>& identities,
                                       std::string_view agent) const {
  bool is_named = false;
  for (const Identity& identity : identities) {
    if (!identity.is_of(agent)) continue;
    is_named = true;
    for (const Pattern& pattern : allow_)
      if (pattern.matches(identity, agent)) return identity.with(agent);
  }
  if (!is_named)
    return Status(Code::kAuthFailed, "its certificate is for agent '" + identities.front().name +
                                         "', but it calls itself '" + std::string(agent) + "'");
  return Status(Code::kAuthFailed,
                identities.front().with(agent) + " is not allowed here; allowed are " + allow_in_words_);
}

// OpenSSL calls this with each secret as the handshake makes it: "LABEL random secret", in hex. The callback
// is meant for programs that write secrets to a file, and is OpenSSL's only way to give them out.
void Credentials::keep_secret(const abi::Connection* connection, const char* line) {
  const std::string_view text(line);
  const Library& library = *Library::load().value();
  auto* const shaken = static_cast<Handshake*>(library.SSL_get_ex_data(connection, 0));
  const bool is_client = text.starts_with("CLIENT_TRAFFIC_SECRET_0 ");
  if (!is_client && !text.starts_with("SERVER_TRAFFIC_SECRET_0 ")) return;
  const std::string_view hex = text.substr(text.rfind(' ') + 1);
  TrafficSecret secret;
  if (hex.size() != 2 * secret.size()) return;  // of another digest's length
  for (std::size_t i = 0; i < secret.size(); ++i) {
    unsigned value = 0;
    if (std::from_chars(hex.data() + 2 * i, hex.data() + 2 * i + 2, value, 16).ec != std::errc()) return;
    secret[i] = static_cast<std::byte>(value);
  }
  (is_client ? shaken->client : shaken->server) = secret;
  library.OPENSSL_cleanse(secret.data(), secret.size());
}

// OpenSSL calls this in the handshake, with the chain that the peer sent.
int Credentials::verify(abi::Verification* verification, void* credentials) {
  const auto& self = *static_cast<const Credentials*>(credentials);
  const Library& library = self.library_;
  auto* const connection = static_cast<abi::Connection*>(
      library.X509_STORE_CTX_get_ex_data(verification, library.SSL_get_ex_data_X509_STORE_CTX_idx()));
  auto* const shaken = static_cast<Handshake*>(library.SSL_get_ex_data(connection, 0));
  try {
    if (library.X509_verify_cert(verification) != 1) {
      shaken->why = why_not(library, library.X509_STORE_CTX_get_error(verification),
                            library.X509_STORE_CTX_get_current_cert(verification));
      return 0;
    }
    const std::vector<Identity> identities =
        identities_of(library, library.X509_STORE_CTX_get0_cert(verification));
    if (identities.empty())
      shaken->why = "it names no agent: no alternative name is a URI kvxfer://TENANT/ENGINE/AGENT";
    else if (!self.may_admit(identities))
      shaken->why =
          identities.front().in_words() + " is not allowed here; allowed are " + self.allow_in_words_;
    else
      return 1;
  } catch (const std::bad_alloc&) {  // no peer is believed then
  }
  library.X509_STORE_CTX_set_error(verification, abi::kNotAllowed);
  return 0;
}

}  // namespace kvxfer::tls
