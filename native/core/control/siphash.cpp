#include "core/control/siphash.h"

#include <bit>
#include <cstdint>
#include <cstring>

namespace kvxfer {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

std::uint64_t load(const std::byte* at) noexcept {
  std::uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

struct SipHashState {
  std::uint64_t v0, v1, v2, v3;

  // clang-format off
  void round() noexcept {
    v0 += v1; v1 = std::rotl(v1, 13); v1 ^= v0; v0 = std::rotl(v0, 32);
    v2 += v3; v3 = std::rotl(v3, 16); v3 ^= v2;
    v0 += v3; v3 = std::rotl(v3, 21); v3 ^= v0;
    v2 += v1; v1 = std::rotl(v1, 17); v1 ^= v2; v2 = std::rotl(v2, 32);
  }
  // clang-format on
  // Written out: a loop of two costs a quarter more.
  void absorb(std::uint64_t word) noexcept {
    v3 ^= word;
    round();
    round();
    v0 ^= word;
  }
  std::uint64_t finish() noexcept {
    for (int i = 0; i < 4; ++i) round();
    return v0 ^ v1 ^ v2 ^ v3;
  }
};

}  // namespace

SipHashMac siphash128(const SipHashKey& key, std::span<const std::byte> bytes) noexcept {
  const std::uint64_t k0 = load(key.data()), k1 = load(key.data() + 8);
  SipHashState state{0x736f6d6570736575u ^ k0, 0x646f72616e646f6du ^ k1 ^ 0xee,  // 0xee: of the 128-bit form
                     0x6c7967656e657261u ^ k0, 0x7465646279746573u ^ k1};
  const std::size_t num_whole = bytes.size() / 8 * 8;
  for (std::size_t i = 0; i < num_whole; i += 8) state.absorb(load(bytes.data() + i));
  // The last word: the bytes left over, and the length's low byte on top.
  std::uint64_t last = static_cast<std::uint64_t>(bytes.size()) << 56;
  for (std::size_t i = num_whole; i < bytes.size(); ++i)
    last |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * (i - num_whole));
  state.absorb(last);

  SipHashMac mac;
  state.v2 ^= 0xee;
  const std::uint64_t low = state.finish();
  state.v1 ^= 0xdd;
  const std::uint64_t high = state.finish();
  std::memcpy(mac.data(), &low, 8);
  std::memcpy(mac.data() + 8, &high, 8);
  return mac;
}

}  // namespace kvxfer
