// crc32c (Castagnoli), with SSE4.2 where there is.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvxfer {

// Of the bytes that `crc` is of, followed by these; 0 for none yet.
std::uint32_t crc32c(std::uint32_t crc, const std::byte* bytes, std::size_t nbytes) noexcept;

}  // namespace kvxfer
