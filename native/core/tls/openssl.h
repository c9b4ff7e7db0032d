// OpenSSL 3's libssl and libcrypto, opened at run time: only agents with certificates need them. We use
// functions alone, and never look into its structures.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ctime>

#include "kvxfer/status.h"

namespace kvxfer::tls {

namespace abi {
struct Context;  // SSL_CTX
struct Connection;  // SSL
struct Method;  // SSL_METHOD
struct Bio;  // BIO
struct BioMethod;  // BIO_METHOD
struct Certificate;  // X509
struct Store;  // X509_STORE
struct Verification;  // X509_STORE_CTX
struct Stack;  // OPENSSL_STACK, here of names
struct Name;  // GENERAL_NAME
struct Text;  // ASN1_STRING
struct Instant;  // ASN1_TIME
struct Cipher;  // EVP_CIPHER
struct CipherState;  // EVP_CIPHER_CTX
struct Digest;  // EVP_MD
struct Suite;  // SSL_CIPHER

inline constexpr int kModeCommand = 33, kCacheCommand = 44, kLeastVersionCommand = 123;
inline constexpr long kTls13 = 0x0304, kReleaseBuffers = 0x10, kNoCache = 0;
inline constexpr std::uint64_t kIgnoreUnexpectedEnd = std::uint64_t{1} << 7,
                               kNoTickets = std::uint64_t{1} << 14;
inline constexpr int kVerifyPeer = 1, kFailWithoutCertificate = 2;
inline constexpr int kPem = 1;
inline constexpr int kErrorWantRead = 2, kErrorWantWrite = 3, kErrorSyscall = 5, kErrorZeroReturn = 6;
inline constexpr int kBioEnd = 2, kBioFlush = 11;  // commands
inline constexpr int kBioSource = 0x0400;
inline constexpr int kBioRetryRead = 0x01 | 0x08, kBioRetryAny = 0x0f;
inline constexpr int kOwnKeyAlone = 0;  // of key updates
inline constexpr unsigned long kCheckRevoked = 0x4;
inline constexpr int kNotYetValid = 9, kExpired = 10, kListNotYetValid = 11, kListExpired = 12,
                     kNotAllowed = 50;
inline constexpr int kAlternativeNames = 85, kUri = 6;
// Threads may use it until the very end of the process.
inline constexpr std::uint64_t kNoExitHandler = 0x0008'0000;
inline constexpr int kGetTag = 0x10, kSetTag = 0x11;
inline constexpr std::uint16_t kAes128GcmSha256 = 0x1301;
inline constexpr int kFirstAlert = 1000;  // reasons of errors from here on are alerts that the peer sent
}  // namespace abi

struct Library {
  // ---- contexts
  const abi::Method* (*TLS_method)();
  abi::Context* (*SSL_CTX_new)(const abi::Method* method);
  void (*SSL_CTX_free)(abi::Context* context);
  long (*SSL_CTX_ctrl)(abi::Context* context, int command, long number, void* pointer);
  std::uint64_t (*SSL_CTX_set_options)(abi::Context* context, std::uint64_t options);
  int (*SSL_CTX_set_ciphersuites)(abi::Context* context, const char* names);
  int (*SSL_CTX_set_num_tickets)(abi::Context* context, std::size_t num);
  int (*SSL_CTX_use_certificate_chain_file)(abi::Context* context, const char* path);
  int (*SSL_CTX_use_PrivateKey_file)(abi::Context* context, const char* path, int type);
  int (*SSL_CTX_check_private_key)(const abi::Context* context);
  int (*SSL_CTX_load_verify_locations)(abi::Context* context, const char* file, const char* folder);
  void (*SSL_CTX_set_verify)(abi::Context* context, int mode, int (*callback)(int, abi::Verification*));
  void (*SSL_CTX_set_cert_verify_callback)(abi::Context* context, int (*callback)(abi::Verification*, void*),
                                           void* argument);
  abi::Store* (*SSL_CTX_get_cert_store)(const abi::Context* context);
  abi::Certificate* (*SSL_CTX_get0_certificate)(const abi::Context* context);
  int (*X509_STORE_load_file)(abi::Store* store, const char* path);
  int (*X509_STORE_set_flags)(abi::Store* store, unsigned long flags);
  // ---- connections
  abi::Connection* (*SSL_new)(abi::Context* context);
  void (*SSL_free)(abi::Connection* connection);
  void (*SSL_set_bio)(abi::Connection* connection, abi::Bio* reads, abi::Bio* writes);
  void (*SSL_set_connect_state)(abi::Connection* connection);
  void (*SSL_set_accept_state)(abi::Connection* connection);
  int (*SSL_do_handshake)(abi::Connection* connection);
  int (*SSL_read_ex)(abi::Connection* connection, void* into, std::size_t nbytes, std::size_t* got);
  int (*SSL_write_ex)(abi::Connection* connection, const void* bytes, std::size_t nbytes, std::size_t* sent);
  int (*SSL_get_error)(const abi::Connection* connection, int result);
  int (*SSL_key_update)(abi::Connection* connection, int kind);
  long (*SSL_ctrl)(abi::Connection* connection, int command, long number, void* pointer);
  abi::Certificate* (*SSL_get1_peer_certificate)(const abi::Connection* connection);
  int (*SSL_export_keying_material)(abi::Connection* connection, unsigned char* out, std::size_t nbytes,
                                    const char* label, std::size_t label_nbytes, const unsigned char* context,
                                    std::size_t context_nbytes, int use_context);
  int (*SSL_set_ex_data)(abi::Connection* connection, int index, void* data);
  void* (*SSL_get_ex_data)(const abi::Connection* connection, int index);
  int (*SSL_get_ex_data_X509_STORE_CTX_idx)();
  int (*SSL_pending)(const abi::Connection* connection);
  const abi::Suite* (*SSL_get_current_cipher)(const abi::Connection* connection);
  std::uint16_t (*SSL_CIPHER_get_protocol_id)(const abi::Suite* suite);
  void (*SSL_CTX_set_keylog_callback)(abi::Context* context,
                                      void (*callback)(const abi::Connection*, const char*));
  // ---- records of pages
  abi::CipherState* (*EVP_CIPHER_CTX_new)();
  void (*EVP_CIPHER_CTX_free)(abi::CipherState* state);
  int (*EVP_CIPHER_CTX_ctrl)(abi::CipherState* state, int command, int number, void* pointer);
  const abi::Cipher* (*EVP_aes_128_gcm)();
  int (*EVP_CipherInit_ex)(abi::CipherState* state, const abi::Cipher* cipher, void* engine,
                           const unsigned char* key, const unsigned char* nonce, int encrypts);
  int (*EVP_CipherUpdate)(abi::CipherState* state, unsigned char* out, int* out_nbytes,
                          const unsigned char* in, int in_nbytes);
  int (*EVP_CipherFinal_ex)(abi::CipherState* state, unsigned char* out, int* out_nbytes);
  const abi::Digest* (*EVP_sha256)();
  unsigned char* (*HMAC)(const abi::Digest* digest, const void* key, int key_nbytes,
                         const unsigned char* bytes, std::size_t nbytes, unsigned char* out,
                         unsigned* out_nbytes);
  void (*OPENSSL_cleanse)(void* bytes, std::size_t nbytes);
  // ---- verification
  int (*X509_verify_cert)(abi::Verification* verification);
  void* (*X509_STORE_CTX_get_ex_data)(const abi::Verification* verification, int index);
  int (*X509_STORE_CTX_get_error)(const abi::Verification* verification);
  void (*X509_STORE_CTX_set_error)(abi::Verification* verification, int error);
  abi::Certificate* (*X509_STORE_CTX_get_current_cert)(const abi::Verification* verification);
  abi::Certificate* (*X509_STORE_CTX_get0_cert)(const abi::Verification* verification);
  const char* (*X509_verify_cert_error_string)(long error);
  // ---- certificates
  void (*X509_free)(abi::Certificate* certificate);
  const abi::Instant* (*X509_get0_notBefore)(const abi::Certificate* certificate);
  const abi::Instant* (*X509_get0_notAfter)(const abi::Certificate* certificate);
  int (*ASN1_TIME_to_tm)(const abi::Instant* instant, std::tm* out);
  void* (*X509_get_ext_d2i)(const abi::Certificate* certificate, int kind, int* critical, int* index);
  void (*GENERAL_NAMES_free)(abi::Stack* names);
  int (*OPENSSL_sk_num)(const abi::Stack* stack);
  void* (*OPENSSL_sk_value)(const abi::Stack* stack, int index);
  void* (*GENERAL_NAME_get0_value)(const abi::Name* name, int* kind);
  const unsigned char* (*ASN1_STRING_get0_data)(const abi::Text* text);
  int (*ASN1_STRING_length)(const abi::Text* text);
  // ---- where its bytes come from and go to
  abi::BioMethod* (*BIO_meth_new)(int kind, const char* name);
  int (*BIO_meth_set_write)(abi::BioMethod* method, int (*write)(abi::Bio*, const char*, int));
  int (*BIO_meth_set_read)(abi::BioMethod* method, int (*read)(abi::Bio*, char*, int));
  int (*BIO_meth_set_ctrl)(abi::BioMethod* method, long (*control)(abi::Bio*, int, long, void*));
  abi::Bio* (*BIO_new)(const abi::BioMethod* method);
  void (*BIO_set_data)(abi::Bio* bio, void* data);
  void* (*BIO_get_data)(abi::Bio* bio);
  void (*BIO_set_init)(abi::Bio* bio, int is);
  void (*BIO_set_flags)(abi::Bio* bio, int flags);
  void (*BIO_clear_flags)(abi::Bio* bio, int flags);
  // ---- errors, of the calling thread
  void (*ERR_clear_error)();
  unsigned long (*ERR_peek_error)();
  unsigned long (*ERR_peek_last_error)();
  const char* (*ERR_reason_error_string)(unsigned long error);
  int (*OPENSSL_init_ssl)(std::uint64_t options, const void* settings);

  // The library of this process, or in words why there is none (kUnsupported). Opened once, never closed.
  static Result<const Library*> load();
};

// This thread's last error, in OpenSSL's words; "" for none.
std::string last_error(const Library& library);

}  // namespace kvxfer::tls
