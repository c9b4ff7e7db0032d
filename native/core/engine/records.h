// Records how transfers and expectations ended, for a watcher outside the engine: each end writes one
// record, once. Mostly there is no watcher; then an end costs one look at a pointer.
#pragma once

#include <cstdint>

#include "core/control/wire.h"
#include "core/engine/context.h"
#include "core/engine/transfer_end.h"
#include "core/expectation.h"
#include "core/record_ring.h"

namespace kvxfer {

class Records {
 public:
  explicit Records(Context& context) : context_(context) {}

  // Null: stop recording. The ring outlives the engine.
  void watch(RecordRing* ring) noexcept { ring_ = ring; }

  // None of its works is posted any more, and its state is its last. `num_pieces`: how many of its pieces
  // are known at this end to have moved.
  void ended(TransferEnd& transfer, std::uint32_t num_pieces) noexcept {
    if (ring_ != nullptr) write(transfer, num_pieces);
  }
  // A peer's transfer was refused before it was taken in. The tables in its spec may be gone.
  void refused(const TransferEnd& transfer, const wire::TransferSpec& spec, const Status& why) noexcept {
    if (ring_ != nullptr) write(transfer, spec, why);
  }
  void ended(const Expectation& expectation, TransferState state, const Status& why) noexcept {
    if (ring_ != nullptr) write(expectation, state, why);
  }

  // Describes an open transfer or expectation.
  static void describe(Record& record, const TransferEnd& transfer, std::uint32_t num_pieces) noexcept;
  static void describe(Record& record, const Expectation& expectation) noexcept;

 private:
  void write(TransferEnd& transfer, std::uint32_t num_pieces) noexcept;
  void write(const TransferEnd& transfer, const wire::TransferSpec& spec, const Status& why) noexcept;
  void write(const Expectation& expectation, TransferState state, const Status& why) noexcept;

  Context& context_;
  RecordRing* ring_ = nullptr;
};

}  // namespace kvxfer
