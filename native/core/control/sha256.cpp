#include "core/control/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace kvxfer {
namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes (FIPS 180-4, 4.2.2).
constexpr std::uint32_t kRoundConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t load_big_endian(const std::byte* at) noexcept {
  std::uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = value << 8 | std::to_integer<std::uint32_t>(at[i]);
  return value;
}

template <class Integer>
void store_big_endian(std::byte* at, Integer value) noexcept {
  for (std::size_t i = sizeof value; i-- > 0; value >>= 8) at[i] = static_cast<std::byte>(value & 0xff);
}

}  // namespace

void Sha256::compress(const std::byte* block) noexcept {
  std::uint32_t w[64];
  for (int t = 0; t < 16; ++t) w[t] = load_big_endian(block + 4 * t);
  for (int t = 16; t < 64; ++t) {
    const std::uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const std::uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (int t = 0; t < 64; ++t) {
    const std::uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const std::uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRoundConstants[t] + w[t];
    const std::uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const std::uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::uint32_t sums[8] = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) state_[i] += sums[i];
}

void Sha256::update(std::span<const std::byte> bytes) noexcept {
  while (!bytes.empty()) {
    const std::size_t filled = nbytes_ % kBlockNbytes;
    const std::size_t take = std::min(kBlockNbytes - filled, bytes.size());
    std::memcpy(pending_.data() + filled, bytes.data(), take);
    nbytes_ += take;
    bytes = bytes.subspan(take);
    if (nbytes_ % kBlockNbytes == 0) compress(pending_.data());
  }
}

Sha256::Digest Sha256::finish() noexcept {
  const std::uint64_t num_bits = nbytes_ * 8;
  std::array<std::byte, kBlockNbytes + 8> padding{std::byte{0x80}};
  // A 1 bit, then zeros up to 8 bytes short of a block, then the length.
  const std::size_t filled = nbytes_ % kBlockNbytes;
  const std::size_t num_padding = (filled < 56 ? 56 : 56 + kBlockNbytes) - filled;
  store_big_endian(padding.data() + num_padding, num_bits);
  update(std::span(padding).first(num_padding + 8));
  Digest digest;
  for (std::size_t i = 0; i < 8; ++i) store_big_endian(digest.data() + 4 * i, state_[i]);
  return digest;
}

Sha256::Digest sha256(std::initializer_list<std::span<const std::byte>> parts) noexcept {
  Sha256 hash;
  for (const auto part : parts) hash.update(part);
  return hash.finish();
}

Sha256::Digest hmac_sha256(std::span<const std::byte> key,
                           std::initializer_list<std::span<const std::byte>> parts) noexcept {
  std::array<std::byte, Sha256::kBlockNbytes> pad{};
  if (key.size() > pad.size()) {
    const Sha256::Digest digest = sha256({key});
    std::copy(digest.begin(), digest.end(), pad.begin());
  } else {
    std::copy(key.begin(), key.end(), pad.begin());
  }
  for (std::byte& b : pad) b ^= std::byte{0x36};
  Sha256 inner;
  inner.update(pad);
  for (const auto part : parts) inner.update(part);
  const Sha256::Digest inner_digest = inner.finish();
  for (std::byte& b : pad) b ^= std::byte{0x36} ^ std::byte{0x5c};
  return sha256({pad, inner_digest});
}

bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b) noexcept {
  if (a.size() != b.size()) return false;
  std::uint64_t difference = 0;
  std::size_t at = 0;
  for (std::uint64_t x, y; a.size() - at >= sizeof x; at += sizeof x) {
    std::memcpy(&x, a.data() + at, sizeof x);
    std::memcpy(&y, b.data() + at, sizeof y);
    difference |= x ^ y;
    // Keeps a compiler that sees through the loop from leaving it early.
    __asm__ volatile("" : "+r"(difference));
  }
  for (; at < a.size(); ++at) {
    difference |= std::to_integer<std::uint64_t>(a[at] ^ b[at]);
    __asm__ volatile("" : "+r"(difference));
  }
  return difference == 0;
}

}  // namespace kvxfer
