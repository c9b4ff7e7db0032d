// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104). Plain C++: a handshake hashes about a kilobyte,
// and a dependency for that would be one more library to find on every machine.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

namespace kvxfer {

class Sha256 {
 public:
  static constexpr std::size_t kBlockNbytes = 64;
  using Digest = std::array<std::byte, 32>;

  void update(std::span<const std::byte> bytes) noexcept;
  Digest finish() noexcept;  // once; the object is used up

 private:
  void compress(const std::byte* block) noexcept;

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, kBlockNbytes> pending_{};
  std::uint64_t nbytes_ = 0;  // hashed or pending
};

// The digest of the parts one after the other.
Sha256::Digest sha256(std::initializer_list<std::span<const std::byte>> parts) noexcept;
Sha256::Digest hmac_sha256(std::span<const std::byte> key,
                           std::initializer_list<std::span<const std::byte>> parts) noexcept;

// Takes the same time wherever the first difference is, so that a proof cannot be guessed byte by
// byte. The lengths are no secret.
bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b) noexcept;

}  // namespace kvxfer
