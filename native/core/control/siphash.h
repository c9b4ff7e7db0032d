// SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, 2012): the mac of control frames.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace kvxfer {

using SipHashKey = std::array<std::byte, 16>;
using SipHashMac = std::array<std::byte, 16>;

SipHashMac siphash128(const SipHashKey& key, std::span<const std::byte> bytes) noexcept;

}  // namespace kvxfer
