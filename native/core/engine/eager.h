// Small writes whose bytes go with their OFFER: one trip, and no rail is asked for anything.
//
// The frame's mac protects the bytes. They need the same right as any write, and land in the call that finds
// that right. If there is none yet, the bytes are dropped, and asked for like those of other writes when the
// right comes.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/control/wire.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Stands among the rails that carried a transfer, if no rail did.
inline constexpr std::string_view kEagerRail = "eager";

// The bytes of a move as they cross a stream; 0 if they are too many pieces or bytes for an OFFER.
std::uint32_t eager_nbytes_of(const Move& move) noexcept;
// Packs that many bytes of our memory.
wire::Bytes pack_pages(const Move& move, std::uint32_t nbytes);
void unpack_pages(const Move& move, wire::ByteSpan pages) noexcept;

}  // namespace kvxfer
