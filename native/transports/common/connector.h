// Connects to peers on threads of its own, because a device or a library can block during a set-up. With
// RoCE, ibv_modify_qp asks the network for the peer's Ethernet address and waits for a second or more if it
// gets no answer.
//
// A set-up starts a thread if none is free. A thread sleeps while it has no set-up, and ends with this
// object. A peer occupies one thread at a time, however often it reconnects, so a peer whose address leads
// nowhere delays no other peer.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/system/fork_guard.h"
#include "kvxfer/transport.h"

namespace kvxfer {

class Connector {
 public:
  // How many peers' set-ups may block at a time before others wait. Such a peer is dialled again at intervals
  // that grow to 30 s, and each attempt blocks a thread for about one second: 8 threads are enough for some
  // 200 such peers.
  static constexpr std::size_t kMostThreads = 8;

  // One set-up for one peer. It owns what it needs until it has ended.
  struct SetUp {
    SetUp(PeerId its_peer, std::string its_name) : peer(its_peer), name(std::move(its_name)) {}
    virtual ~SetUp() = default;
    // Runs on a connector's thread, without the gate. May throw std::bad_alloc.
    virtual Status run() = 0;
    // Runs on the same thread after run(), if the set-up was abandoned meanwhile and its result is not
    // wanted.
    virtual void on_abandoned() noexcept {}

    const PeerId peer;
    const std::string name;  // of the peer
    Status status;  // how it ended
    std::atomic<bool> is_abandoned{false};
  };

  static Result<std::unique_ptr<Connector>> create();
  // Waits until its threads have finished their calls to the device. They begin no further ones.
  ~Connector();
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

  // Only the driving thread calls the functions below.

  // Takes the set-up. Not ok: the system gives no thread, and the caller keeps the set-up.
  Status begin(std::unique_ptr<SetUp>& set_up);
  Status begin(std::unique_ptr<SetUp>&& set_up) { return begin(set_up); }
  // The peer has gone. A set-up that waits is destroyed before this returns. For one that runs, its thread
  // calls on_abandoned() after run().
  void abandon(PeerId peer) noexcept;
  // Returns once no set-up of this peer waits or runs.
  void await(PeerId peer) noexcept;
  // Readable once set-ups have ended.
  int fd() const noexcept { return bell_.get(); }
  void acknowledge() noexcept;
  // The next set-up that has ended; null: none.
  std::unique_ptr<SetUp> take_ended() noexcept;

 private:
  explicit Connector(GuardedFd bell) : bell_(std::move(bell)) {}

  void run() noexcept;
  void run(SetUp& set_up) noexcept;  // without the lock
  // With the lock. The first waiting set-up of a peer that has no thread; null: none.
  SetUp* take_waiting() noexcept;
  void end(SetUp& set_up) noexcept;

  const GuardedFd bell_;
  std::mutex mutex_;
  std::condition_variable called_, ended_one_;
  std::deque<std::unique_ptr<SetUp>> waiting_;
  std::vector<std::unique_ptr<SetUp>> running_, ended_;  // have room for all set-ups
  bool ends_ = false;
  std::vector<std::thread> threads_;  // used by the driving thread
};

}  // namespace kvxfer
