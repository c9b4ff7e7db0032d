#include "core/commands/command_reader.h"

#include <iterator>
#include <utility>

namespace kvxfer {
namespace {

std::uint32_t load(const unsigned& word, std::memory_order order) noexcept {
  return std::atomic_ref(const_cast<unsigned&>(word)).load(order);
}

Status refusal(Code code, std::string words) { return {code, "a command was refused: " + std::move(words)}; }

}  // namespace

Result<std::uint32_t> CommandReader::prepare(PreparedWrite write) {
  auto made = std::make_shared<const PreparedWrite>(std::move(write));
  const std::lock_guard lock(mutex_);
  if (closed_) return Status(Code::kClosed, "the command ring is closed");
  if (prepared_.size() < kTooMany) {
    prepared_.push_back(std::move(made));
    return static_cast<std::uint32_t>(prepared_.size() - 1);
  }
  if (free_.empty())
    return Status(Code::kExhausted, "a command ring has room for " + std::to_string(kTooMany) +
                                        " prepared writes: forget() those that no kernel uses any more");
  const std::uint32_t number = free_.front();
  free_.pop_front();
  prepared_[number] = std::move(made);
  return number;
}

Status CommandReader::forget(std::uint32_t prepared) {
  const std::lock_guard lock(mutex_);
  if (prepared >= prepared_.size() || prepared_[prepared] == nullptr)
    return {Code::kInvalidArgument, "write " + std::to_string(prepared) + " is not prepared (any more)"};
  prepared_[prepared] = nullptr;
  free_.push_back(prepared);
  return {};
}

Result<bool> CommandReader::start(std::uint32_t prepared, std::uint32_t pair, std::uint32_t layer,
                                  std::uint32_t num_pairs) {
  if (memory_.on_device)
    return Status(Code::kUnsupported,
                  "this ring is in GPU memory: only kernels post to it, with kvxfer/device.cuh");
  CommandRing& ring = *reinterpret_cast<CommandRing*>(memory_.ring);
  std::atomic_ref tail(ring.tail);
  unsigned number = tail.load(std::memory_order_relaxed);
  for (;;) {
    // Signed: other threads may be further by now than this thread has seen.
    const unsigned taken = load(ring.counts->taken.value, std::memory_order_acquire);
    if (static_cast<int>(number - taken) < static_cast<int>(ring.num_commands)) {
      if (tail.compare_exchange_weak(number, number + 1, std::memory_order_relaxed)) break;
    } else if (const unsigned now = tail.load(std::memory_order_relaxed); now != number) {
      number = now;
    } else {
      return false;
    }
  }
  Command& command = ring.commands[number & (ring.num_commands - 1)];
  command.what = what_of(prepared, num_pairs);
  command.pair = pair;
  command.layer = layer;
  std::atomic_ref(command.number).store(kThere | number, std::memory_order_release);
  return true;
}

CommandReader::Counts CommandReader::counts() const noexcept {
  // Reads in reverse order, so that a count is never less than one that is a part of it.
  Counts counts;
  counts.failed = failed_.load(std::memory_order_acquire);
  counts.ended = ended_.load(std::memory_order_acquire);
  counts.taken = taken_.load(std::memory_order_acquire);
  return counts;
}

std::vector<CommandReader::Failure> CommandReader::take_failures() {
  const std::lock_guard lock(mutex_);
  std::vector<Failure> taken(std::make_move_iterator(failures_.begin()),
                             std::make_move_iterator(failures_.end()));
  failures_.clear();
  return taken;
}

bool CommandReader::has_news() const noexcept {
  if (closed_ || num_open_.load(std::memory_order_relaxed) >= memory_.num_commands) return false;
  const std::uint32_t head = head_.load(std::memory_order_relaxed);
  return load(memory_.commands[head & (memory_.num_commands - 1)].number, std::memory_order_relaxed) ==
         (kThere | head);
}

// Reads the command at the head once: it may change while we read.
std::optional<Command> CommandReader::next() const noexcept {
  const std::uint32_t head = head_.load(std::memory_order_relaxed);
  const Command& at = memory_.commands[head & (memory_.num_commands - 1)];
  const std::uint32_t number = load(at.number, std::memory_order_acquire);
  if (number != (kThere | head)) return std::nullopt;
  constexpr auto kRelaxed = std::memory_order_relaxed;
  return Command{load(at.what, kRelaxed), load(at.pair, kRelaxed), load(at.layer, kRelaxed), number};
}

Result<TransferRequest> CommandReader::request_of(const Command& command) const {
  const std::uint32_t number = command.what >> 16, num_pairs = command.what & kTooMany;
  std::shared_ptr<const PreparedWrite> write;
  {
    const std::lock_guard lock(mutex_);
    if (number < prepared_.size()) write = prepared_[number];
  }
  if (write == nullptr)
    return refusal(Code::kInvalidArgument,
                   "it names write " + std::to_string(number) + ", which is not prepared (any more)");
  const TransferRequest& all = write->request;
  const std::size_t size = all.src_ids.size();
  if (num_pairs == 0 || num_pairs == kTooMany || num_pairs > size || command.pair > size - num_pairs)
    return refusal(Code::kOutOfRange, "it names " + std::to_string(num_pairs) + " pairs from pair " +
                                          std::to_string(command.pair) + " on, but " + std::to_string(size) +
                                          " are in write " + std::to_string(number));
  const std::uint32_t layer = command.layer - write->first_layer;
  if (command.layer != kEveryLayer && layer >= all.num_layers)
    return refusal(Code::kOutOfRange, "it names layer " + std::to_string(command.layer) + ", but write " +
                                          std::to_string(number) + " has " +
                                          std::to_string(write->first_layer) + " to " +
                                          std::to_string(write->first_layer + all.num_layers - 1));
  TransferRequest request;
  request.peer = all.peer;
  request.program = all.program;
  const auto of = [&](const std::vector<std::uint32_t>& ids) {
    const auto first = ids.begin() + command.pair;
    return std::vector<std::uint32_t>(first, first + num_pairs);
  };
  request.src_ids = of(all.src_ids);
  request.dst_ids = of(all.dst_ids);
  request.first_layer = command.layer == kEveryLayer ? all.first_layer : all.first_layer + layer;
  request.num_layers = command.layer == kEveryLayer ? all.num_layers : 1;
  request.layers_ready = request.num_layers;
  request.notify = all.notify;
  request.priority = all.priority;
  request.timeout_ns = all.timeout_ns;
  request.integrity = all.integrity;
  request.lease = all.lease;
  request.context = all.context;
  return request;
}

// A command leaves the ring when nothing takes memory any more: where memory is lacking, it is still there at
// the next look. Its failure, should it fail, is made with it.
bool CommandReader::look(Engine& engine, Time now) {
  bool found = false;
  for (int count = 0; !closed_ && count < kAtOnce && open_.size() < memory_.num_commands; ++count) {
    const std::optional<Command> command = next();
    if (!command) break;
    found = true;
    const std::uint64_t index = taken_.load(std::memory_order_relaxed);
    Open one;
    Taken& taken = one[0];
    taken.failure.push_back(
        {index, command->what >> 16, command->pair, command->what & kTooMany, command->layer, Status()});
    open_.reserve(open_.size() + 1);
    Result<TransferRequest> request = request_of(*command);
    Result<std::shared_ptr<Handle>> posted =
        request.ok() ? engine.post(now, std::move(request).value()) : request.status();
    Status refused = posted.status();
    take_out(index);
    if (!refused.ok()) {
      end(taken, std::move(refused));
      continue;
    }
    const std::uint64_t id = posted.value()->id();
    taken.handle = std::move(posted).value();
    auto entry = one.extract(one.begin());
    entry.key() = id;
    open_.insert(std::move(entry));
  }
  num_open_.store(open_.size(), std::memory_order_relaxed);
  return found;
}

void CommandReader::take_out(std::uint64_t index) noexcept {
  head_.store(head_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  taken_.store(index + 1, std::memory_order_release);
  // Released: the next writer to that place writes after we have read it.
  std::atomic_ref(memory_.counts->taken.value)
      .store(static_cast<unsigned>(index + 1), std::memory_order_release);
}

bool CommandReader::on_ended(std::uint64_t handle) {
  const auto found = open_.find(handle);
  if (found == open_.end()) return false;
  Status status = found->second.handle->status();
  if (status.ok() && found->second.handle->outcome() != Outcome::kDone)
    status = {Code::kCancelled, "the transfer was cancelled"};
  auto ended = open_.extract(found);
  num_open_.store(open_.size(), std::memory_order_relaxed);
  end(ended.mapped(), std::move(status));
  return true;
}

void CommandReader::end(Taken& taken, Status status) {
  const bool failed = !status.ok();
  if (failed) {
    taken.failure.front().status = std::move(status);
    const std::lock_guard lock(mutex_);
    if (failures_.size() == kMostFailures) failures_.pop_front();
    failures_.splice(failures_.end(), taken.failure);
  }
  const auto count = [](std::atomic<std::uint64_t>& counter, CommandCount& shared) {
    const std::uint64_t counted = counter.load(std::memory_order_relaxed) + 1;
    std::atomic_ref(shared.value).store(static_cast<unsigned>(counted), std::memory_order_release);
    counter.store(counted, std::memory_order_release);
  };
  if (failed) count(failed_, memory_.counts->failed);
  count(ended_, memory_.counts->ended);
  news_(id_);
}

}  // namespace kvxfer
