// Work requests that go to the device with one doorbell. READs and WRITEs are merged where runs touch at both
// ends; where they touch at the remote end alone, they share a scatter list. The last request is signalled.
// The memory is used again for the next chain.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "transports/verbs/abi.h"
#include "transports/verbs/options.h"
#include "transports/verbs/registration.h"

namespace kvxfer::verbs {

class Chain {
 public:
  // The most bytes of one doorbell, so that the other works of a queue pair do not fall far behind.
  static constexpr std::uint64_t kMostNbytes = 2 * 1024 * 1024;

  // A request has at most `num_entries` entries in its scatter list, and at most so many bytes.
  Chain(std::uint32_t num_entries, std::uint64_t most_request_nbytes)
      : most_entries_(num_entries),
        most_request_nbytes_(most_request_nbytes),
        entries_(kMostChained * num_entries) {}

  // Begins an empty chain of up to `most` requests; the first one gets the number `first_id`.
  void begin(std::uint32_t most, std::uint64_t first_id) noexcept {
    most_ = most;
    next_id_ = first_id;
    num_ = 0;
    nbytes_ = 0;
    is_open_ = false;
    opcode_ = abi::kRdmaRead;
  }
  // What is added from here on goes into requests of its own, with this opcode.
  void go_on(int opcode) noexcept {
    opcode_ = opcode;
    is_open_ = false;
  }

  // Adds the next bytes to move. Returns how many of `nbytes` found room, at most as many as fit into one
  // request; 0: the chain is full. At either end the bytes lie in one span.
  std::uint64_t add(std::uint64_t remote, std::uint32_t rkey, std::uint64_t local, std::uint32_t lkey,
                    std::uint64_t nbytes) noexcept {
    if (nbytes_ == kMostNbytes) return 0;
    if (nbytes > most_request_nbytes_) nbytes = most_request_nbytes_;
    if (nbytes > kMostNbytes - nbytes_) nbytes = kMostNbytes - nbytes_;
    if (is_open_ && remote == remote_end_ && rkey == rkey_ &&
        request_nbytes_ + nbytes <= most_request_nbytes_) {
      abi::SendRequest& request = requests_[num_ - 1];
      abi::ScatterEntry* last = request.entries + (request.num_entries - 1);
      if (local == local_end_ && lkey == last->lkey) {
        last->length += static_cast<std::uint32_t>(nbytes);
      } else if (static_cast<std::uint32_t>(request.num_entries) < most_entries_) {
        ++request.num_entries;
        last[1] = {local, static_cast<std::uint32_t>(nbytes), lkey};
      } else {
        return start(remote, rkey, local, lkey, nbytes);
      }
      return extend(remote, local, nbytes);
    }
    return start(remote, rkey, local, lkey, nbytes);
  }
  // The next bytes go into a request of their own.
  void close() noexcept { is_open_ = false; }

  // Announces earlier WRITEs to the peer by this number. The last WRITE carries it; if the WRITEs are in an
  // earlier chain, a request without bytes does. False: that request finds no room.
  bool announce(std::uint32_t number, std::uint64_t remote, std::uint32_t rkey) noexcept {
    if (!is_open_) {
      if (num_ == most_) return false;
      start(remote, rkey, 0, 0, 0);
      requests_[num_ - 1].num_entries = 0;
    }
    requests_[num_ - 1].opcode = abi::kRdmaWriteWithImmediate;
    requests_[num_ - 1].immediate = number;
    is_open_ = false;
    return true;
  }

  // READs one word, in a request of its own. It takes none of the chain's bytes, so that it cuts no page in two.
  // False: the request finds no room.
  bool add_word(std::uint64_t remote, std::uint32_t rkey, std::uint64_t local, std::uint32_t lkey) noexcept {
    if (num_ == most_) return false;
    start(remote, rkey, local, lkey, sizeof(std::uint64_t));
    nbytes_ -= sizeof(std::uint64_t);
    is_open_ = false;
    return true;
  }

  bool is_full() const noexcept { return (num_ == most_ && !is_open_) || nbytes_ == kMostNbytes; }
  std::uint32_t size() const noexcept { return num_; }
  std::uint64_t nbytes() const noexcept { return nbytes_; }
  // Links the requests and signals the last one; the caller posts them now. There is at least one.
  abi::SendRequest* finish() noexcept {
    for (std::uint32_t i = 0; i + 1 < num_; ++i) requests_[i].next = &requests_[i + 1];
    requests_[num_ - 1].next = nullptr;
    requests_[num_ - 1].flags = abi::kSignaled;
    return requests_.data();
  }
  // How many requests come before this one, which the device refused.
  std::uint32_t index_of(const abi::SendRequest* refused) const noexcept {
    if (refused < requests_.data() || refused >= requests_.data() + num_) return 0;
    return static_cast<std::uint32_t>(refused - requests_.data());
  }

 private:
  std::uint64_t start(std::uint64_t remote, std::uint32_t rkey, std::uint64_t local, std::uint32_t lkey,
                      std::uint64_t nbytes) noexcept {
    if (num_ == most_) return 0;
    abi::SendRequest& request = requests_[num_];
    request.id = next_id_++;
    request.entries = entries_.data() + std::size_t{num_} * most_entries_;
    request.num_entries = 1;
    request.opcode = opcode_;
    request.flags = 0;
    request.remote.rdma.address = remote;
    request.remote.rdma.rkey = rkey;
    request.entries[0] = {local, static_cast<std::uint32_t>(nbytes), lkey};
    ++num_;
    is_open_ = true;
    rkey_ = rkey;
    request_nbytes_ = 0;
    return extend(remote, local, nbytes);
  }
  std::uint64_t extend(std::uint64_t remote, std::uint64_t local, std::uint64_t nbytes) noexcept {
    remote_end_ = remote + nbytes;
    local_end_ = local + nbytes;
    request_nbytes_ += nbytes;
    nbytes_ += nbytes;
    return nbytes;
  }

  const std::uint32_t most_entries_;
  const std::uint64_t most_request_nbytes_;
  std::uint32_t most_ = 0, num_ = 0;
  std::uint64_t next_id_ = 0, nbytes_ = 0;
  int opcode_ = abi::kRdmaRead;
  bool is_open_ = false;  // the last request may grow
  std::uint64_t remote_end_ = 0, local_end_ = 0, request_nbytes_ = 0;  // of the last request
  std::uint32_t rkey_ = 0;
  std::array<abi::SendRequest, kMostChained> requests_{};
  std::vector<abi::ScatterEntry> entries_;
};

}  // namespace kvxfer::verbs
