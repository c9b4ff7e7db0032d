#include "core/tls/openssl.h"

#include <string>

#include "kvxfer/opened_library.h"

namespace kvxfer::tls {
namespace {

constexpr const char* kInstall =
    "certificates need OpenSSL 3: install libssl3 on Debian and its derivatives (libssl3t64 on newer ones), "
    "openssl-libs on Red Hat's";

Result<Library> load_library() {
  // libssl loads its libcrypto by its own name.
  OpenedLibrary library({"libssl.so.3", "libcrypto.so.3"});
  if (!library.why().empty())
    return Status(Code::kUnsupported, "OpenSSL cannot be loaded (" + library.why() + "): " + kInstall);
  Library table{};
#define KVXFER_FIND(name) library.find(table.name, #name)
  KVXFER_FIND(TLS_method);
  KVXFER_FIND(SSL_CTX_new);
  KVXFER_FIND(SSL_CTX_free);
  KVXFER_FIND(SSL_CTX_ctrl);
  KVXFER_FIND(SSL_CTX_set_options);
  KVXFER_FIND(SSL_CTX_set_ciphersuites);
  KVXFER_FIND(SSL_CTX_set_num_tickets);
  KVXFER_FIND(SSL_CTX_use_certificate_chain_file);
  KVXFER_FIND(SSL_CTX_use_PrivateKey_file);
  KVXFER_FIND(SSL_CTX_check_private_key);
  KVXFER_FIND(SSL_CTX_load_verify_locations);
  KVXFER_FIND(SSL_CTX_set_verify);
  KVXFER_FIND(SSL_CTX_set_cert_verify_callback);
  KVXFER_FIND(SSL_CTX_get_cert_store);
  KVXFER_FIND(SSL_CTX_get0_certificate);
  KVXFER_FIND(X509_STORE_load_file);
  KVXFER_FIND(X509_STORE_set_flags);
  KVXFER_FIND(SSL_new);
  KVXFER_FIND(SSL_free);
  KVXFER_FIND(SSL_set_bio);
  KVXFER_FIND(SSL_set_connect_state);
  KVXFER_FIND(SSL_set_accept_state);
  KVXFER_FIND(SSL_do_handshake);
  KVXFER_FIND(SSL_read_ex);
  KVXFER_FIND(SSL_write_ex);
  KVXFER_FIND(SSL_get_error);
  KVXFER_FIND(SSL_key_update);
  KVXFER_FIND(SSL_ctrl);
  KVXFER_FIND(SSL_get1_peer_certificate);
  KVXFER_FIND(SSL_export_keying_material);
  KVXFER_FIND(SSL_set_ex_data);
  KVXFER_FIND(SSL_get_ex_data);
  KVXFER_FIND(SSL_get_ex_data_X509_STORE_CTX_idx);
  KVXFER_FIND(SSL_pending);
  KVXFER_FIND(SSL_get_current_cipher);
  KVXFER_FIND(SSL_CIPHER_get_protocol_id);
  KVXFER_FIND(SSL_CTX_set_keylog_callback);
  KVXFER_FIND(EVP_CIPHER_CTX_new);
  KVXFER_FIND(EVP_CIPHER_CTX_free);
  KVXFER_FIND(EVP_CIPHER_CTX_ctrl);
  KVXFER_FIND(EVP_aes_128_gcm);
  KVXFER_FIND(EVP_CipherInit_ex);
  KVXFER_FIND(EVP_CipherUpdate);
  KVXFER_FIND(EVP_CipherFinal_ex);
  KVXFER_FIND(EVP_sha256);
  KVXFER_FIND(HMAC);
  KVXFER_FIND(OPENSSL_cleanse);
  KVXFER_FIND(X509_verify_cert);
  KVXFER_FIND(X509_STORE_CTX_get_ex_data);
  KVXFER_FIND(X509_STORE_CTX_get_error);
  KVXFER_FIND(X509_STORE_CTX_set_error);
  KVXFER_FIND(X509_STORE_CTX_get_current_cert);
  KVXFER_FIND(X509_STORE_CTX_get0_cert);
  KVXFER_FIND(X509_verify_cert_error_string);
  KVXFER_FIND(X509_free);
  KVXFER_FIND(X509_get0_notBefore);
  KVXFER_FIND(X509_get0_notAfter);
  KVXFER_FIND(ASN1_TIME_to_tm);
  KVXFER_FIND(X509_get_ext_d2i);
  KVXFER_FIND(GENERAL_NAMES_free);
  KVXFER_FIND(OPENSSL_sk_num);
  KVXFER_FIND(OPENSSL_sk_value);
  KVXFER_FIND(GENERAL_NAME_get0_value);
  KVXFER_FIND(ASN1_STRING_get0_data);
  KVXFER_FIND(ASN1_STRING_length);
  KVXFER_FIND(BIO_meth_new);
  KVXFER_FIND(BIO_meth_set_write);
  KVXFER_FIND(BIO_meth_set_read);
  KVXFER_FIND(BIO_meth_set_ctrl);
  KVXFER_FIND(BIO_new);
  KVXFER_FIND(BIO_set_data);
  KVXFER_FIND(BIO_get_data);
  KVXFER_FIND(BIO_set_init);
  KVXFER_FIND(BIO_set_flags);
  KVXFER_FIND(BIO_clear_flags);
  KVXFER_FIND(ERR_clear_error);
  KVXFER_FIND(ERR_peek_error);
  KVXFER_FIND(ERR_peek_last_error);
  KVXFER_FIND(ERR_reason_error_string);
  KVXFER_FIND(OPENSSL_init_ssl);
#undef KVXFER_FIND
  if (!library.lacks().empty())
    return Status(Code::kUnsupported,
                  "this OpenSSL is too old: it has no " + library.lacks() + "; " + kInstall);
  table.OPENSSL_init_ssl(abi::kNoExitHandler, nullptr);
  return table;
}

}  // namespace

Result<const Library*> Library::load() {
  static const Result<Library> loaded = load_library();
  if (!loaded.ok()) return loaded.status();
  return &loaded.value();
}

std::string last_error(const Library& library) {
  const unsigned long error = library.ERR_peek_last_error();
  const char* const words = error == 0 ? nullptr : library.ERR_reason_error_string(error);
  return words != nullptr ? words : "";
}

}  // namespace kvxfer::tls
