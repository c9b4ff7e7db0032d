// crc32c (Castagnoli), with SSE4.2 if the processor has it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvxfer {

// The crc of the bytes that `crc` covers, followed by these; 0 means no bytes yet.
std::uint32_t crc32c(std::uint32_t crc, const std::byte* bytes, std::size_t nbytes) noexcept;

}  // namespace kvxfer
