#include "transports/cuda_ipc/flights.h"

#include <algorithm>
#include <span>
#include <utility>

#include "core/copy/pack.h"

namespace kvxfer::cuda_ipc {
namespace {

// Checks in which no flight ended, between two questions whether the device still works.
constexpr std::uint32_t kChecksPerQuestion = 1024;
constexpr Flights::Ticket kNever = UINT64_MAX;

}  // namespace

Flights::Launch Flights::launch(PeerId peer, WorkQueue& queue, std::size_t at, const gpu::Placement& src) {
  if (nbytes_ >= most_nbytes_) return {{Code::kAgain, ""}, {}};
  const Work& front = queue[at];
  const Move& move = *front.move;
  const Piece piece = move.grid.piece(front.piece);
  gpu::Part part{piece.layer, 1, piece.num_pairs, piece.num_fine};
  Flight flight{0, peer, {front.id}, piece_nbytes(*move.program, piece), move.fence};
  std::size_t num_works = 1;
  while (at + num_works < queue.size() && flight.nbytes < most_nbytes_ / 2) {
    const Work& next = queue[at + num_works];
    if (next.kind != WorkKind::kFetch || next.move.get() != &move || next.piece != front.piece + num_works)
      break;
    const Piece more = move.grid.piece(next.piece);
    if (move.grid.pieces_per_layer() == 1) {
      ++part.num_layers;
    } else if (more.layer == piece.layer && stream_->has_room_for_two(part.num_pairs + more.num_pairs)) {
      part.num_pairs += more.num_pairs;
      part.num_fine += more.num_fine;  // a layer's last pairs
    } else {
      break;
    }
    flight.works.push_back(next.id);
    flight.nbytes += piece_nbytes(*move.program, more);
    ++num_works;
  }
  const auto ids = [&](const std::vector<std::uint32_t>& table) {
    return std::span(table).subspan(piece.first_pair, part.num_pairs);
  };
  // Stored before anything can be under way. The flight lands, or it has no ticket.
  flights_.push_back(std::move(flight));
  Flight& pushed = flights_.back();
  const auto take_back = [&] {
    std::vector<WorkId> works = std::move(pushed.works);
    flights_.pop_back();
    return works;
  };
  Result<Ticket> ticket = Status(Code::kAgain, "");
  try {
    ticket = stream_->submit(*move.program, part, ids(move.src_ids), ids(move.dst_ids), src,
                             gpu::Placement(reinterpret_cast<gpu::Address>(move.local->base)));
  } catch (...) {
    take_back();
    throw;
  }
  const Code code = ticket.ok() ? Code::kOk : ticket.status().code();
  if (code == Code::kAgain) {
    take_back();
    return {ticket.status(), {}};
  }
  queue.drop(at, num_works);
  if (code != Code::kOk && code != Code::kSystem) return {ticket.status(), take_back()};
  // If the device is lost, part of the launch may be under way, and its end will not be reported.
  is_lost_ = is_lost_ || code == Code::kSystem;
  pushed.ticket = ticket.ok() ? ticket.value() : kNever;
  nbytes_ += pushed.nbytes;
  return {ticket.ok() ? Status() : ticket.status(), {}};
}

Status Flights::check() {
  if (flights_.empty() || is_lost_ || flights_.front().ticket <= stream_->done()) {
    idle_checks_ = 0;
    return {};
  }
  if (++idle_checks_ < kChecksPerQuestion) return {};
  idle_checks_ = 0;
  Status status = stream_->check();
  is_lost_ = !status.ok();
  return status;
}

std::optional<Flights::Flight> Flights::next_landed() {
  if (flights_.empty()) return {};
  Flight& first = flights_.front();
  // A device that refuses launches may still run earlier ones. A device that has failed runs none.
  if (first.ticket > stream_->done() && (!is_lost_ || stream_->is_running())) return {};
  Flight landed = std::move(first);
  landed.is_done = landed.ticket <= stream_->done();
  landed_ = landed.ticket;
  nbytes_ -= landed.nbytes;
  flights_.pop_front();
  return landed;
}

Flights::Ticket Flights::last_of(PeerId peer) const noexcept {
  const auto last = std::find_if(flights_.rbegin(), flights_.rend(),
                                 [peer](const Flight& flight) { return flight.peer == peer; });
  return last == flights_.rend() ? 0 : last->ticket;
}

}  // namespace kvxfer::cuda_ipc
