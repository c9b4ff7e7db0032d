// Sets connections to peers up on threads of its own, where a device or a library stands still meanwhile: of RoCE
// ibv_modify_qp asks the network for the peer's Ethernet address, and waits for a second or more where nobody answers.
//
// Threads start where a set-up finds none that is free, sleep while there is none, and end with this. A peer has one of
// them at a time, however often it comes back: so one whose address leads nowhere keeps nobody waiting.
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
  // Peers whose set-ups stand still at a time before others wait. Such a peer is dialled again at intervals that grow
  // to 30 s, and takes about one: 8 threads bear with some 200 of them.
  static constexpr std::size_t kMostThreads = 8;

  // What is to be done for a peer, with what that takes, until it is done.
  struct SetUp {
    SetUp(PeerId its_peer, std::string its_name) : peer(its_peer), name(std::move(its_name)) {}
    virtual ~SetUp() = default;
    // On a thread, without the gate. May throw std::bad_alloc.
    virtual Status run() = 0;
    // After that, there as well: nobody waits for it any more.
    virtual void let_go() noexcept {}

    const PeerId peer;
    const std::string name;  // of the peer
    Status status;  // how it ended
    std::atomic<bool> is_abandoned{false};
  };

  static Result<std::unique_ptr<Connector>> create();
  // Waits for what its threads ask of the device, and has no more asked.
  ~Connector();
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

  // What follows is called by whoever drives.

  // Takes it. Not ok: the system gives no thread, and it stays the caller's.
  Status begin(std::unique_ptr<SetUp>& set_up);
  Status begin(std::unique_ptr<SetUp>&& set_up) { return begin(set_up); }
  // The peer went. What waits is gone when this returns; what a thread has in its hands the thread destroys.
  void abandon(PeerId peer) noexcept;
  // Returns once nothing of the peer's waits or is in a thread's hands.
  void await(PeerId peer) noexcept;
  // Readable once some have ended.
  int fd() const noexcept { return bell_.get(); }
  void hush() noexcept;
  // The next that has ended; null: none.
  std::unique_ptr<SetUp> take_ended() noexcept;

 private:
  explicit Connector(GuardedFd bell) : bell_(std::move(bell)) {}

  void run() noexcept;
  void run(SetUp& set_up) noexcept;  // without the lock
  // With the lock. The first that waits of a peer that has no thread; null: none.
  SetUp* take_waiting() noexcept;
  void end(SetUp& set_up) noexcept;

  const GuardedFd bell_;
  std::mutex mutex_;
  std::condition_variable called_, ended_one_;
  std::deque<std::unique_ptr<SetUp>> waiting_;
  std::vector<std::unique_ptr<SetUp>> running_, ended_;  // have room for all that there are
  bool ends_ = false;
  std::vector<std::thread> threads_;  // of whoever drives
};

}  // namespace kvxfer
