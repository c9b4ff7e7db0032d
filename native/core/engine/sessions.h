// The conversations with peers: how they begin, what goes out on them, and why they ended.
//
// Owns each Session, which judges its own handshake and silence (core/control/session.cpp). Other parts read
// the state of a session from its Peer, and send frames with send(). A session ends in Engine, which tells
// every part.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/control/session.h"
#include "core/control/wire.h"
#include "core/engine/context.h"
#include "core/linked_list.h"

namespace kvxfer {

// Kept notes about what went wrong with one peer, or with one region of a peer.
inline constexpr std::size_t kMaxNotes = 64;

// A name, and the open sessions of its peers. It belongs to one process: sessions of others wait, in the order
// in which they came, until no session of that process is left, or until one of them answers.
struct PeerName : Linked<PeerName> {
  wire::Id128 owner{};  // the process, by its incarnation
  std::set<SessionKey> owners;  // its sessions
  Time answered_at = 0;  // an owner has acknowledged a heartbeat that was sent then
  std::set<std::pair<Time, SessionKey>> waiting;  // since when
  std::set<std::pair<wire::Id128, SessionKey>> by_process;  // the same
  bool is_undecided = false;  // in the list of those that are
};
using PeerNames = std::map<std::string, PeerName>;

class Peer : public Linked<Peer> {
 public:
  Peer(SessionKey key, std::unique_ptr<Session> session, const Budget::Amounts& limits)
      : key_(key), session_(std::move(session)), budget_(std::make_shared<Budget>(limits)) {}

  SessionKey key() const noexcept { return key_; }
  Session& session() noexcept { return *session_; }
  const Session& session() const noexcept { return *session_; }
  const std::string& name() const noexcept { return session_->peer().name; }
  SessionRole role() const noexcept { return session_->role(); }
  bool is_open() const noexcept { return session_->state() == SessionState::kOpen; }
  bool was_open() const noexcept { return was_open_; }
  bool is_up() const noexcept { return up_; }  // callers were told of it
  bool regions_known() const noexcept { return regions_known_; }
  std::uint32_t rails_pending() const noexcept { return rails_pending_; }
  std::vector<std::string> notes() const;  // what went wrong on the way, for people
  const std::string& rail_note(std::uint16_t index) const { return rail_notes_.at(index); }
  const std::shared_ptr<Budget>& budget() const noexcept { return budget_; }  // of the session and its rails
  // Both ends number transfers in one space: the initiator of the session takes the even numbers.
  TransferId first_transfer() const noexcept { return role() == SessionRole::kInitiator ? 2 : 1; }
  bool numbers(TransferId id) const noexcept { return id % 2 != first_transfer() % 2; }
  Sender described() const {
    return {name(), session_->peer().incarnation, role() == SessionRole::kInitiator, session_->identity()};
  }

 private:
  friend class Sessions;
  const SessionKey key_;
  const std::unique_ptr<Session> session_;
  const std::shared_ptr<Budget> budget_;
  std::vector<std::string> notes_;
  std::map<std::uint16_t, std::string> rail_notes_;  // by index: why it is not up
  std::shared_ptr<const Sender> sender_;  // once it has sent mail
  std::optional<PeerNames::iterator> name_;
  std::optional<Time> waits_since_;  // for its name
  std::uint64_t told_regions_ = 0;  // the newest change of our regions that it was told
  bool is_behind_ = false;  // it has not been told of all of them, and is in that list
  Time heartbeat_seen_ = 0;
  std::uint64_t acknowledgement_seen_ = 0;
  bool was_open_ = false, regions_known_ = false, up_ = false;
  std::uint32_t rails_pending_ = 0;  // that session_open started
  bool stirred_ = false;  // it has something to say
  Timers::Timer timer_, newcomer_timer_;
};

class Sessions {
 public:
  explicit Sessions(Context& context) : context_(context), config_(context.config.session) {}

  // The secrets that sessions accept if they begin from now on. `second`: "" for none.
  void set_secrets(std::string first, std::string second);

  Peer& add(SessionRole role);
  // Removes the peer, and keeps the reason for later questions. A reference to the peer is valid for this
  // round.
  void remove(SessionKey key, const Status& why);

  Peer* find(SessionKey key) {
    auto found = peers_.find(key);
    return found == peers_.end() ? nullptr : found->second.get();
  }
  const Peer* find(SessionKey key) const {
    auto found = peers_.find(key);
    return found == peers_.end() ? nullptr : found->second.get();
  }
  Peer* find_open(SessionKey key) {
    Peer* peer = find(key);
    return peer != nullptr && peer->is_open() ? peer : nullptr;
  }
  // Why there is no open session of that key.
  Status lost_status(SessionKey key) const;
  Session* find_session(const wire::Id128& id, SessionKey& key);
  std::vector<SessionKey> keys() const;
  SessionKey next_key() const noexcept { return next_key_; }  // sessions are numbered as they come
  std::vector<SessionKey> up() const;  // those that callers were told of
  std::vector<SessionKey> named(const std::string& name) const;  // open ones with peers of that name
  // Calls `work` with each peer that there is; it adds and removes none.
  template <class Work>
  void for_each(Work&& work) {
    for (const auto& [key, peer] : peers_) work(*peer);
  }

  // ---- names: a new peer waits while a session of its name, of another process, may still answer
  bool take_name(Peer& peer);  // false: it waits
  bool is_held(const Peer& peer) const noexcept { return peer.waits_since_.has_value(); }
  bool is_contested(const Peer& peer) const noexcept;  // another new peer waits for its name
  void answered(const Peer& peer) noexcept;  // it has acknowledged a heartbeat
  // On its timer. Returns the sessions that have not answered; the timer is armed again.
  std::vector<SessionKey> waited_enough(Peer& peer);
  // What names need, one step at a time: a peer that waits gets its name, or is refused.
  struct Decided {
    SessionKey key;
    bool gets_name;
  };
  std::optional<Decided> next_decided();
  bool has_undecided() const noexcept { return !undecided_.empty(); }
  void admit(Peer& peer);  // it waits no more

  // ---- changes of our regions: peers are told one after the other, since there may be many
  void all_behind() noexcept;  // those that were told of regions before
  Peer* first_behind() const noexcept { return behind_.first(); }
  static Peer* next_behind(const Peer& peer) noexcept { return LinkedList<Peer>::after(peer); }
  bool is_behind(const Peer& peer) const noexcept { return peer.is_behind_; }
  std::uint64_t told_regions(const Peer& peer) const noexcept { return peer.told_regions_; }
  void told_regions(Peer& peer, std::uint64_t change) noexcept { peer.told_regions_ = change; }
  void knows_all(Peer& peer) noexcept;

  // ---- state of the connection; after each call the session's output has to be flushed
  void dialling(Peer& peer);
  // Returns nothing for the session's own frames. An error: it closed for that reason.
  Result<std::optional<wire::Message>> receive(Peer& peer, wire::ByteSpan frame);
  // True once; from then on it is found by its name, and by its number if this end took the call.
  bool has_opened(Peer& peer);
  bool heard_heartbeat(Peer& peer);  // true once for each
  bool heard_acknowledgement(Peer& peer);  // of ours; true once for each
  Status disconnected(Peer& peer, const std::string& why);
  Status on_timer(Peer& peer);

  // ---- coming up
  bool regions_told(Peer& peer) { return !std::exchange(peer.regions_known_, true); }  // true once
  void await_rails(Peer& peer, std::uint32_t count) { peer.rails_pending_ = count; }
  void rail_settled(Peer& peer) { peer.rails_pending_ -= peer.rails_pending_ > 0 ? 1 : 0; }
  // True once: the peer waits for nothing any more.
  bool comes_up(const Peer& peer) const {
    return !peer.up_ && peer.regions_known_ && peer.rails_pending_ == 0;
  }
  void set_up(Peer& peer) { peer.up_ = true; }
  void note(Peer& peer, std::string words) {  // keeps the newest notes
    if (peer.notes_.size() == kMaxNotes) peer.notes_.erase(peer.notes_.begin());
    peer.notes_.push_back(std::move(words));
  }
  // kRegion or kRegionGone. An error: more events of the peer wait than its budget has room for.
  Status tell_caller(const Peer& peer, EventKind kind, RegionId region);
  void note_rail(Peer& peer, std::uint16_t index, std::string words) {
    peer.rail_notes_[index] = std::move(words);
  }
  void forget_rail(Peer& peer, std::uint16_t index) { peer.rail_notes_.erase(index); }  // it is up

  // ---- what goes out
  void send(Peer& peer, const wire::Message& message);  // goes out with the next flush
  // Sends FAIL. `context`: as in wire::Fail.
  void refuse(Peer& peer, TransferId transfer, const Status& why, const wire::Bytes& context = {});
  void say_goodbye(Peer& peer, Code code, const std::string& text);
  void hurry_heartbeat(Peer& peer);
  // False: its connection holds as much unsent as it may. What can wait goes out later.
  bool takes_more(const Peer& peer);
  Status check_room(const Peer& peer, std::size_t nbytes);  // for a frame of a caller's that cannot
  // If memory is lacking for what goes out, the session ends.
  void flush(Peer& peer) {
    context_.serve(peer.key_, [&] { put_out(peer); });
  }
  void flush_stirred();
  bool has_work() const noexcept { return !stirred_.empty(); }  // in this round: that

  std::optional<PeerView> view(SessionKey key) const;  // without rails
  std::shared_ptr<const Sender> sender(SessionKey key);  // one object for all mail of the session

 private:
  void put_out(Peer& peer);
  void schedule(Peer& peer);
  void await_answer(Peer& peer);
  void unsettle(PeerName& name) noexcept;
  void forget_names(const Peer& peer) noexcept;

  Context& context_;
  SessionConfig config_;  // for the next session
  SessionKey next_key_ = 1;
  std::map<SessionKey, std::unique_ptr<Peer>> peers_;
  // Of open sessions that this end took: this end drew their numbers.
  std::map<wire::Id128, SessionKey> by_id_;
  PeerNames names_;  // of all that have opened
  LinkedList<PeerName> undecided_;
  LinkedList<Peer> behind_;
  std::map<SessionKey, PeerView> lost_;  // the newest kMaxLost
  // Sessions that a round has to flush, so that idle peers cost nothing.
  std::vector<SessionKey> stirred_;
  std::vector<wire::Bytes> outgoing_;  // frames of one of them; kept, as making the vector costs
};

}  // namespace kvxfer
