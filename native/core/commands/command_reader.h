// A command ring at its host: takes commands out, checks them, posts the transfers that they ask for, and
// counts how these end.
//
// A kernel has written what stands in the ring, or anything else that can write there, so the host believes
// none of it. It refuses a wrong command by itself, and goes on with the commands behind it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/commands/command_memory.h"
#include "core/engine.h"

namespace kvxfer {

// What commands may name: block tables and layers of one program, and everything else that a transfer needs.
struct PreparedWrite {
  // Has no table of pairs of its own: `src_ids` and `dst_ids` hold all pairs that commands can name.
  TransferRequest request;
  std::uint32_t first_layer = 0;  // the layer that a command names for request.first_layer
};

class CommandReader {
 public:
  // How far the ring is. `taken` commands left it; `ended` of them are over; `failed` of these ended
  // badly.
  struct Counts { std::uint64_t taken = 0, ended = 0, failed = 0; };
  struct Failure {
    std::uint64_t index = 0;  // how many commands were taken before
    std::uint32_t prepared = 0, pair = 0, num_pairs = 0, layer = 0;
    Status status;
  };
  // Only the newest unread failures are kept, at most so many.
  static constexpr std::size_t kMostFailures = 1024;

  // `id` is the agent's own number for the ring; the reader calls `news` with it when a command has ended.
  CommandReader(std::uint64_t id, CommandMemory memory, std::function<void(std::uint64_t)> news)
      : id_(id), memory_(memory), news_(std::move(news)) {}

  std::uint64_t id() const noexcept { return id_; }
  std::uint64_t address() const noexcept { return memory_.ring; }
  std::uint32_t num_commands() const noexcept { return memory_.num_commands; }

  // From any thread, like all calls up to look(). Returns the number by which commands name the write.
  Result<std::uint32_t> prepare(PreparedWrite write);
  // Refuses commands that name it from now on. Its number is given out again, after the others.
  Status forget(std::uint32_t prepared);
  // Does what device.cuh's start() does, but on a thread of the host and with one look at the ring;
  // kUnsupported if the ring is on a device.
  Result<bool> start(std::uint32_t prepared, std::uint32_t pair, std::uint32_t layer,
                     std::uint32_t num_pairs);
  Counts counts() const noexcept;
  std::vector<Failure> take_failures();
  // Takes no more commands out. Transfers that were posted go on, and are counted when they end.
  void close() noexcept { closed_ = true; }
  bool closed() const noexcept { return closed_; }
  // True if look() would find a command that it has room for.
  bool has_news() const noexcept;

  // Under the progress gate, like all calls below. Posts the commands that have come, at most kAtOnce;
  // true if there were any. The transfers that are open at once never exceed the ring's number of
  // commands.
  bool look(Engine& engine, Time now);
  // Call it when a transfer has ended; true if a command of this ring had started that transfer.
  bool on_ended(std::uint64_t handle);
  bool idle() const noexcept { return open_.empty(); }

 private:
  static constexpr int kAtOnce = 64;
  struct Taken {
    std::shared_ptr<Handle> handle;
    std::list<Failure> failure;  // the one that it becomes if it ends badly
  };
  using Open = std::unordered_map<std::uint64_t, Taken>;  // by handle

  std::optional<Command> next() const noexcept;
  Result<TransferRequest> request_of(const Command& command) const;
  void take_out(std::uint64_t index) noexcept;
  void end(Taken& taken, Status status);

  const std::uint64_t id_;
  const CommandMemory memory_;
  const std::function<void(std::uint64_t)> news_;
  std::atomic<bool> closed_{false};
  std::atomic<std::uint32_t> head_{0};  // the next command's number
  std::atomic<std::size_t> num_open_{0};
  std::atomic<std::uint64_t> taken_{0}, ended_{0}, failed_{0};
  Open open_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const PreparedWrite>> prepared_;  // under the mutex, like all members below
  std::deque<std::uint32_t> free_;
  std::list<Failure> failures_;
};

}  // namespace kvxfer
