// The rails of streams of one agent, where it has threads that copy: what several of them have to move is moved at
// the same time, a rail by each thread. Whoever drives moves one as well and waits for the others, so all of it is
// under the gate, and a fence has no more to wait for than where each rail is moved by its own poll.
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
  // To wake a thread takes as long as moving half of that.
  static constexpr std::uint64_t kLeastNbytes = 256 * 1024;

  // `least_nbytes`: that a rail has to move where a thread is worth it.
  explicit StreamRound(std::shared_ptr<CopyWorkers> workers,
                       std::uint64_t least_nbytes = kLeastNbytes) noexcept
      : workers_(std::move(workers)), least_nbytes_(least_nbytes) {}
  StreamRound(const StreamRound&) = delete;
  StreamRound& operator=(const StreamRound&) = delete;

  void add(StreamTransport& rail);
  void remove(StreamTransport& rail) noexcept;
  // Of the rail that is polled. Where it is worth a thread, and others are, moves what these have to move: each has
  // had its turn then.
  void move(const StreamTransport& polled) noexcept;

 private:
  const std::shared_ptr<CopyWorkers> workers_;
  const std::uint64_t least_nbytes_;
  std::vector<StreamTransport*> rails_;
  // Of one round; with room for all rails.
  std::vector<StreamTransport*> moved_;
  std::vector<Errand*> errands_;
};

}  // namespace kvxfer
