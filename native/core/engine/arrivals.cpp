#include "core/engine/arrivals.h"

namespace kvxfer {

void Arrivals::begin(const PieceGrid& grid) {
  grid_ = grid;
  in_ = BitSet(grid.num_pieces());
  num_left_.assign(grid.num_layers, grid.pieces_per_layer());
}

bool Arrivals::redo(std::uint32_t piece) {
  if (++num_redone_ > max_redone(grid_)) return false;
  redo_.push_back(piece);
  return true;
}

bool Arrivals::add(std::uint32_t piece) {
  in_.insert(piece);
  ++num_in_;
  return --num_left_[row_of(piece)] == 0;
}

}  // namespace kvxfer
