// Transfers whose bytes are ours: offered by us, or asked for by a peer that holds a lease.
//
// Owns them and their fence words. A destination posts what it fetches by itself; over rails of two sides it asks
// by CREDIT, and what it asked for is sent from here.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "core/engine/admission.h"
#include "core/engine/draining.h"
#include "core/engine/fence_slots.h"
#include "core/engine/handles.h"
#include "core/engine/leases.h"
#include "core/engine/programs.h"
#include "core/engine/rails.h"
#include "core/engine/records.h"
#include "core/engine/sessions.h"
#include "core/engine/sums.h"
#include "core/engine/transfer_end.h"
#include "core/engine/transfer_table.h"

namespace kvxfer {

struct Source : TransferEnd {
  Source() : TransferEnd(TimerKind::kSource) {}

  std::optional<FenceSlots::Slot> fence;  // while its right holds
  std::map<wire::RailName, std::list<Run>> to_send;  // by rail; lists: empty, they have allocated nothing
  std::uint64_t num_early = 0;  // of them, pieces over rails that were not up
  std::uint64_t num_credited = 0;  // pieces, those asked for again too
  std::uint32_t num_sent = 0;  // likewise
  // Runs that wait to be sent and summed: beyond a few the peer is charged for as many as they were at most.
  std::size_t most_runs = 64;
  Charge runs;
};

class Sources {
 public:
  Sources(Context& context, Sessions& sessions, Rails& rails, Programs& programs, Leases& leases,
          Admission& admission, Handles& handles, Records& records, Draining& draining)
      : context_(context),
        sessions_(sessions),
        rails_(rails),
        programs_(programs),
        leases_(leases),
        admission_(admission),
        handles_(handles),
        records_(records),
        draining_(draining),
        fences_(context, FenceTable::kSlots),
        old_fences_(context, FenceTable::kOldSlots) {}

  // ---- ours: queued, then told with an OFFER. False: no fence word is free for it, later
  Source& add(std::unique_ptr<Source> source);
  bool offer(Peer& peer, TransferKey key);
  void layers_ready(TransferKey key, std::uint32_t layers);

  // ---- what peers say; an error breaks the protocol
  Status on(Peer& peer, wire::Request& request);
  Status on(Peer& peer, const wire::Credit& credit);
  void on(Peer& peer, const wire::Done& done);
  void on(Peer& peer, const wire::Fail& told, Status why);

  // ---- what happens to them
  void sent(const Rails::Completed& work, const Completion& completion);
  void rail_up(const Rail& rail);
  void rail_down(const Rail& rail);
  void on_timer(TransferKey key);
  // Once a round: pieces that wait for their rail, and a slice of checksums.
  void send_waiting();
  void sum_slice();
  bool has_work() const noexcept { return !sending_.empty() || !sums_.empty(); }  // in this round

  // ---- ends
  const TransferTable<Source>& all() const noexcept { return sources_; }  // those that drain, too
  void fail(TransferKey key, TransferEvent event, Status why, bool tell_peer);
  void remove_session(SessionKey session) {
    for (FenceSlots* fences : {&fences_, &old_fences_}) fences->remove_session(session);
  }
  void let_streams_go();
  void abandon();  // what is posted completes no more

  std::size_t size() const noexcept { return sources_.size(); }
  std::size_t num_fences() const noexcept { return fences_.num_used() + old_fences_.num_used(); }

 private:
  Status charge_runs(const Peer& peer, Source& source) const;
  void send_pieces(Source& source);
  void hear(Source& source, const wire::Bytes& context);
  void fail(Source& source, TransferEvent event, Status why, bool tell_peer);
  void end_again(Source& source);
  void drained(Source& source);
  FenceSlots& fences_of(const Peer& peer) noexcept {
    return peer.session().fence_slots().first == FenceTable::kSlots.first ? fences_ : old_fences_;
  }
  void release_fence(Source& source);
  void forget_asked(Source& source);

  Context& context_;
  Sessions& sessions_;
  Rails& rails_;
  Programs& programs_;
  Leases& leases_;
  Admission& admission_;
  Handles& handles_;
  Records& records_;
  Draining& draining_;
  FenceSlots fences_, old_fences_;  // of which a session has the one or the other
  TransferTable<Source> sources_;
  std::set<TransferKey> sending_;  // with pieces that wait for a rail that said "again"
  Sums sums_{Side::kSrc, context_.workers};  // to be told
};

}  // namespace kvxfer
