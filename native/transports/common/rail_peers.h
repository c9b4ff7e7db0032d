// The common part of all rails whose socket carries no pages. It keeps each peer's socket, over which the two
// ends exchange what they need to move pages another way (side_channel.h), and the peer's works that wait for
// their turn.
//
// A transport derives from RailPeers<Peer>, with a Peer of its own that derives from RailPeer<Message>.
#pragma once

#include <sys/epoll.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/copy/sliced_copy.h"
#include "kvxfer/transport.h"
#include "transports/common/completion_queue.h"
#include "transports/common/side_channel.h"
#include "transports/common/work_queue.h"

namespace kvxfer {

template <class MessageOfRail>
struct RailPeer {
  using Message = MessageOfRail;

  RailPeer(PeerId number, UniqueFd socket, const ConnectInfo& info)
      : id(number), name(info.peer_name), budget(info.budget), channel(std::move(socket), info.cipher) {}

  const PeerId id;
  const std::string name;
  const std::shared_ptr<Budget> budget;  // limits what it may make us hold; null: no limit
  SideChannel<Message> channel;
  bool up = false, down = false;
  WorkQueue queue;
  // The work that the processor copies, a slice at a time (copying_rail.h).
  struct Copy {
    Copy(Work its, const SlicedCopy& its_slices, std::uint64_t end)
        : work(std::move(its)), slices(its_slices), src_end(end) {}
    Work work;
    SlicedCopy slices;
    std::uint64_t src_end;  // of the piece, from the source region's base
  };
  std::optional<Copy> copy;

  bool is_active = false;  // is in active_
  std::size_t num_unread = 0;  // messages, at most
  std::uint64_t num_told = 0;  // of what is told to all: the number of the next one for it
};

template <class Peer>
class RailPeers : public Transport {
 protected:
  using Message = typename Peer::Message;

 public:
  ~RailPeers() override {
    for (auto& [id, entry] : peers_)
      if (!entry->peer.down) reactor_.remove(entry->peer.channel.fd());
  }

  // Nothing begins for this peer afterwards; `forget` decides when it is erased.
  void disconnect(PeerId id) noexcept override {
    Peer* const peer = find(id);
    if (peer == nullptr) return;
    end_works(*peer, Code::kCancelled, {});
    go_down(*peer);
    ready_.forget_rail(id);
    forget(*peer);
  }

  Code post(PeerId id, const Work& work) noexcept override {
    Peer* const peer = find(id);
    if (peer == nullptr || peer->down) return Code::kRailFailed;
    if (!peer->up) return Code::kAgain;
    try {
      make_room(1, 0);
      activate(*peer);
      index_.insert(work.id, id);
    } catch (const std::bad_alloc&) {
      return Code::kAgain;
    }
    try {
      if (peer->queue.post(work)) return Code::kOk;
    } catch (const std::bad_alloc&) {  // counts as full
    }
    index_.erase(work.id);
    return Code::kAgain;
  }

  // A work that is queued or between two slices ends here. A work that other threads copy ends when they have
  // left it.
  void cancel(std::span<const WorkId> works) noexcept override {
    for (const WorkId id : works) {
      Peer* const peer = peer_of(id);
      if (peer == nullptr) continue;
      if (peer->copy.has_value() && peer->copy->work.id == id)
        peer->copy.reset();
      else if (!peer->queue.withdraw(id)) {
        stop_shared(id);
        continue;
      }
      end_work(id, Code::kCancelled);
    }
  }

  bool busy() const noexcept override {
    if (!ready_.empty() || !for_all_.empty()) return true;
    for (const Peer* const peer : active_)
      if (has_turn(*peer) || wants_time(*peer)) return true;
    return false;
  }
  bool wants_poll() const noexcept override {
    return !ready_.empty() || !active_.empty() || !for_all_.empty();
  }

 protected:
  explicit RailPeers(Reactor& reactor) : reactor_(reactor) {}

  // ---- what a transport defines ----

  // Sends a peer the first messages: the hello, and what it must know about us.
  virtual void greet(Peer& peer) = 0;
  // Takes the peer's first message. Not ok: the rail to it fails.
  virtual Status on_hello(Peer& peer, const Message& message, UniqueFd fd) = 0;
  // Takes any later message. Not ok: the rail fails.
  virtual Status on_message(Peer& peer, const Message& message, UniqueFd fd) = 0;
  // Whether the rail is up with the peer's hello. If not, the transport calls come_up() later.
  virtual bool is_up_with_hello() const noexcept { return true; }
  // The rail to this peer has failed: releases what was kept for it.
  virtual void on_down(Peer& peer) = 0;
  // The peer was disconnected. Erases it, at once or later. May be called again before it is erased.
  virtual void forget(Peer& peer) noexcept { erase(peer); }
  // Whether the work may run, or waits for something that the peer has yet to say. A work that will fail may
  // run.
  virtual bool can_run(const Peer&, const Work&) const noexcept { return true; }
  // False: none of the peer's works can run, so its queue need not be searched.
  virtual bool takes_works(const Peer&) const noexcept { return true; }
  // Whether the peer needs a turn for something other than a queued work: for one that has begun, or for what
  // has arrived.
  virtual bool can_go_on(const Peer& peer) const noexcept { return peer.copy.has_value(); }
  // Whether the peer needs time for something besides its works. It stays in active() meanwhile, where poll
  // looks for it: next_turn() does not return it for this.
  virtual bool wants_time(const Peer&) const noexcept { return false; }
  // Works that the rail has taken from the queue (other threads copy them, or a device moves them) are to end
  // as soon as they can: one of them as kCancelled, or all of one peer's with this code. May be called again
  // before they have ended, and for a peer also afterwards. The peer may be erased afterwards.
  virtual void stop_shared(WorkId) noexcept {}
  virtual void stop_shared(PeerId, Code, std::string_view) noexcept {}
  // How many messages describe what peers are currently told of.
  virtual std::size_t num_announced() const noexcept { return 0; }

  // ---- peers ----

  // Connects a peer. Its constructor takes (number, socket, info, more...).
  template <class... More>
  Result<PeerId> add_peer(UniqueFd socket, const ConnectInfo& info, More&&... more) {
    const PeerId id = next_peer_++;
    make_room(0, 1);
    auto owned = std::make_unique<Entry>(*this, id, std::move(socket), info, std::forward<More>(more)...);
    Entry& entry = *peers_.emplace(id, std::move(owned)).first->second;
    Peer& peer = entry.peer;
    peer.num_told = end_for_all();  // it is greeted with what holds now
    bool is_watched = false;
    try {
      if (Status added = reactor_.add(peer.channel.fd(), EPOLLIN, entry); !added.ok()) {
        erase(peer);
        return added;
      }
      is_watched = true;
      greet(peer);
    } catch (...) {
      if (is_watched && !peer.down) reactor_.remove(peer.channel.fd());
      ready_.forget_rail(id);
      erase(peer);
      throw;
    }
    return id;
  }
  // Tells the peer why it is refused, and closes the socket. Returns the reason in this transport's words.
  Status refuse(UniqueFd socket, const ConnectInfo& info, const Status& why) {
    SideChannel<Message>(std::move(socket), info.cipher).say_why(why.message());
    return {why.code(), words(why.message())};
  }
  Peer* find(PeerId id) const noexcept {
    const auto found = peers_.find(id);
    return found == peers_.end() ? nullptr : &found->second->peer;
  }
  // A peer that is up, for attach and the like.
  Result<Peer*> find_up(PeerId id) const {
    Peer* const peer = find(id);
    if (peer != nullptr && peer->up && !peer->down) return peer;
    return Status(Code::kRailFailed, words("not connected to this peer"));
  }
  template <class Visit>
  void for_each_peer(Visit&& visit) const {
    for (auto& [id, entry] : peers_) visit(entry->peer);
  }
  void erase(Peer& peer) noexcept {
    if (peer.is_active) std::erase(active_, &peer);
    peers_.erase(peer.id);
  }
  // The peer of a work that has not ended; null: there is no such work.
  Peer* peer_of(WorkId work) const noexcept { return find(index_.find(work)); }
  void come_up(Peer& peer) noexcept {
    peer.up = true;
    ready_.rail_up(peer.id);
  }
  void activate(Peer& peer) {
    if (peer.is_active) return;
    active_.push_back(&peer);
    peer.is_active = true;
  }

  // Sends a message of ours. A peer that reads none of them makes us keep what goes with them: descriptors,
  // and the memory of regions that were deregistered. So the number of unread messages is bounded
  // (kMostUnread).
  void tell(Peer& peer, const Message& message, SharedFd fd = nullptr) noexcept {
    catch_up(peer, SIZE_MAX);
    say(peer, message, std::move(fd));
  }
  // All peers, in slices: a message is a system call, which may wake a process. Some are told at once, others
  // in later polls, and each before anything else is told to it. A work that needs the message waits for it
  // (can_run).
  void tell_all(const Message& message, const SharedFd& fd = nullptr) {
    try {
      for_all_.push_back({message, fd});
    } catch (const std::bad_alloc&) {
      return for_each_peer([&](Peer& peer) { tell(peer, message, fd); });
    }
    if (for_all_.size() == 1) begin_pass();
    do tell_some();
    while (for_all_.size() > kMostForAll);
  }
  // The next slice. A transport's poll calls it.
  void tell_some() noexcept {
    for (std::size_t left = kToldAtOnce; !for_all_.empty();) {
      const auto next = peers_.upper_bound(passed_);
      if (next == peers_.end()) {  // they have heard of all that there was when the pass began
        for (; first_for_all_ != pass_end_; ++first_for_all_) for_all_.pop_front();
        begin_pass();
        continue;
      }
      if (left == 0) return;
      Peer& peer = next->second->peer;
      left = catch_up(peer, left);
      if (peer.num_told == end_for_all()) passed_ = peer.id;
    }
  }

  // Takes the rail to this peer down. Needs no memory but for its words.
  static constexpr std::string_view kNoMemory = "this process could not allocate memory for the rail";
  void fail(Peer& peer, std::string_view why) noexcept {
    if (peer.down) return;
    std::string detail;
    try {
      peer.channel.say_why(why);
    } catch (const std::bad_alloc&) {  // closing is enough
    }
    go_down(peer);
    try {
      detail = words("the rail to " + peer.name + " is down: " + std::string(why));
    } catch (const std::bad_alloc&) {  // the completion is enough
    }
    end_works(peer, Code::kRailFailed, detail);
    ready_.rail_down(peer.id, detail);
    on_down(peer);
  }
  // The same; without memory for the words that `say` makes, it says so.
  template <class Say>
  void fail_saying(Peer& peer, Say&& say) noexcept {
    std::string why;
    try {
      why = say();
    } catch (const std::bad_alloc&) {
      return fail(peer, kNoMemory);
    }
    fail(peer, why);
  }

  // ---- works ----

  // The peer whose turn it is, round robin; null: there is nothing to do. It keeps its turn until end_turn().
  Peer* next_turn() {
    for (std::size_t left = active_.size(); left > 0; --left) {
      if (turn_ >= active_.size()) turn_ = 0;
      Peer& peer = *active_[turn_];
      if (has_turn(peer)) return &peer;
      if (!peer.queue.empty() || wants_time(peer)) {
        ++turn_;
        continue;
      }
      peer.is_active = false;
      active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(turn_));
    }
    return nullptr;
  }
  void end_turn() noexcept { ++turn_; }
  bool has_turn(const Peer& peer) const {
    if (can_go_on(peer)) return true;
    if (peer.queue.empty() || !takes_works(peer)) return false;
    return can_run(peer, peer.queue[0]) || first_that_runs(peer) != peer.queue.size();
  }
  // The first work that can run; queue.size() where none can. The queue is not empty.
  std::size_t first_that_runs(const Peer& peer) const {
    if (can_run(peer, peer.queue[0])) return 0;  // nearly always
    return peer.queue.first([&](const Work& work) { return can_run(peer, work); });
  }
  // Every work ends here.
  void end_work(Completion completion) noexcept {
    index_.erase(completion.work);
    ready_.push(std::move(completion));
  }
  void end_work(WorkId work, Code code, std::string_view detail = {}) noexcept {
    index_.erase(work);
    ready_.work(work, code, detail);
  }
  // The end of a fetch whose fence word had moved on when its bytes were in.
  static Status right_ended(const Peer& peer) {
    return {Code::kLeaseEnded, peer.name + " ended the right to read while the bytes moved"};
  }
  void end_stale(const Peer& peer, WorkId work) noexcept {
    std::string why;
    try {
      why = words(right_ended(peer).message());
    } catch (const std::bad_alloc&) {  // the code is enough
    }
    end_work(work, Code::kLeaseEnded, why);
  }
  const std::vector<Peer*>& active() const noexcept { return active_; }

  std::string words(std::string_view what) const {
    return std::string(this->capabilities().name) + ": " + std::string(what);
  }

  CompletionQueue ready_;  // completions for poll's caller

 private:
  // Added to twice what there is to tell: 128 pools may come and go while a peer does not run.
  static constexpr std::size_t kMostUnread = 256;
  // Of what is told to all: the messages of a slice, which take some 20 us each, and a hold of the gate has
  // several slices; and what may wait for later ones.
  static constexpr std::size_t kToldAtOnce = 16, kMostForAll = 64;
  // Messages of one peer before other peers are heard.
  static constexpr int kMostAtOnce = 64;

  struct Entry final : Reactor::Handler {
    template <class... More>
    Entry(RailPeers& owner, More&&... more) : rail(owner), peer(std::forward<More>(more)...) {}
    void on_ready(std::uint32_t events) override { rail.on_ready(peer, events); }
    RailPeers& rail;
    Peer peer;
  };

  struct ForAll {
    Message message;
    SharedFd fd;
  };

  void say(Peer& peer, const Message& message, SharedFd fd) noexcept {
    if (peer.down) return;
    try {
      peer.num_unread = std::min(peer.num_unread, peer.channel.num_unread());
      if (++peer.num_unread > kMostUnread + 2 * num_announced())
        return fail(peer, "it does not read its socket: " + std::to_string(peer.num_unread - 1) +
                              " messages and their descriptors are unread");
      peer.channel.queue(message, std::move(fd));
      flush(peer);
    } catch (const std::bad_alloc&) {
      fail(peer, kNoMemory);
    }
  }
  std::uint64_t end_for_all() const noexcept { return first_for_all_ + for_all_.size(); }
  void begin_pass() noexcept {
    passed_ = 0;
    pass_end_ = end_for_all();
  }
  // Tells it up to so many of the messages for all that it lacks; returns what is left of that number.
  std::size_t catch_up(Peer& peer, std::size_t most) noexcept {
    for (; most != 0 && peer.num_told != end_for_all(); --most) {
      const ForAll& next = for_all_[peer.num_told++ - first_for_all_];
      say(peer, next.message, next.fd);
    }
    return most;
  }

  void make_room(std::size_t num_works, std::size_t num_peers) {
    ready_.make_room(ready_.size() + index_.size() + num_works + 2 * (peers_.size() + num_peers));
  }

  void go_down(Peer& peer) noexcept {
    if (!std::exchange(peer.down, true)) reactor_.remove(peer.channel.fd());
  }

  void end_works(Peer& peer, Code code, std::string_view detail) noexcept {
    if (peer.copy.has_value()) end_work(peer.copy->work.id, code, detail);
    peer.copy.reset();
    stop_shared(peer.id, code, detail);
    for (std::size_t i = 0; i < peer.queue.size(); ++i) end_work(peer.queue[i].id, code, detail);
    peer.queue.drop(0, peer.queue.size());
  }

  void flush(Peer& peer) {
    if (Status flushed = peer.channel.flush(reactor_); !flushed.ok()) fail(peer, flushed.message());
  }

  void on_ready(Peer& peer, std::uint32_t events) {
    try {
      if (events & EPOLLOUT) flush(peer);
      if (peer.down || (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0) return;
      if (Status received = receive(peer); !received.ok()) fail(peer, received.message());
    } catch (const std::bad_alloc&) {
      fail(peer, kNoMemory);
    }
  }

  // Takes in what has arrived. The reactor calls again while there is more.
  Status receive(Peer& peer) {
    for (int i = 0; i < kMostAtOnce && !peer.down; ++i) {
      auto next = peer.channel.receive();
      if (!next.ok()) return next.status();
      if (!next.value().has_value()) return {};
      const Message& message = next.value()->message;
      UniqueFd& fd = next.value()->fd;
      if (message.is_hello()) {
        if (Status greeted = on_hello(peer, message, std::move(fd)); !greeted.ok()) return greeted;
        if (is_up_with_hello() && !peer.down) come_up(peer);
      } else if (Status taken = on_message(peer, message, std::move(fd)); !taken.ok()) {
        return taken;
      }
    }
    return {};
  }

  Reactor& reactor_;
  std::map<PeerId, std::unique_ptr<Entry>> peers_;
  PeerId next_peer_ = 1;
  // What is told to all peers, until each has heard it; they are passed in the order of their numbers.
  std::deque<ForAll> for_all_;
  std::uint64_t first_for_all_ = 0, pass_end_ = 0;
  PeerId passed_ = 0;
  std::vector<Peer*> active_;  // with works, or something else to do
  std::size_t turn_ = 0;  // in active_
  WorkIndex index_;  // of works that have not ended, or not been launched
};

}  // namespace kvxfer
