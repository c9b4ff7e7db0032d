// Records of TLS 1.3 that carry pages, once the handshake has made the keys: sealed from the runs in which pages lie, and
// opened into those in which they are to lie, where SSL_write and SSL_read would copy each byte twice more. The cipher
// is OpenSSL's; framing, numbering and key updates are RFC 8446, 5.2 to 5.5 and 7.2. AES-128-GCM with SHA-256 alone.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "core/tls/openssl.h"

namespace kvxfer::tls {

inline constexpr std::size_t kMostPlainNbytes = 16 * 1024;  // of a record
inline constexpr std::size_t kRecordHeaderNbytes = 5, kTagNbytes = 16;
// What a record has beside its bytes: header, kind and tag.
inline constexpr std::size_t kRecordOverheadNbytes = kRecordHeaderNbytes + 1 + kTagNbytes;
inline constexpr std::size_t kMostRecordNbytes = kMostPlainNbytes + kRecordOverheadNbytes;

// RFC 8446, 5.5: with one key of AES-GCM no more than 2^24.5 records.
inline constexpr std::uint64_t kRecordsOfAKey = std::uint64_t{1} << 24;

enum class RecordKind : std::uint8_t { kAlert = 21, kHandshake = 22, kData = 23 };

using TrafficSecret = std::array<std::byte, 32>;

// The keys of one direction, and those after them (RFC 8446, 7.2 and 7.3).
class TrafficKeys {
 public:
  struct Material {
    std::array<std::byte, 16> key{};
    std::array<std::byte, 12> base{};  // of nonces
  };

  TrafficKeys(const Library& library, const TrafficSecret& secret) : library_(&library), secret_(secret) {}
  TrafficKeys(const TrafficKeys&) = default;
  TrafficKeys& operator=(const TrafficKeys&) = delete;
  ~TrafficKeys();

  bool derive() noexcept;  // the first; false: OpenSSL failed
  bool advance() noexcept;  // to the next; false: OpenSSL failed
  const Material& material() const noexcept { return material_; }
  const Library& library() const noexcept { return *library_; }

 private:
  bool expand(std::string_view label, std::span<std::byte> out) const noexcept;

  const Library* library_;
  TrafficSecret secret_;
  Material material_;
};

// One direction: its keys, and the number of the record that comes next.
class RecordCipher {
 public:
  // Null where OpenSSL has no memory for it. `keys` are the direction's, `next`: records that went with them before.
  static std::unique_ptr<RecordCipher> create(const TrafficKeys& keys, std::uint64_t next);
  ~RecordCipher();
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;

  std::uint64_t num_records() const noexcept { return next_; }  // with the present key

  // Writes a whole record of what the runs hold, kMostPlainNbytes at most, and returns its length; 0: OpenSSL failed.
  std::size_t seal(std::span<const iovec> runs, RecordKind kind, std::byte* out) noexcept;

  // Opens `record`, whole and of one of the lengths that there are, into runs that have room for all but its overhead.
  // False: not the peer's, or altered. What is in the runs then is nothing.
  bool open(std::span<const std::byte> record, std::span<const iovec> runs, RecordKind& kind) noexcept;

  // The key after the present one (RFC 8446, 7.2). False: OpenSSL failed.
  bool update() noexcept;

 private:
  explicit RecordCipher(const TrafficKeys& keys) : library_(keys.library()), keys_(keys) {}
  bool use_keys() noexcept;
  bool begin(std::span<const std::byte> header, bool seals) noexcept;

  const Library& library_;
  abi::CipherState* state_ = nullptr;
  TrafficKeys keys_;
  std::uint64_t next_ = 0;
};

}  // namespace kvxfer::tls
