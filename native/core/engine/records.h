// Tells who watches the agent from beside how transfers and expectations ended: a record for each end, once. Nobody
// watches mostly; then an end costs one look at a pointer.
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

  // Null: none any more. It outlives the engine.
  void watch(RecordRing* ring) noexcept { ring_ = ring; }

  // Nothing of it is posted any more; its state is its last. Of `num_pieces` of its pieces this end knows that they
  // moved.
  void ended(TransferEnd& transfer, std::uint32_t num_pieces) noexcept {
    if (ring_ != nullptr) write(transfer, num_pieces);
  }
  // A peer's was refused before it was taken in. Of its spec's tables nothing may be left.
  void refused(const TransferEnd& transfer, const wire::TransferSpec& spec, const Status& why) noexcept {
    if (ring_ != nullptr) write(transfer, spec, why);
  }
  void ended(const Expectation& expectation, TransferState state, const Status& why) noexcept {
    if (ring_ != nullptr) write(expectation, state, why);
  }

  // Of what is open.
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
