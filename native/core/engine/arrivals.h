// What has arrived of a transfer at its destination, by piece and never by order: which pieces are still to be
// posted, which are in, and which layers have been confirmed, that is: were read under a right that held to the end.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <vector>

#include "core/bit_set.h"
#include "kvxfer/copy_program.h"

namespace kvxfer {

class Arrivals {
 public:
  // Redoing is bounded: a rail that fails everything must not keep a transfer busy for ever.
  static std::uint64_t max_redone(const PieceGrid& grid) { return 64 + 4 * std::uint64_t{grid.num_pieces()}; }

  void begin(const PieceGrid& grid);
  bool has_begun() const noexcept { return !rows_.empty(); }

  // ---- to be posted
  // The next piece: one to redo, else the next of those layers.
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
  // False: it was redone too often.
  bool redo(std::uint32_t piece);

  // It was posted, and is not in.
  bool is_awaited(std::uint32_t piece) const { return piece < next_ && !has(piece); }

  // ---- in
  bool has(std::uint32_t piece) const { return in_.contains(piece); }
  std::uint32_t num_in() const noexcept { return num_in_; }
  bool has_all() const noexcept { return num_in_ == grid_.num_pieces(); }
  // True where it was its layer's last.
  bool add(std::uint32_t piece);
  // It has to be fetched once more, unless its layer is confirmed.
  bool take_back(std::uint32_t piece);

  // ---- confirmed; rows are layers of the transfer
  std::uint32_t row_of(std::uint32_t piece) const { return piece / grid_.pieces_per_layer(); }
  bool confirm(std::uint32_t row);  // true once
  bool is_confirmed(std::uint32_t row) const { return rows_[row].confirmed; }
  bool is_complete() const noexcept { return num_confirmed_ == grid_.num_layers; }

 private:
  struct Row {
    std::uint32_t num_left;  // pieces that are not in
    bool confirmed;
  };
  PieceGrid grid_;
  BitSet in_;  // of pieces, whichever rail brought them
  std::uint32_t num_in_ = 0;
  std::vector<Row> rows_;
  std::uint32_t num_confirmed_ = 0;
  std::uint32_t next_ = 0;
  std::list<std::uint32_t> redo_;  // a list: empty, it has allocated nothing
  std::uint64_t num_redone_ = 0;
};

}  // namespace kvxfer
