// Transfers whose bytes are ours: offered by us, or requested by a peer that holds a lease.
//
// Sources owns them and their fence words. On one-sided rails the destination fetches the pieces itself. On
// two-sided rails it asks for them by CREDIT, and they are sent from here.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "core/engine/fence_slots.h"
#include "core/engine/sums.h"
#include "core/engine/transfer_owner.h"

namespace kvxfer {

struct Source : TransferEnd {
  Source() : TransferEnd(TimerKind::kSource) {}

  std::optional<FenceSlots::Slot> fence;  // while its right holds
  // By rail; lists, since an empty one has allocated nothing.
  std::map<wire::RailName, std::list<Run>> to_send;
  std::uint64_t num_early = 0;  // of them, pieces for rails that were not up
  std::uint64_t num_credited = 0;  // pieces that were asked for, repetitions included
  std::uint32_t num_sent = 0;  // pieces, repetitions included
  // The most runs that waited to be sent and summed at a time; the peer is charged for those beyond a few.
  std::size_t most_runs = 64;
  Charge runs;
};

class Sources final : public TransferOwner<Source> {
 public:
  Sources(Context& context, Sessions& sessions, Rails& rails, Programs& programs, Leases& leases,
          Admission& admission, Handles& handles, Records& records, Draining& draining)
      : TransferOwner(context, sessions, rails, programs, leases, admission, handles, records, draining),
        fences_(context) {}

  // ---- ours: added, then announced by an OFFER. False: no fence word is free for it; try later
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
  // Once a round: sends pieces that wait for their rail, and computes a slice of checksums.
  void send_waiting();
  void sum_slice();
  bool has_work() const noexcept { return !sending_.empty() || !sums_.empty(); }  // in this round

  // ---- ends
  void fail(TransferKey key, TransferEvent event, Status why, bool tell_peer);
  void remove_session(SessionKey session) { fences_.remove_session(session); }
  void release_streams();

  std::size_t num_fences() const noexcept { return fences_.num_used(); }

 private:
  Status charge_runs(const Peer& peer, Source& source) const;
  void send_pieces(Source& source);
  void hear(Source& source, const wire::Bytes& context);
  void fail(Source& source, TransferEvent event, Status why, bool tell_peer);
  bool is_under_way(const Source& source) const override;
  void drained(Source& source) override;
  void give_back(Source& source) override;

  FenceSlots fences_;
  std::set<TransferKey> sending_;  // sources with pieces that wait because a rail said "again"
  Sums sums_{Side::kSrc, context_.workers};  // to be told
};

}  // namespace kvxfer
