#include "core/engine/arrivals.h"

namespace kvxfer {

void Arrivals::begin(const PieceGrid& grid) {
  grid_ = grid;
  in_.resize(grid.num_pieces());
  left_in_row_.assign(grid.num_layers, grid.pieces_per_layer());
  confirmed_.resize(grid.num_layers);
}

bool Arrivals::redo(std::uint32_t piece) {
  if (++num_redone_ > max_redone(grid_)) return false;
  redo_.push_back(piece);
  return true;
}

bool Arrivals::add(std::uint32_t piece) {
  in_[piece] = true;
  ++num_in_;
  return --left_in_row_[row_of(piece)] == 0;
}

bool Arrivals::take_back(std::uint32_t piece) {
  const std::uint32_t row = row_of(piece);
  if (!in_[piece] || confirmed_[row]) return false;
  in_[piece] = false;
  --num_in_;
  ++left_in_row_[row];
  return true;
}

bool Arrivals::confirm(std::uint32_t row) {
  if (confirmed_[row]) return false;
  confirmed_[row] = true;
  ++num_confirmed_;
  return true;
}

}  // namespace kvxfer
