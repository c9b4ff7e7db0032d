#include "core/engine/records.h"

#include <algorithm>
#include <string>
#include <vector>

#include "core/copy/pack.h"

namespace kvxfer {
namespace {

void set_end(Record& record, Outcome outcome, TransferState state, const Status& why, Time at) noexcept {
  record.outcome = outcome;
  record.state = state;
  record.ended_ns = at;
  record.code = static_cast<std::uint16_t>(why.code());
  record.set_message(why.message());
}

// What is known of a transfer before its tables are taken in. Inline: a call costs a tenth of a record.
[[gnu::always_inline]] inline void set_begin(Record& record, const TransferEnd& transfer,
                                             const PieceGrid& grid) noexcept {
  record.transfer = transfer.key.second;
  record.session = transfer.key.first;
  record.role = transfer.is_source() ? RecordRole::kSource : RecordRole::kDestination;
  record.ours = transfer.ours;
  record.handle = transfer.handle == nullptr ? 0 : transfer.handle->id();
  record.region = transfer.region;
  record.num_blocks = grid.num_pairs;
  record.num_layers = grid.num_layers;
  record.posted_ns = transfer.posted_at;
  record.begun_ns = transfer.begun_at;
  record.first_piece_ns = transfer.first_piece_at;
  record.set_rails(transfer.rails.all());
  record.reserved[0] = record.reserved[1] = 0;
}

[[gnu::always_inline]] inline void set_transfer(Record& record, const TransferEnd& transfer,
                                                std::uint32_t num_pieces) noexcept {
  const Move& move = *transfer.move;
  set_begin(record, transfer, move.grid);
  record.remote_region = move.remote_region;
  record.nbytes = transfer_nbytes(*move.program, move.grid);
  record.num_pieces = move.grid.num_pieces();
  record.pieces_done = std::min(num_pieces, record.num_pieces);
  record.priority = transfer.priority;
  record.set_context(transfer.context);
}

void set_expectation(Record& record, const Expectation& expectation) noexcept {
  const Handle& handle = *expectation.handle();
  record.transfer = record.handle = handle.id();
  record.session = expectation.from().value_or(0);
  record.role = RecordRole::kExpectation;
  record.ours = 1;
  record.region = expectation.region();
  record.remote_region = record.nbytes = 0;
  record.num_blocks = static_cast<std::uint32_t>(expectation.blocks().size());
  record.num_layers = expectation.num_layers();
  record.num_pieces = record.pieces_done = 0;
  record.priority = 0;
  record.posted_ns = record.begun_ns = handle.posted_at();
  record.first_piece_ns = handle.first_piece_at();
  record.reserved[0] = record.reserved[1] = 0;
  handle.read([&](const wire::Bytes& context, const std::vector<std::string>& rails) {
    record.set_context(context);
    record.set_rails(std::span<const std::string>(rails));
  });
}

}  // namespace

void Records::write(TransferEnd& transfer, std::uint32_t num_pieces) noexcept {
  // If memory was lacking for the rest of its end, the end is taken up again.
  if (std::exchange(transfer.is_recorded, true)) return;
  const Outcome outcome = outcome_of(transfer.state);
  ring_->push([&](Record& record) {
    set_transfer(record, transfer, num_pieces);
    if (outcome == Outcome::kDone) record.pieces_done = record.num_pieces;
    set_end(record, outcome, transfer.state, transfer.reason, context_.now);
  });
}

void Records::write(const TransferEnd& transfer, const wire::TransferSpec& spec, const Status& why) noexcept {
  ring_->push([&](Record& record) {
    if (transfer.move != nullptr) {
      set_transfer(record, transfer, 0);
    } else {
      set_begin(record, transfer, spec.grid);
      record.remote_region = record.nbytes = 0;
      record.num_pieces = record.pieces_done = 0;
      record.priority = spec.priority;
      record.set_context(spec.context);
    }
    record.posted_ns = context_.now;
    const bool is_cancelled = why.code() == Code::kCancelled;
    set_end(record, is_cancelled ? Outcome::kCancelled : Outcome::kFailed,
            is_cancelled ? TransferState::kCancelled : TransferState::kFailed, why, context_.now);
  });
}

void Records::write(const Expectation& expectation, TransferState state, const Status& why) noexcept {
  ring_->push([&](Record& record) {
    set_expectation(record, expectation);
    set_end(record, outcome_of(state), state, why, context_.now);
  });
}

void Records::describe(Record& record, const TransferEnd& transfer, std::uint32_t num_pieces) noexcept {
  set_transfer(record, transfer, num_pieces);
  set_end(record, Outcome::kPending, transfer.state, transfer.reason, 0);
}

void Records::describe(Record& record, const Expectation& expectation) noexcept {
  set_expectation(record, expectation);
  set_end(record, Outcome::kPending, TransferState::kMoving, {}, 0);
}

}  // namespace kvxfer
