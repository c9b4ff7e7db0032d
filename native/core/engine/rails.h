// The rails of all peers, and the works that are under way on them.
//
// Counts outstanding works, posts them, and says whose work has completed. After a rail has said "again",
// works of that class of priorities rest on it until the next round. If a rail is silent while pieces are
// due, Engine decides whether to give it up. peer_regions.h knows which rail reaches which region.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/transfer_end.h"
#include "core/spare_nodes.h"

namespace kvxfer {

class Rail {
 public:
  const RailInfo& info() const noexcept { return info_; }
  const Capabilities& capabilities() const noexcept { return info_.capabilities; }
  RailId id() const noexcept { return info_.id; }
  SessionKey session() const noexcept { return session_; }
  // The pieces of one class on this rail.
  class Lane {
   public:
    std::uint32_t outstanding() const noexcept { return outstanding_; }
    bool said_again() const noexcept { return said_again_; }

   private:
    friend class Rail;
    friend class Rails;
    void count_posted(Time now) noexcept;
    void measure(std::uint32_t window, Time now) noexcept;
    std::uint32_t outstanding_ = 0;  // pieces that we wait for
    Time pace_ns_ = 0;  // time between two pieces while enough of them are under way; 0: not known
    Time measured_at_ = 0;
    std::uint32_t num_measured_ = 0;  // since then
    bool said_again_ = false;  // the rail said "again" in this round
  };
  std::size_t class_of(std::uint8_t priority) const noexcept { return capabilities().classes.of(priority); }
  const Lane& lane(std::uint8_t priority) const noexcept { return lanes_[class_of(priority)]; }
  std::uint32_t outstanding() const noexcept { return outstanding_; }
  bool is_full(std::uint8_t priority) const noexcept {
    return lane(priority).outstanding_ >= capabilities().window;
  }
  // True if one more piece of ours would arrive sooner than over the other rail, at their recent speeds.
  bool is_sooner(const Rail& other, std::uint8_t priority) const noexcept;

 private:
  friend class Rails;
  RailInfo info_;
  SessionKey session_ = 0;
  std::uint32_t outstanding_ = 0;  // pieces that we wait for on it
  std::array<Lane, PriorityClasses::kMost> lanes_;
  Time moved_at_ = 0;  // when something last came over it, or was first waited for
  bool forgiven_ = false;  // since then, one standstill of our own was not held against it
  Timers::Timer watch_;
  std::vector<WorkId> stopped_;  // works to be cancelled
};

class Rails {
 public:
  explicit Rails(Context& context) : context_(context) {}

  // ---- up and down
  Rail& add(SessionKey session, const RailInfo& info);
  Rail* find(RailId id) {
    auto found = rails_.find(id);
    return found == rails_.end() ? nullptr : &found->second;
  }
  // Rails that are up, in the order in which they came.
  const std::vector<Rail*>& of(SessionKey session) const;
  bool any(SessionKey session, std::string_view transport) const;  // among those
  bool was_lost(SessionKey session, const std::string& transport) const;
  Rail* at(SessionKey session, std::uint16_t index);  // the rail that is up; null if there is none
  void remove(Rail& rail);  // it went down
  void drop_session(SessionKey session);  // and drops its rails at the host

  // ---- switched off, by the name of the transport: its rails do not come up
  bool is_off(std::string_view transport) const { return !off_.empty() && off_.contains(transport); }
  void set_off(const std::string& transport, bool off) {
    if (off)
      off_.insert(transport);
    else
      off_.erase(transport);
  }
  std::vector<std::string> all_off() const { return {off_.begin(), off_.end()}; }

  // ---- not up: the newest use of each index
  void expect(SessionKey session, const wire::RailName& rail);  // it is being dialled again
  void give_up(SessionKey session, const wire::RailName& rail);  // it did not come up
  bool is_expected(SessionKey session, const wire::RailName& rail) const;
  // That attempt of a rail that is not up.
  bool is_over(SessionKey session, const wire::RailName& rail) const;

  // ---- works
  // kFetch or kReceive: how the rail is to bring this piece.
  WorkKind kind_to_bring(const Rail& rail, const Move& move, std::uint32_t piece) const {
    const Capabilities& takes = rail.capabilities();
    if (takes.one_sided && takes.two_sided) return context_.host.choose(rail.id(), move, piece);
    return takes.one_sided ? WorkKind::kFetch : WorkKind::kReceive;
  }
  // Numbers the work and posts it. If the rail accepts it, the work is under way, and the transfer
  // remembers it.
  Code post(Rail& rail, Work& work, TransferEnd& transfer);
  // Posts no more works of that class on the rail in this round.
  void note_again(Rail& rail, std::uint8_t priority);
  // The posted works of an ended transfer are to end. The engine no longer waits for them: they keep no
  // other work from being posted, and the rail does not count as silent because of them. The rail itself
  // bounds what it has under way.
  void stop(const TransferEnd& transfer);
  // Sends the cancellations: one call to each rail, for all works stopped since the last time. Due before
  // the gate is released.
  void cancel_stopped();
  struct Completed {
    WorkKind kind;
    TransferKey transfer;
    std::uint32_t piece;
    RailId rail_id;
    Rail* rail;  // null: it is down
  };
  std::optional<Completed> completed(const Completion& completion);
  // Pieces that this end waits for, over all peers; and those of the rails' classes with this number.
  std::uint32_t outstanding() const noexcept { return outstanding_; }
  std::uint32_t outstanding(std::size_t of_class) const noexcept { return outstanding_of_[of_class]; }
  std::size_t num_works() const noexcept { return works_.size(); }

  // ---- silence
  // On its timer, which is `late` by so much: are pieces due on the rail, and did nothing come for as long
  // as would end a session? False: no, and it is watched on.
  bool is_silent(RailId id, Time late);
  void watch_on(Rail& rail);  // it is silent, and kept

  void begin_round();
  bool has_work() const noexcept { return !saying_again_.empty() || !stopping_.empty(); }  // in this round

 private:
  struct Attempt {
    std::uint32_t number = 0;
    bool expected = false;
  };
  const Attempt* newest(SessionKey session, std::uint16_t index) const;
  struct OfSession {
    std::vector<Rail*> alive;
    std::map<std::uint16_t, Attempt> newest;  // by index
    std::set<std::string> lost;  // transports of rails that were up and went down
  };
  struct Record {
    WorkKind kind;
    TransferKey transfer;
    RailId rail;
    std::uint32_t piece;
    std::uint8_t of_class;  // of the rail's
    bool stopped = false;
  };
  // Of what the peer brings us; a piece that we send is not waited for.
  static bool is_awaited(WorkKind kind) noexcept { return kind != WorkKind::kSend; }
  void count_posted(Rail& rail, std::size_t of_class);
  void forget_due(Rail* rail, std::size_t of_class) noexcept;
  // Withdraws the transfer's last work, which was not accepted.
  void forget_posted(WorkId work, TransferEnd& transfer);
  void watch(Rail& rail, Time at) { context_.timers.set(rail.watch_, at, TimerKind::kRail, rail.info_.id); }

  Context& context_;
  std::map<RailId, Rail> rails_;
  std::set<std::string, std::less<>> off_;
  std::map<SessionKey, OfSession> sessions_;
  std::unordered_map<WorkId, Record> works_;
  SpareNodes<std::unordered_map<WorkId, Record>> spare_works_;
  WorkId next_work_ = 1;
  std::uint32_t outstanding_ = 0;
  std::array<std::uint32_t, PriorityClasses::kMost> outstanding_of_{};
  std::vector<RailId> saying_again_;
  std::vector<RailId> stopping_;  // rails with works to be cancelled
};

}  // namespace kvxfer
