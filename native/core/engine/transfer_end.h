// One end of a transfer: what a source and a destination have in common. Its owner (Sources or Destinations) passes
// it to the parts below, which read it and write what stands at each field.
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
#include "core/handle.h"
#include "core/lease.h"
#include "core/linked_list.h"
#include "core/rail_names.h"
#include "core/region_table.h"
#include "core/transfer.h"
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
  std::shared_ptr<Handle> handle;  // of our caller, if there is one
  std::shared_ptr<Move> move;  // its tables: TransferEnd::Told
  RegionId region = 0;  // at this end
  MemoryKind memory = MemoryKind::kHost;  // that it lies in
  std::uint32_t program = 0;
  wire::Bytes notify;
  wire::Bytes context;  // whose request it is: as this end says, else as the other
  bool tells_context = false;  // the destination says so, and its source has not heard of it
  std::uint8_t priority = 0;
  bool integrity = false;
  std::uint32_t eager_nbytes = 0;  // a source's: of pages that go with its OFFER
  Time timeout_ns = 0;
  std::uint32_t layers_ready = 0;
  Status reason;  // once it fails
  // Posted, or heard of; its bytes might move; the first piece had arrived, or was sent. 0: not yet, or not known here.
  Time posted_at = 0, begun_at = 0, first_piece_at = 0;
  RailNames rails;  // that brought it, as far as this end knows
  bool is_recorded = false;  // how it ended: Records
  LeaseId lease = 0;  // as in TransferSpec
  bool lease_named = false;
  std::vector<LeaseId> leases;  // that allow it: Leases::find
  std::uint32_t lacks_block = 0;  // the first that no lease allows, where Leases::find found one
  Charge tables, event;  // a peer's, of its budget: Admission. `event` goes with the notification
  bool counted = false;  // among the open of its session: Admission
  Timers::Timer timer;  // its deadline; once it drains, the next line for the log
  Time draining_since = 0;  // Draining
  std::vector<std::pair<WorkId, RailId>> posted;  // few, as many as rails have windows for: Rails::post

  bool is_source() const noexcept { return timer_kind == TimerKind::kSource; }
  RegionId remote_region() const noexcept { return move->remote_region; }
  void set_timer(Timers& timers, Time at) { timers.set(timer, at, timer_kind, key.first, key.second); }
  void forget_work(WorkId work);
  std::string name() const;  // for the log: its number, and whose request it is
  std::string unreleased(const char* where) const;  // why a deadline came before its last layer was released

  // What a peer's spec says of it, whose tables this takes.
  void take(wire::TransferSpec& spec, std::shared_ptr<const CopyProgram> copies, const Region& local,
            RegionId remote);
  // What is told to a peer, before any of it is posted. The frame has the transfer's tables and bytes until this ends,
  // so that none of them is copied to be encoded.
  class Told {
   public:
    Told(TransferEnd& transfer, wire::TransferSpec& spec);
    ~Told() { exchange(); }
    Told(const Told&) = delete;
    Told& operator=(const Told&) = delete;

   private:
    void exchange() noexcept;
    TransferEnd& transfer_;
    wire::TransferSpec& spec_;
  };
};

// As who awaits it is told. What went wrong with rails, or with what one of them was given, is that nothing brings
// its bytes.
Status as_loss(Status why);

// The blocks at one side of the pairs that are set, each once, in the order of the table.
std::vector<std::uint32_t> blocks_of(const Move& move, Side side, const std::vector<bool>& pairs);

}  // namespace kvxfer
