// A command ring at its host: takes commands out, checks them, posts what they ask for and counts what becomes
// of it.
//
// What stands in the ring a kernel has written, or anything that writes there: nothing of it is believed. A
// command that is wrong is refused by itself, and the ones behind it go on.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
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

// What commands may name: block tables and layers of one program, and all that a transfer has besides.
struct PreparedWrite {
  // Without a table of pairs of its own: `src_ids` and `dst_ids` hold all that can be named.
  TransferRequest request;
  std::uint32_t first_layer = 0;  // that a command names for request.first_layer
};

class CommandReader {
 public:
  // How far it is. `taken` commands left the ring, of which `ended` are over, of which `failed` badly.
  struct Counts { std::uint64_t taken = 0, ended = 0, failed = 0; };
  struct Failure {
    std::uint64_t index = 0;  // how many commands were taken before
    std::uint32_t prepared = 0, pair = 0, num_pairs = 0, layer = 0;
    Status status;
  };
  // The newest that nobody has read.
  static constexpr std::size_t kMostFailures = 1024;

  // `id` is the agent's own number for it; `news` is called with it when a command has ended.
  CommandReader(std::uint64_t id, CommandMemory memory, std::function<void(std::uint64_t)> news)
      : id_(id), memory_(memory), news_(std::move(news)) {}

  std::uint64_t id() const noexcept { return id_; }
  std::uint64_t address() const noexcept { return memory_.ring; }
  std::uint32_t num_commands() const noexcept { return memory_.num_commands; }

  // From any thread, as what follows up to look(). Returns the number by which commands name it.
  Result<std::uint32_t> prepare(PreparedWrite write);
  // Commands that name it are refused from now on; its number is given out again, the others' first.
  Status forget(std::uint32_t prepared);
  // What device.cuh's start() does, by a thread of the host and with one look; kUnsupported where the ring is
  // on a device.
  Result<bool> start(std::uint32_t prepared, std::uint32_t pair, std::uint32_t layer,
                     std::uint32_t num_pairs);
  Counts counts() const noexcept;
  std::vector<Failure> take_failures();
  // Takes no command out any more. What was posted goes on, and is counted when it ends.
  void close() noexcept { closed_ = true; }
  bool closed() const noexcept { return closed_; }
  // Whether look() would find a command that it has room for.
  bool has_news() const noexcept;

  // Under the progress gate, as what follows. Posts what has come, as many as kAtOnce; true where there was
  // something. No more transfers are open at once than the ring has room for commands.
  bool look(Engine& engine, Time now);
  // A transfer has ended; true where it was one of these.
  bool on_ended(std::uint64_t handle);
  bool idle() const noexcept { return open_.empty(); }

 private:
  static constexpr int kAtOnce = 64;
  struct Taken {
    std::uint64_t index;
    Command command;
    std::shared_ptr<Handle> handle;
  };

  std::optional<Command> next() const noexcept;
  Result<TransferRequest> request_of(const Command& command) const;
  void end(std::uint64_t index, const Command& command, Status status);

  const std::uint64_t id_;
  const CommandMemory memory_;
  const std::function<void(std::uint64_t)> news_;
  std::atomic<bool> closed_{false};
  std::atomic<std::uint32_t> head_{0};  // the next command's number
  std::atomic<std::size_t> num_open_{0};
  std::atomic<std::uint64_t> taken_{0}, ended_{0}, failed_{0};
  std::unordered_map<std::uint64_t, Taken> open_;  // by handle
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const PreparedWrite>> prepared_;  // under it, as what follows
  std::deque<std::uint32_t> free_;
  std::deque<Failure> failures_;
};

}  // namespace kvxfer
