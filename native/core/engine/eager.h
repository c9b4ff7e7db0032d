// Small writes whose bytes go with their OFFER: one trip, and no rail is asked for anything.
//
// The frame's mac stands for the bytes; they are checked by the rights of any write, and land in the call that finds
// the right. Without one yet they are dropped, and asked for like others' when it comes.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/control/wire.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Among the rails that carried a transfer, where none did.
inline constexpr std::string_view kEagerRail = "eager";

// Bytes of a move as they cross a stream; 0 where that is too many pieces or bytes for an OFFER.
std::uint32_t eager_nbytes_of(const Move& move) noexcept;
// So many, of our memory.
wire::Bytes pack_pages(const Move& move, std::uint32_t nbytes);
void unpack_pages(const Move& move, wire::ByteSpan pages) noexcept;

}  // namespace kvxfer
