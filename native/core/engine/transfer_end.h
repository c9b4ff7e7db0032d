// One end of a transfer: what a source and a destination have in common. Its owner (Sources or Destinations)
// passes it to other parts. These read it, and write the fields that name them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/control/wire.h"
#include "core/engine/timers.h"
#include "core/engine_host.h"
#include "core/few.h"
#include "core/handle.h"
#include "core/lease.h"
#include "core/linked_list.h"
#include "core/rail_names.h"
#include "core/region.h"
#include "core/transfer_states.h"
#include "kvxfer/budget.h"
#include "kvxfer/transport.h"

namespace kvxfer {

using TransferKey = std::pair<SessionKey, TransferId>;

struct TransferEnd : Linked<TransferEnd> {
  explicit TransferEnd(TimerKind which) : timer_kind(which) {}

  const TimerKind timer_kind;
  TransferKey key;
  bool ours = false;  // posted at this end
  TransferState state = TransferState::kQueued;
  std::shared_ptr<Handle> handle;  // of our caller; null if there is none
  std::shared_ptr<Move> move;  // its tables: TransferEnd::LentTables
  RegionId region = 0;  // at this end
  MemoryKind memory = MemoryKind::kHost;  // the kind of memory that the region lies in
  std::uint32_t program = 0;  // as the peer is told of it, or has told it: Programs::number
  wire::Bytes notify;
  wire::Bytes context;  // whose request it is: as this end's caller says, else as the other end's says
  bool tells_context = false;  // the destination says so, and its source has not heard of it
  std::uint8_t priority = 0;
  bool integrity = false;
  std::uint32_t eager_nbytes = 0;  // at a source: bytes of pages that go with its OFFER
  Time timeout_ns = 0;
  std::uint32_t layers_ready = 0;
  Status reason;  // once it fails
  // When it was posted or heard of; when its bytes were first allowed to move; when the first piece had
  // arrived or was sent. 0: not yet, or not known here.
  Time posted_at = 0, begun_at = 0, first_piece_at = 0;
  RailNames rails;  // rails that brought it, as far as this end knows
  bool is_recorded = false;  // Records has recorded how it ended
  LeaseId lease = 0;  // as in TransferSpec
  bool lease_named = false;
  // Of a write, kFlagLastWord: at its source until the word has come, at its destination until it was sent.
  bool owes_word = false;
  Few<LeaseId, 2> leases;  // leases that allow it: Leases::find
  std::uint32_t lacks_block = 0;  // the first block that no lease allows, if Leases::find found one
  Charge tables, event;  // to a peer's budget: Admission. `event` goes with the notification
  bool counted = false;  // among the open transfers of its session: Admission
  Timers::Timer timer;  // its deadline; once it drains, the next line for the log
  Time draining_since = 0;  // Draining
  struct Posted {
    WorkId work;
    RailId rail;
  };
  Few<Posted, 2> posted;  // at most as many as the windows of rails: Rails::post

  bool is_source() const noexcept { return timer_kind == TimerKind::kSource; }
  RegionId remote_region() const noexcept { return move->remote_region; }
  void set_timer(Timers& timers, Time at) { timers.set(timer, at, timer_kind, key.first, key.second); }
  void forget_work(WorkId work);
  std::string name() const;  // for the log: its number, and whose request it is
  std::string unreleased(const char* where) const;  // why a deadline came before its last layer was released

  // Takes over what a peer's spec says, tables included.
  void take(wire::TransferSpec& spec, std::shared_ptr<const CopyProgram> copies, const Region& local,
            RegionId remote);
  // Builds what a peer is told of the transfer, before any of it is posted. The frame holds the transfer's
  // tables and bytes until this object is destroyed, so that encoding copies none of them.
  class LentTables {
   public:
    LentTables(TransferEnd& transfer, wire::TransferSpec& spec);
    ~LentTables() { exchange(); }
    LentTables(const LentTables&) = delete;
    LentTables& operator=(const LentTables&) = delete;

   private:
    void exchange() noexcept;
    TransferEnd& transfer_;
    wire::TransferSpec& spec_;
  };
};

// The reason as a waiter hears it. A failure of rails, or of something that one rail was given, becomes "no
// path": nothing brings the bytes.
Status as_loss(Status why);

// The blocks at one side of the pairs whose bit is set, each once, in the order of the table.
std::vector<std::uint32_t> blocks_of(const Move& move, Side side, const std::vector<bool>& pairs);

}  // namespace kvxfer
