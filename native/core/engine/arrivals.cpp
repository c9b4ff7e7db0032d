#include "core/engine/arrivals.h"

#include <utility>

namespace kvxfer {

void Arrivals::begin(const PieceGrid& grid) {
  grid_ = grid;
  in_ = BitSet(grid.num_pieces());
  rows_.assign(grid.num_layers, {grid.pieces_per_layer(), false});
}

bool Arrivals::redo(std::uint32_t piece) {
  if (++num_redone_ > max_redone(grid_)) return false;
  redo_.push_back(piece);
  return true;
}

bool Arrivals::add(std::uint32_t piece) {
  in_.insert(piece);
  ++num_in_;
  return --rows_[row_of(piece)].num_left == 0;
}

bool Arrivals::take_back(std::uint32_t piece) {
  Row& row = rows_[row_of(piece)];
  if (!in_.contains(piece) || row.confirmed) return false;
  in_.erase(piece);
  --num_in_;
  ++row.num_left;
  return true;
}

bool Arrivals::confirm(std::uint32_t row) {
  if (std::exchange(rows_[row].confirmed, true)) return false;
  ++num_confirmed_;
  return true;
}

}  // namespace kvxfer
