// The bytes of one piece on a stream rail:
//
//   | PieceHeader 32 bytes | the piece's bytes, run after run in program order | PieceTrailer 8 bytes |
//
// Numbers are little-endian, as they lie in memory on every machine that this is built for.
#pragma once

#include <bit>
#include <cstdint>

#include "kvxfer/transport.h"

namespace kvxfer::stream {

static_assert(std::endian::native == std::endian::little, "the frames are sent as they lie in memory");

struct PieceHeader {
  static constexpr std::uint32_t kMagic = 0x5a50'564bu;  // "KVPZ"

  std::uint32_t magic = kMagic;
  std::uint32_t reserved = 0;
  TransferId transfer = 0;
  // Length of the bytes that follow. 0 with an `ended` trailer: the source gave the piece up before its first
  // byte, so the receiver need not wait for it.
  std::uint64_t nbytes = 0;
  std::uint32_t piece = 0;
  std::uint32_t reserved2 = 0;
};
static_assert(sizeof(PieceHeader) == 32);

// Did the source's right to these bytes hold until the last of them was read?
enum class PieceEnd : std::uint32_t {
  kHeld = 0x444c'4548u,   // "HELD"
  kEnded = 0x4445'4e45u,  // "ENED"
};

struct PieceTrailer {
  PieceEnd end = PieceEnd::kHeld;
  std::uint32_t piece = 0;  // the header's piece: detects a stream that is out of step
};
static_assert(sizeof(PieceTrailer) == 8);

// A piece holds about half a MiB, and at least one block pair of one layer; no real piece comes near this. A
// header with a larger length is garbage, and is refused rather than waited for.
inline constexpr std::uint64_t kMaxPieceNbytes = std::uint64_t{1} << 32;

}  // namespace kvxfer::stream
