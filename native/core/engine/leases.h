// The leases that this agent granted, and what peers told of theirs.
//
// A lease that ends is removed here, and Engine ends the transfers under it. Its fence is complete when the
// last of them has drained (Draining reports that). Blocks on which a peer's right ended are remembered for
// that peer: a transfer that it posted before may be meant for that right.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/ended_rights.h"
#include "core/engine/context.h"
#include "core/engine/regions.h"
#include "core/engine/sessions.h"
#include "core/engine/transfer_end.h"
#include "core/lease.h"
#include "core/linked_list.h"
#include "core/spare_nodes.h"
#include "core/sparse_table.h"

namespace kvxfer {

class Leases {
 public:
  Leases(Context& context, Sessions& sessions, Regions& regions)
      : context_(context), sessions_(sessions), regions_(regions) {}

  // See Engine::grant; tells the holder. `holder` is the one in the terms, null if they name none.
  Result<LeaseId> grant(Peer* holder, LeaseTerms terms);
  // See Engine::extend.
  bool extend(LeaseId id, Time ttl_ns);
  std::optional<LeaseState> state(LeaseId id) const;
  // See Engine::await_acknowledged.
  bool await_acknowledged(LeaseId id);
  // The holder has acknowledged a heartbeat, so it has read everything that was sent before that.
  void acknowledged(const Peer& holder);

  // ---- rights
  // Is there any lease that may allow a part of it? Looks at no block, so a peer without a right costs
  // nothing.
  Status find_any(const TransferEnd& transfer, wire::LeaseMode mode) const;
  // Finds the leases that together cover the transfer's blocks here, among those of the peer or only the
  // one that the transfer names. Writes them to transfer.leases.
  Status find(TransferEnd& transfer, wire::LeaseMode mode) const;
  // How long a reader may act: until the first of the leases that it needs ends. If heartbeats renew all
  // of them, the reader counts the whole time from its newest acknowledged heartbeat; else it counts what
  // is left from its REQUEST.
  struct Window {
    Time ttl_ns;
    bool renewable;
  };
  Window window(const TransferEnd& transfer) const;
  // The transfer begins under the leases that were found, and ends with any of them.
  void let_in(const TransferEnd& transfer);
  void renew(SessionKey holder);  // all leases that it holds, even those that are not looked at now

  // ---- ends, in this order
  std::vector<TransferKey> transfers_under(LeaseId id) const;  // draining ones included
  std::vector<LeaseId> of_region(RegionId region) const;
  std::vector<LeaseId> of_holder(SessionKey holder) const;
  // On its timer: true if its time is over; else the timer is set again.
  bool has_expired(LeaseId id, Status& why);
  const Lease* find(LeaseId id) const {
    auto found = leases_.find(id);
    return found == leases_.end() ? nullptr : &found->second.lease;
  }
  // Ends the right at once. Null: it had ended before. The fence is complete when `num_draining` transfers
  // have drained; with none, tell_ended completes it.
  std::optional<Lease> take(LeaseId id, LeaseEvent event, const Status& why, std::size_t num_draining);
  // Tells the holder that the right has ended. That says nothing about bytes under way.
  void tell_ended(const Lease& lease, const Status& why, std::size_t num_draining);
  void drained(const TransferEnd& transfer);

  // ---- what peers know and told
  EndedRights& ended() noexcept { return ended_rights_; }
  void remove_session(SessionKey holder) {
    holders_.erase(holder);
    ended_rights_.forget_session(holder);
  }
  void told(const Peer& peer, const wire::Lease& lease);
  LeaseId newest_granted(SessionKey grantor) const;
  // How often this end has to renew what the peer granted: eight times in the shortest time of any lease that
  // heartbeats renew. kNever: there was none.
  Time renewal_ns(SessionKey grantor) const;

  // Appends the leases after `last`, at most `most`, and moves `last` on. False: there are no more.
  bool append_views(LeaseId& last, std::size_t most, std::vector<LeaseView>& views) const;

  std::size_t size() const noexcept { return leases_.size() + ending_.size(); }

 private:
  // One block of a lease, among the leases that cover the same block.
  struct OfBlock : Linked<OfBlock> {
    const Lease* lease = nullptr;
    LinkedList<OfBlock>* among = nullptr;
  };
  struct Granted {
    Lease lease;
    Timers::Timer timer;
    std::uint64_t acknowledged_by = 0;  // the holder has heard of it once this heartbeat is acknowledged
    bool awaited = false;  // a caller waits for that
    std::vector<OfBlock> of_blocks;  // of a lease that has a holder and names blocks; listed in Covering
  };
  // The leases of one holder on one region, of one mode: found by their blocks, however many there are.
  struct Covering {
    std::set<LeaseId> leases, of_all_blocks;
    SparseTable<LinkedList<OfBlock>, 256> of_block;  // the oldest lease first
  };
  using Covered = std::pair<RegionId, wire::LeaseMode>;
  struct Holder {
    std::set<LeaseId> leases;  // leases that we granted to it
    std::map<Covered, Covering> covering;
    Time heard_at = 0;  // when its newest heartbeat came, which renewed them
    LeaseId newest_granted = 0;  // among those that it granted
    Time shortest_ns = kNever;   // likewise, if heartbeats renew it
    std::vector<LeaseId> awaited;  // those of `leases` that a caller waits for
  };
  struct Ending {  // the right has ended, and works under it have not
    std::optional<SessionKey> holder;
    LeaseState state;
    Status why;
    std::size_t num_draining;
    RegionId region;
    wire::LeaseMode mode;
    std::optional<std::uint32_t> num_blocks;
    std::string bearer_name;
  };
  const std::string& name_of(SessionKey peer) const;
  const std::string& identity_of(SessionKey peer) const;
  std::string by_certificate(SessionKey peer) const;  // in words; "" where it has none
  Time heard_at(const Lease& lease) const;  // when its holder was heard
  bool admits(const Lease& lease, SessionKey peer) const {
    return lease.admits(peer, name_of(peer), identity_of(peer));
  }
  bool is_known(LeaseId id) const {
    return leases_.contains(id) || ending_.contains(id) || ended_.contains(id);
  }
  // For a transfer that names no lease: the newest one that its poster had been told of, if that may allow
  // a part of it. Mostly it allows everything, and is found among any number of others.
  const Lease* newest_known(const TransferEnd& transfer, wire::LeaseMode mode) const;
  // The one that the transfer names, if it may allow a part of it.
  const Lease* named(const TransferEnd& transfer, wire::LeaseMode mode) const;
  // The leases of its poster, if it names none. Null: there are none.
  const Covering* covering(const TransferEnd& transfer, wire::LeaseMode mode) const;
  const Lease* oldest(const Covering& covering, std::uint32_t block) const;
  void list(Granted& granted, std::uint32_t num_blocks, std::span<const std::uint32_t> blocks);
  void unlist(Granted& granted) noexcept;
  Status none_covers(const TransferEnd& transfer, wire::LeaseMode mode, const std::string& what) const;
  Status check_terms(const LeaseTerms& terms) const;
  LeaseId draw_bearer_id();
  void remove(LeaseId id) noexcept;
  void fenced(LeaseId id, std::optional<SessionKey> holder, LeaseState state, const Status& why);

  Context& context_;
  Sessions& sessions_;
  Regions& regions_;
  LeaseId next_ = 1;
  std::map<LeaseId, Granted> leases_;
  std::map<LeaseId, Ending> ending_;
  std::set<std::pair<RegionId, LeaseId>> by_region_;  // of leases_
  std::set<std::pair<LeaseId, TransferKey>> transfers_;  // under leases_ and ending_
  SpareNodes<std::set<std::pair<LeaseId, TransferKey>>> spare_;
  std::unordered_map<LeaseId, LeaseState> ended_;
  std::deque<LeaseId> ended_ids_;  // in the order of their ends: the newest kMaxEnded
  std::map<SessionKey, Holder> holders_;
  EndedRights ended_rights_;
};

}  // namespace kvxfer
