// What has arrived of a transfer at its destination, by piece and never by order: which pieces are still to
// be posted, which have arrived, and which layers are whole.
#pragma once

#include <cstdint>
#include <list>
#include <optional>

#include "core/bit_set.h"
#include "core/few.h"
#include "kvxfer/copy_program.h"

namespace kvxfer {

class Arrivals {
 public:
  // Bounds how often pieces are moved again: a rail on which everything fails must not keep a transfer
  // busy for ever.
  static std::uint64_t max_redone(const PieceGrid& grid) { return 64 + 4 * std::uint64_t{grid.num_pieces()}; }

  void begin(const PieceGrid& grid);
  bool has_begun() const noexcept { return !num_left_.empty(); }

  // ---- to be posted
  // The next piece to post: one to move again, else the next of the released layers.
  std::optional<std::uint32_t> next(std::uint32_t layers_ready) const {
    if (!redo_.empty()) return redo_.front();
    if (next_ < layers_ready * grid_.pieces_per_layer()) return next_;
    return std::nullopt;
  }
  void posted_next() {
    if (redo_.empty())
      ++next_;
    else
      redo_.pop_front();
  }
  // Moves the piece again. False: that happened too often.
  bool redo(std::uint32_t piece);

  // True if the piece was posted and has not arrived.
  bool is_awaited(std::uint32_t piece) const { return piece < next_ && !has(piece); }

  // ---- in
  bool has(std::uint32_t piece) const { return in_.contains(piece); }
  std::uint32_t num_in() const noexcept { return num_in_; }
  bool has_all() const noexcept { return num_in_ == grid_.num_pieces(); }
  // The piece has arrived. True if it was the last of its layer.
  bool add(std::uint32_t piece);
  std::uint32_t row_of(std::uint32_t piece) const { return piece / grid_.pieces_per_layer(); }

 private:
  PieceGrid grid_;
  BitSet in_;  // of pieces that have arrived, over whichever rail
  std::uint32_t num_in_ = 0;
  Few<std::uint32_t, 2> num_left_;  // for each layer of the transfer: pieces that have not arrived
  std::uint32_t next_ = 0;
  std::list<std::uint32_t> redo_;  // a list, since an empty one has allocated nothing
  std::uint64_t num_redone_ = 0;
};

}  // namespace kvxfer
