#include "core/engine/eager.h"

#include <cassert>

#include "core/copy/pack.h"
#include "core/copy/run_cursor.h"

namespace kvxfer {
namespace {

// Each piece costs some steps in the call that receives it, however few bytes it has.
constexpr std::uint32_t kMaxPieces = 256;

}  // namespace

std::uint32_t eager_nbytes_of(const Move& move) noexcept {
  const std::uint32_t num_pieces = move.grid.num_pieces();
  if (num_pieces > kMaxPieces) return 0;
  std::uint64_t nbytes = 0;
  for (std::uint32_t piece = 0; piece < num_pieces; ++piece) {
    const std::uint64_t more = piece_nbytes(*move.program, move.grid.piece(piece));
    if (more > wire::kMaxEagerNbytes - nbytes) return 0;
    nbytes += more;
  }
  return static_cast<std::uint32_t>(nbytes);
}

wire::Bytes pack_pages(const Move& move, std::uint32_t nbytes) {
  wire::Bytes pages(nbytes);
  std::size_t used = 0;
  for (std::uint32_t piece = 0; piece < move.grid.num_pieces(); ++piece) {
    Packer packer(move, piece);
    while (const std::size_t more = packer.pack(pages.data() + used, pages.size() - used)) used += more;
  }
  assert(used == nbytes && "a piece is packed whole where there is room for it");
  return pages;
}

void unpack_pages(const Move& move, wire::ByteSpan pages) noexcept {
  for (std::uint32_t piece = 0; piece < move.grid.num_pieces(); ++piece) {
    const std::uint64_t nbytes = piece_nbytes(*move.program, move.grid.piece(piece));
    RunCursor(move, piece, Side::kDst).scatter(pages.data(), nbytes);
    pages = pages.subspan(nbytes);
  }
}

}  // namespace kvxfer
