// A reliable connection to one peer. Each request has a position, positions count upwards, and requests
// complete in that order.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/status.h"
#include "transports/verbs/chain.h"
#include "transports/verbs/device.h"
#include "transports/verbs/flight.h"
#include "transports/verbs/message.h"

namespace kvxfer::verbs {

// The number of a request names its queue pair among the peer's, and its position. The number of a receive
// names only the queue pair.
inline constexpr std::uint64_t kReceiveBit = std::uint64_t{1} << 63;
inline constexpr unsigned kPositionBits = 56;
inline std::uint64_t request_id(std::size_t pair, std::uint64_t position) noexcept {
  return std::uint64_t{pair} << kPositionBits | position;
}
inline std::size_t pair_of(std::uint64_t id) noexcept {
  return static_cast<std::size_t>(id >> kPositionBits);
}
inline std::uint64_t position_of(std::uint64_t id) noexcept {
  return id & ((std::uint64_t{1} << kPositionBits) - 1);
}

class QueuePair {
 public:
  // The most bytes under way on it. A caller that cancels waits for no more than these.
  static constexpr std::uint64_t kMostNbytes = 4 * 1024 * 1024;
  static constexpr std::size_t kMostChains = 32, kMostFlights = 64;
  // Receives for the numbers of WRITEs that may arrive while other queues are polled: as many as a peer is
  // asked for.
  static constexpr std::uint32_t kNumReceives = 64;

  QueuePair(const Device& device, abi::QueuePair* pair, std::size_t index, std::uint32_t first_packet,
            const PairClass& of) noexcept
      : device_(&device),
        pair_(pair),
        index_(index),
        most_requests_(device.num_requests()),
        first_packet_(first_packet),
        first_priority_(of.first),
        path_(of.path()) {}
  QueuePair(QueuePair&& other) noexcept = default;
  QueuePair(const QueuePair&) = delete;

  abi::QueuePair* raw() const noexcept { return pair_; }  // null: destroyed
  PairAddress address() const noexcept {
    return {.number = pair_->qp_num, .first_priority = first_priority_, .first_packet = first_packet_};
  }
  std::uint8_t first_priority() const noexcept { return first_priority_; }

  // ---- its states
  Status init();
  // Before it is connected: serves all priorities, because the peer has other classes.
  void serve_all(const PairClass& as) noexcept {
    first_priority_ = as.first;
    path_ = as.path();
  }
  Status connect(const Message& theirs, const PortAddress& ours, const std::string& way);
  // Flushes what is posted. Once that has completed, nothing of it lands any more.
  void reset() noexcept;
  void destroy() noexcept;

  // Posts a receive, after a WRITE's number has taken one.
  Status receive();

  // ---- requests
  bool has_room() const noexcept {
    return posted_ - completed_ < most_requests_ && marks_.size() < kMostChains &&
           posted_nbytes_ - completed_nbytes_ < kMostNbytes;
  }
  bool is_drained() const noexcept { return posted_ == completed_; }
  void begin(Chain& chain, std::uint32_t most) const noexcept;
  std::uint64_t posted() const noexcept { return posted_; }
  std::uint64_t completed() const noexcept { return completed_; }
  // Posts a chain that was begun here. Not ok: the device refused some of it; reset() ends all that was
  // posted.
  Status post(Chain& chain);
  void complete(std::uint64_t position) noexcept;

  // ---- works, in the order of their requests; the last work may have requests still to come
  bool goes_on() const noexcept { return !flights.empty() && !flights.back().is_posted; }
  bool can_begin() const noexcept { return !goes_on() && flights.size() < kMostFlights && has_room(); }
  bool can_go_on() const noexcept { return goes_on() && has_room(); }
  // All requests of the first work have ended, and no more will come.
  bool has_landed() const noexcept {
    return !flights.empty() && flights[0].is_posted && flights[0].end <= completed_;
  }
  Ring<Flight> flights;

 private:
  struct Mark { std::uint64_t end = 0, nbytes = 0; };  // of a chain: positions and bytes up to its end

  const Device* device_;
  abi::QueuePair* pair_;
  std::size_t index_;
  std::uint32_t most_requests_;  // under way
  std::uint32_t first_packet_;
  std::uint8_t first_priority_;  // of those that it is for
  PairPath path_;  // of what it sends: requests, and answers to the peer's READs
  std::uint64_t posted_ = 0, completed_ = 0;  // positions
  std::uint64_t posted_nbytes_ = 0, completed_nbytes_ = 0;
  Ring<Mark> marks_;
};

// The queue pairs to one peer, and their completion queue. It is their own, so one peer cannot fill
// another's.
class QueuePairs {
 public:
  // Uses the port's best address that is not among those `tried` in vain.
  static Result<std::unique_ptr<QueuePairs>> create(std::shared_ptr<const Device> device,
                                                    std::span<const GidRow> tried);
  ~QueuePairs();

  // About how much memory such a device takes for them.
  static std::uint64_t nbytes(const Device& device) noexcept;

  std::size_t size() const noexcept { return pairs_.size(); }
  QueuePair& operator[](std::size_t index) noexcept { return pairs_[index]; }
  const QueuePair& operator[](std::size_t index) const noexcept { return pairs_[index]; }
  auto begin() noexcept { return pairs_.begin(); }
  auto end() noexcept { return pairs_.end(); }
  auto begin() const noexcept { return pairs_.begin(); }
  auto end() const noexcept { return pairs_.end(); }

  // The options' classes if the peer has the same ones; else, once it is connected, one class for all
  // priorities.
  const PriorityClasses& classes() const noexcept { return classes_; }
  std::size_t class_of(const Work& work) const noexcept {
    return classes_.size() == 1 || work.move == nullptr ? 0 : classes_.of(work.move->priority);
  }
  std::span<QueuePair> of(std::size_t of_class) noexcept {
    return std::span(pairs_).subspan(begins_[of_class], begins_[of_class + 1] - begins_[of_class]);
  }
  // Whether some pair of the class can begin a work.
  bool can_begin(std::size_t of_class) const noexcept {
    for (std::size_t i = begins_[of_class]; i < begins_[of_class + 1]; ++i)
      if (pairs_[i].can_begin()) return true;
    return false;
  }
  // Describes the classes for people, or says that they differ from the peer's; "" where neither end has more
  // than one.
  std::string classes_in_words() const;

  const PortAddress& address() const noexcept { return address_; }
  // From which address to which; known once it is connected.
  const std::string& way() const noexcept { return way_; }
  // Fills in our half of the hello.
  void introduce(Message& hello) const;
  // Connects with the same classes as the peer, or with one class. With one class it keeps as many pairs as
  // the peer has, too, and drops the others. It connects one pair after the other until it is abandoned. It
  // asks the network for the peer's address, which may take seconds.
  Status connect(const Message& theirs, const std::atomic<bool>& is_abandoned);
  // The most bytes of a packet on the way to the peer and back; known once it is connected.
  std::uint32_t path_nbytes() const noexcept { return path_nbytes_; }
  void reset() noexcept;
  // Afterwards the device touches no memory for them. The results of their works stay here to be reported.
  void destroy() noexcept;
  bool is_drained() const noexcept;
  bool owns(const abi::AsyncEvent& event) const noexcept;

  std::size_t poll(std::span<abi::WorkCompletion> completions) noexcept;
  // Has the device announce the next completion over its channel.
  void arm() noexcept;

 private:
  explicit QueuePairs(std::shared_ptr<const Device> device) : device_(std::move(device)) {}
  Status open(std::span<const GidRow> tried);
  void agree_on_classes(const Message& theirs);
  void serve_classes(const PriorityClasses& classes) noexcept;

  const std::shared_ptr<const Device> device_;
  PortAddress address_;
  std::string way_;
  std::uint32_t path_nbytes_ = 0;
  PriorityClasses classes_;
  std::array<std::size_t, PriorityClasses::kMost + 1> begins_{};  // of each class in pairs_, and its end
  bool classes_differ_ = false;  // from the peer's
  abi::CompletionQueue* cq_ = nullptr;
  std::vector<QueuePair> pairs_;
};

}  // namespace kvxfer::verbs
