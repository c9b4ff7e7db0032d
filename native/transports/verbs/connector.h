// Connects queue pairs to those of peers on threads of its own: of RoCE ibv_modify_qp asks the network for the peer's
// Ethernet address, and stands still for a second or more where nobody answers.
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
#include "kvxfer/budget.h"
#include "transports/verbs/queue_pair.h"

namespace kvxfer::verbs {

class Connector {
 public:
  // Peers whose set-ups stand still at a time before others wait. Such a peer is dialled again at intervals that grow
  // to 30 s, and takes about one: 8 threads bear with some 200 of them.
  static constexpr std::size_t kMostThreads = 8;

  // Queue pairs on their way to be connected, and what they are charged to until they are gone.
  struct SetUp {
    SetUp(PeerId its_peer, std::string its_name, std::unique_ptr<QueuePairs> its_pairs, const Message& hello,
          Charge its_charge)
        : peer(its_peer),
          name(std::move(its_name)),
          theirs(hello),
          charge(std::move(its_charge)),
          pairs(std::move(its_pairs)) {}

    const PeerId peer;
    const std::string name;  // of the peer
    const Message theirs;
    Charge charge;
    std::unique_ptr<QueuePairs> pairs;  // null: it was abandoned
    Status status;  // how it ended
    std::atomic<bool> is_abandoned{false};
  };

  static Result<std::unique_ptr<Connector>> create();
  // Waits for what its threads ask of the device, and has no more asked.
  ~Connector();
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

  // What follows is called by whoever drives.

  // Not ok: the system gives no thread.
  Status begin(std::unique_ptr<SetUp> set_up);
  // The peer went. What waits is gone when this returns; what a thread has in its hands the thread destroys.
  void abandon(PeerId peer) noexcept;
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
  std::condition_variable called_;
  std::deque<std::unique_ptr<SetUp>> waiting_;
  std::vector<std::unique_ptr<SetUp>> running_, ended_;  // have room for all that there are
  bool ends_ = false;
  std::vector<std::thread> threads_;  // of whoever drives
};

}  // namespace kvxfer::verbs
