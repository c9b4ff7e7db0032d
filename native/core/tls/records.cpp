#include "core/tls/records.h"

#include <algorithm>
#include <cstring>

namespace kvxfer::tls {
namespace {

constexpr std::byte kOuterKind{23}, kVersion{3};

unsigned char* bytes_of(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
const unsigned char* bytes_of(const void* bytes) { return static_cast<const unsigned char*>(bytes); }

}  // namespace

TrafficKeys::~TrafficKeys() {
  library_->OPENSSL_cleanse(secret_.data(), secret_.size());
  library_->OPENSSL_cleanse(&material_, sizeof material_);
}

// HKDF-Expand-Label without context, of one block at most.
bool TrafficKeys::expand(std::string_view label, std::span<std::byte> out) const noexcept {
  constexpr std::string_view kPrefix = "tls13 ";
  std::array<std::byte, 64> info{};
  std::size_t n = 0;
  info[n++] = std::byte{0};
  info[n++] = static_cast<std::byte>(out.size());
  info[n++] = static_cast<std::byte>(kPrefix.size() + label.size());
  for (const std::string_view part : {kPrefix, label})
    for (const char c : part) info[n++] = static_cast<std::byte>(c);
  info[n++] = std::byte{0};  // no context
  info[n++] = std::byte{1};  // of HKDF-Expand: the first block
  std::array<unsigned char, 64> block{};
  unsigned nbytes = 0;
  if (library_->HMAC(library_->EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()),
                     bytes_of(info.data()), n, block.data(), &nbytes) == nullptr ||
      nbytes < out.size())
    return false;
  std::memcpy(out.data(), block.data(), out.size());
  library_->OPENSSL_cleanse(block.data(), block.size());
  return true;
}

bool TrafficKeys::derive() noexcept { return expand("key", material_.key) && expand("iv", material_.base); }

bool TrafficKeys::advance() noexcept {
  TrafficSecret newer;
  if (!expand("traffic upd", newer)) return false;
  secret_ = newer;
  library_->OPENSSL_cleanse(newer.data(), newer.size());
  return derive();
}

std::unique_ptr<RecordCipher> RecordCipher::create(const TrafficKeys& keys, std::uint64_t next) {
  std::unique_ptr<RecordCipher> out(new RecordCipher(keys));
  out->state_ = out->library_.EVP_CIPHER_CTX_new();
  if (out->state_ == nullptr || !out->use_keys()) return nullptr;
  out->next_ = next;
  return out;
}

RecordCipher::~RecordCipher() { library_.EVP_CIPHER_CTX_free(state_); }

bool RecordCipher::use_keys() noexcept {
  next_ = 0;
  return library_.EVP_CipherInit_ex(state_, library_.EVP_aes_128_gcm(), nullptr,
                                    bytes_of(keys_.material().key.data()), nullptr, 1) == 1;
}

bool RecordCipher::update() noexcept { return keys_.advance() && use_keys(); }

bool RecordCipher::begin(std::span<const std::byte> header, bool seals) noexcept {
  std::array<std::byte, 12> nonce = keys_.material().base;
  for (std::size_t i = 0; i < 8; ++i) nonce[11 - i] ^= static_cast<std::byte>(next_ >> 8 * i);
  ++next_;
  int nbytes = 0;
  return library_.EVP_CipherInit_ex(state_, nullptr, nullptr, nullptr, bytes_of(nonce.data()),
                                    seals ? 1 : 0) == 1 &&
         library_.EVP_CipherUpdate(state_, nullptr, &nbytes, bytes_of(header.data()),
                                   static_cast<int>(header.size())) == 1;
}

std::size_t RecordCipher::seal(std::span<const iovec> runs, RecordKind kind, std::byte* out) noexcept {
  std::size_t plain_nbytes = 0;
  for (const iovec& run : runs) plain_nbytes += run.iov_len;
  const std::size_t nbytes = plain_nbytes + 1 + kTagNbytes;
  out[0] = kOuterKind;
  out[1] = out[2] = kVersion;
  out[3] = static_cast<std::byte>(nbytes >> 8);
  out[4] = static_cast<std::byte>(nbytes);
  if (!begin({out, kRecordHeaderNbytes}, true)) return 0;
  std::byte* at = out + kRecordHeaderNbytes;
  int done = 0;
  const auto cipher = [&](const void* from, std::size_t length) {
    const bool ok =
        library_.EVP_CipherUpdate(state_, bytes_of(at), &done, bytes_of(from), static_cast<int>(length)) == 1;
    at += length;
    return ok;
  };
  for (const iovec& run : runs)
    if (run.iov_len != 0 && !cipher(run.iov_base, run.iov_len)) return 0;
  if (!cipher(&kind, 1) || library_.EVP_CipherFinal_ex(state_, bytes_of(at), &done) != 1 ||
      library_.EVP_CIPHER_CTX_ctrl(state_, abi::kGetTag, kTagNbytes, at) != 1)
    return 0;
  return kRecordHeaderNbytes + nbytes;
}

bool RecordCipher::open(std::span<const std::byte> record, std::span<const iovec> runs,
                        RecordKind& kind) noexcept {
  if (!begin(record.first(kRecordHeaderNbytes), false)) return false;
  const std::byte* at = record.data() + kRecordHeaderNbytes;
  std::size_t left = record.size() - kRecordOverheadNbytes;
  int done = 0;
  for (const iovec& run : runs) {
    const std::size_t length = std::min(left, run.iov_len);
    if (length == 0) continue;
    if (library_.EVP_CipherUpdate(state_, static_cast<unsigned char*>(run.iov_base), &done, bytes_of(at),
                                  static_cast<int>(length)) != 1)
      return false;
    at += length;
    left -= length;
  }
  std::byte its_kind{};
  std::array<std::byte, kTagNbytes> tag;
  if (library_.EVP_CipherUpdate(state_, bytes_of(&its_kind), &done, bytes_of(at), 1) != 1) return false;
  std::memcpy(tag.data(), at + 1, kTagNbytes);
  std::byte nothing{};
  kind = static_cast<RecordKind>(its_kind);
  return library_.EVP_CIPHER_CTX_ctrl(state_, abi::kSetTag, kTagNbytes, tag.data()) == 1 &&
         library_.EVP_CipherFinal_ex(state_, bytes_of(&nothing), &done) == 1;
}

}  // namespace kvxfer::tls
