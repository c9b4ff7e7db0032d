// Transfers whose bytes become ours: permitted, scheduled over rails, counted.
//
// Destinations owns them, and ends an expectation with its last writer. destinations.cpp is their life;
// destination_pieces.cpp is how their pieces are posted and counted.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/engine/arrivals.h"
#include "core/engine/expectations.h"
#include "core/engine/parked.h"
#include "core/engine/peer_limits.h"
#include "core/engine/peer_regions.h"
#include "core/engine/sums.h"
#include "core/engine/tag_memory.h"
#include "core/engine/transfer_owner.h"
#include "core/engine/turns.h"

namespace kvxfer {

struct Destination : TransferEnd, Writer {
  Destination() : TransferEnd(TimerKind::kDestination) {}

  Time lease_ttl_ns = kNever;    // of a read: the ttl of its lease
  bool lease_renewable = false;
  Time asked_at = 0;
  std::shared_ptr<Expectation> expectation;
  Parked::Place parked;
  Arrivals arrivals;
  bool listed = false;  // among the destinations that wait for their turn
  bool is_stale = false;  // the source's word had moved on after a piece; posts no more, waits to hear why
  struct PieceSums { std::unordered_map<std::uint32_t, std::uint32_t> here, there; };
  std::unique_ptr<PieceSums> sums;  // with integrity: sums that wait for those of the other end
  // Pieces posted in this round that must be asked for, with their rails, as CREDIT names them.
  std::vector<std::pair<wire::RailName, std::uint32_t>> to_credit;
};

class Destinations final : public TransferOwner<Destination> {
 public:
  Destinations(Context& context, Sessions& sessions, PeerLimits& limits, Rails& rails,
               PeerRegions& peer_regions, Regions& regions, Programs& programs, Leases& leases,
               Expectations& expectations, TagMemory& tag_memory, Admission& admission, Handles& handles,
               Records& records, Draining& draining)
      : TransferOwner(context, sessions, rails, programs, leases, admission, handles, records, draining),
        limits_(limits),
        peer_regions_(peer_regions),
        regions_(regions),
        expectations_(expectations),
        tag_memory_(tag_memory) {}

  // ---- ours: added, then asked for with a REQUEST
  void request(Peer& peer, TransferKey key);
  void layers_ready(TransferKey key, std::uint32_t layers);

  // ---- what peers say; an error breaks the protocol
  Status on(Peer& peer, wire::Offer& offer);
  Status on(Peer& peer, const wire::Accept& accept);
  void on(Peer& peer, const wire::LayersReady& ready);
  void on(Peer& peer, const wire::Checksums& checksums);

  // ---- what happens to them
  void completed(const Rails::Completed& work, const Completion& completion);
  // The parked writes that a lease for a peer, to write, may let in; and such writes begin if they may now.
  std::vector<TransferKey> parked_for(const LeaseTerms& lease) const;
  void let_in(std::span<const TransferKey> parked);
  // For a new expectation: the writes that waited for its tag begin. If none waited, but a write of its tag
  // ended before it was expected, the expectation fails with the reason of that write.
  std::vector<TransferKey> parked_for(const wire::Bytes& tag) const { return parked_.of_tag(tag); }
  void let_in(const Expectation& expectation, std::span<const TransferKey> parked);
  void path_came(SessionKey session, RegionId remote);
  void on_timer(TransferKey key);
  void sum_slice();  // of checksums of arrived pieces
  void post_pieces();  // one of each session in turn, as long as rails take more
  void flush_credits();
  bool has_work() const noexcept {  // in this round: true if any of these three is
    return !sums_.empty() || !turns_.empty() || !asking_.empty();
  }

  // ---- ends
  void fail(TransferKey key, TransferEvent event, Status why, bool tell_peer);
  // Ends the right of its writers. Its handle ends when the last of them has drained.
  void end_expectation(std::uint64_t handle, TransferState state, Status why);
  void remove_session(SessionKey session) { turns_.remove_session(session); }
  // The limit of this session was set or changed, or lets it post again.
  void apply_limit(SessionKey session) {
    turns_.set_apart(session, limits_.is_paced(session));
    turns_.release(session);
  }
  // Added to the reason why an expectation was late: the rate limits of its writers, if they have any.
  std::string pace_in_words(const Expectation& expectation) const;
  void release_streams();

 private:
  // destinations.cpp
  Destination* find(TransferKey key) { return ends_.find(key); }
  Status authorize(Destination& destination);
  void remember(const Destination& destination, const Status& why);
  void begin_moving(Destination& destination, wire::ByteSpan pages = {});
  void finish(Destination& destination);
  void fail(Destination& destination, TransferEvent event, Status why, bool tell_peer);
  void tell_failure(const Destination& destination);
  void drained(Destination& destination) override;
  void give_back(Destination& destination) override { sums_.forget(destination.key); }

  // destination_pieces.cpp
  void list(Destination& destination);
  bool post_next(SessionKey session);
  struct Choice {
    Rail* rail = nullptr;
    bool is_reachable = false;  // over some rail, even if over none now
    unsigned class_end = 0;  // one past the last priority of its class, on the rails that it may use
  };
  Choice choose_rail(const Destination& destination);
  bool lease_ends_soon(const Destination& destination) const;
  void send_credits(Destination& destination);
  void redo(Destination& destination, std::uint32_t piece);
  void piece_in(Destination& destination, std::uint32_t piece);
  void land(Destination& destination, wire::ByteSpan pages);
  void compare_sums(Destination& destination, std::uint32_t piece);
  void count_piece(Destination& destination, std::uint32_t piece);
  void layer_in(Destination& destination, std::uint32_t row);
  void all_in(Destination& destination);
  void unreachable(Destination& destination, const Rails::Completed& work, const Completion& completion);

  PeerLimits& limits_;
  PeerRegions& peer_regions_;
  Regions& regions_;
  Expectations& expectations_;
  TagMemory& tag_memory_;
  Parked parked_;
  Turns turns_;
  Sums sums_{Side::kDst, context_.workers};  // to be compared
  std::vector<TransferKey> asking_;  // destinations with credits to send
};

}  // namespace kvxfer
