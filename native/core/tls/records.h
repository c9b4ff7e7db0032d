// Records of TLS 1.3 that carry pages, once the handshake has made the keys. They are sealed from the runs
// in which pages lie, and opened into the runs where pages go; SSL_write and SSL_read would copy each byte
// twice more. OpenSSL provides the cipher; framing, numbering and key updates follow RFC 8446, 5.2 to 5.5
// and 7.2. AES-128-GCM with SHA-256 alone.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "core/tls/openssl.h"

namespace kvxfer::tls {

inline constexpr std::size_t kMostPlainNbytes = 16 * 1024;  // of a record
inline constexpr std::size_t kRecordHeaderNbytes = 5, kTagNbytes = 16;
// What a record adds to its bytes: header, kind and tag.
inline constexpr std::size_t kRecordOverheadNbytes = kRecordHeaderNbytes + 1 + kTagNbytes;
inline constexpr std::size_t kMostRecordNbytes = kMostPlainNbytes + kRecordOverheadNbytes;

// RFC 8446, 5.5: at most 2^24.5 records with one key of AES-GCM.
inline constexpr std::uint64_t kRecordsOfAKey = std::uint64_t{1} << 24;

enum class RecordKind : std::uint8_t { kAlert = 21, kHandshake = 22, kData = 23 };

inline constexpr std::array<std::byte, 5> kKeyUpdate{std::byte{24}, std::byte{0}, std::byte{0}, std::byte{1},
                                                     std::byte{0}};
inline constexpr std::byte kCloseNotify{0};  // the second byte of an alert

// After a system call on a socket.
inline bool would_block() noexcept { return errno == EAGAIN || errno == EWOULDBLOCK; }

using TrafficSecret = std::array<std::byte, 32>;

// The keys of one direction, and the keys that follow them (RFC 8446, 7.2 and 7.3).
class TrafficKeys {
 public:
  struct Material {
    std::array<std::byte, 16> key{};
    std::array<std::byte, 12> base{};  // for nonces
  };

  TrafficKeys(const Library& library, const TrafficSecret& secret) : library_(&library), secret_(secret) {}
  TrafficKeys(const TrafficKeys&) = default;
  TrafficKeys& operator=(const TrafficKeys&) = delete;
  ~TrafficKeys();

  bool derive() noexcept;  // the first keys; false: OpenSSL failed
  bool advance() noexcept;  // the next keys; false: OpenSSL failed
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
  // Null if OpenSSL has no memory for it. `keys`: the direction's; `next`: how many records used them
  // before.
  static std::unique_ptr<RecordCipher> create(const TrafficKeys& keys, std::uint64_t next);
  ~RecordCipher();
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;

  std::uint64_t num_records() const noexcept { return next_; }  // with the present key

  // Writes one whole record from the runs, which hold kMostPlainNbytes at most. Returns its length; 0:
  // OpenSSL failed.
  std::size_t seal(std::span<const iovec> runs, RecordKind kind, std::byte* out) noexcept;

  // Opens `record`, which is whole and of a valid length, into runs with room for everything but its
  // overhead. False: it is not the peer's, or was altered; then the bytes in the runs have no meaning.
  bool open(std::span<const std::byte> record, std::span<const iovec> runs, RecordKind& kind) noexcept;

  // Changes to the key that follows the present one (RFC 8446, 7.2). False: OpenSSL failed.
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
