// Moves the stream rails of one agent at the same time, where the agent has threads that copy: each thread
// moves one rail. The driving thread moves a rail as well and then waits for the others, so all of it
// happens under the gate. A fence waits no longer than where the rails are polled one after the other.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/copy/copy_workers.h"

namespace kvxfer {

class StreamTransport;

class StreamRound {
 public:
  // Waking a thread takes as long as moving half of this.
  static constexpr std::uint64_t kLeastNbytes = 256 * 1024;

  // A rail takes part in a round if it has at least `least_nbytes` to move.
  explicit StreamRound(std::shared_ptr<CopyWorkers> workers,
                       std::uint64_t least_nbytes = kLeastNbytes) noexcept
      : workers_(std::move(workers)), least_nbytes_(least_nbytes) {}
  StreamRound(const StreamRound&) = delete;
  StreamRound& operator=(const StreamRound&) = delete;

  void add(StreamTransport& rail);
  void remove(StreamTransport& rail) noexcept;
  // Called when a rail is polled. If that rail and others have enough to move, moves all of these once.
  void move(const StreamTransport& polled) noexcept;

 private:
  const std::shared_ptr<CopyWorkers> workers_;
  const std::uint64_t least_nbytes_;
  std::vector<StreamTransport*> rails_;
  // The rails of one round. Both have room for all rails.
  std::vector<StreamTransport*> moved_;
  std::vector<Task*> tasks_;
};

}  // namespace kvxfer
