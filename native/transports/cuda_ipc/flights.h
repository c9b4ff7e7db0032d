// Launches of copies under way on one stream of a device, in order, and the works that each carries.
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

  // Works that end together, as one launch does.
  struct Flight {
    Ticket ticket;
    PeerId peer;
    std::vector<WorkId> works;
    std::uint64_t nbytes;
    bool is_done = false;  // once it has landed; false then: the device has failed
  };

  // What is under way a fence is complete behind: 5 ms at 50 GB/s.
  static constexpr std::uint64_t kMostNbytes = 256 * 1024 * 1024;

  // No launch begins while so many bytes or more are under way. A launch has about half of that, so that a GPU
  // goes on while a poll finds the end of one: what lies between two is some microseconds, in which it copies less
  // than a tenth of a launch.
  Flights(std::unique_ptr<gpu::CopyStream> stream, std::uint64_t most_nbytes)
      : stream_(std::move(stream)), most_nbytes_(most_nbytes) {}

  struct Launch {
    Status status;  // kAgain: there is no room yet. kSystem: the device is lost; part of it may be under way.
    std::vector<WorkId> refused;  // for good, as the status says
  };
  // Launches a piece of a peer's queue, and those behind it that go on where it ends, in its layer or, where
  // pieces are whole layers, in the next. What was launched, or refused for good, leaves the queue.
  Launch launch(PeerId peer, WorkQueue& queue, std::size_t at, const gpu::Placement& src);

  // To be asked now and then: not ok when the device is found to have failed, in words, once.
  Status check();
  // The next that has landed, or ended with the device.
  std::optional<Flight> next_landed();

  bool empty() const noexcept { return flights_.empty(); }
  Ticket last_of(PeerId peer) const noexcept;  // 0: none of its is under way
  Ticket landed() const noexcept { return landed_; }  // up to here all have ended

 private:
  std::unique_ptr<gpu::CopyStream> stream_;
  const std::uint64_t most_nbytes_;
  std::deque<Flight> flights_;
  std::uint64_t nbytes_ = 0;  // of them
  Ticket landed_ = 0;
  bool is_lost_ = false;
  std::uint32_t idle_checks_ = 0;  // with flights that do not land
};

}  // namespace kvxfer::cuda_ipc
