// Launches of copies on one stream of a device, in order, and the works of each launch.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "gpu/copy_stream.h"
#include "gpu/placement.h"
#include "kvxfer/transport.h"
#include "transports/common/work_queue.h"

namespace kvxfer::cuda_ipc {

class Flights {
 public:
  using Ticket = gpu::CopyStream::Ticket;

  // The works of one launch; they end together.
  struct Flight {
    Ticket ticket;
    PeerId peer;
    std::vector<WorkId> works;
    std::uint64_t nbytes;
    Fence fence;  // theirs: they are of one move
    bool is_done = false;  // after it has landed; false then: the device has failed
  };

  // A fence may have to wait for this much: 5 ms at 50 GB/s.
  static constexpr std::uint64_t kMostNbytes = 256 * 1024 * 1024;

  // No launch begins while this many bytes or more are under way. A launch has about half of that, so the GPU
  // goes on while a poll finds the end of an earlier one. The gap between two polls is some microseconds, in
  // which the GPU copies less than a tenth of a launch.
  Flights(std::unique_ptr<gpu::CopyStream> stream, std::uint64_t most_nbytes)
      : stream_(std::move(stream)), most_nbytes_(most_nbytes) {}

  struct Launch {
    Status status;  // kAgain: there is no room yet. kSystem: the device is lost; part of it may be under way.
    std::vector<WorkId> refused;  // never to be launched, as the status says
  };
  // Launches a piece of a peer's queue, together with later pieces that continue it, in its layer or, where
  // pieces are whole layers, in the next one. Works that were launched, or refused for good, leave the queue.
  Launch launch(PeerId peer, WorkQueue& queue, std::size_t at, const gpu::Placement& src);

  // The caller asks now and then. Not ok, once, in words: the device has failed.
  Status check();
  // The next flight that has landed, or ended with the device.
  std::optional<Flight> next_landed();

  bool empty() const noexcept { return flights_.empty(); }
  Ticket last_of(PeerId peer) const noexcept;  // 0: none of its is under way
  Ticket landed() const noexcept { return landed_; }  // all tickets up to here have ended

 private:
  std::unique_ptr<gpu::CopyStream> stream_;
  const std::uint64_t most_nbytes_;
  std::deque<Flight> flights_;
  std::uint64_t nbytes_ = 0;  // of them
  Ticket landed_ = 0;
  bool is_lost_ = false;
  std::uint32_t idle_checks_ = 0;  // checks in a row in which no flight landed
};

}  // namespace kvxfer::cuda_ipc
