// Transfers, and notifications.
#include <algorithm>
#include <cstring>

#include "raw_agent/agent.h"
#include "raw_agent/messages.h"

namespace kvxfer::raw_agent {
namespace {

// A caller whose checks come this close together does nothing else.
constexpr Time kSpinning = 20'000;
constexpr Time kSpinWait = 100'000;
// Programs that are kept for one session, so that later requests can use them again.
constexpr std::size_t kMostPrograms = 512;
constexpr std::size_t kMostNames = 65536;

}  // namespace

// ---- transfers -------------------------------------------------------------------------------------

template <class Row>
Result<std::shared_ptr<const PreparedList>> Agent::prepare_rows(const std::string& agent,
                                                                std::span<const Row> rows, MemoryKind kind) {
  // Other calls go on meanwhile: a list may be long.
  std::shared_ptr<const SectionMap> sections;
  {
    const std::lock_guard lock(mutex_);
    if (agent.empty() || agent == name()) {
      sections = sections_;
    } else {
      const Remote* const remote = find(agent);
      if (remote == nullptr) return unknown(agent);
      sections = remote->sections;
    }
  }
  Result<PreparedList> prepared = raw_agent::prepare(*sections, rows, kind, agent);
  if (!prepared.ok()) return prepared.status();
  return std::make_shared<const PreparedList>(std::move(prepared).value());
}
template Result<std::shared_ptr<const PreparedList>> Agent::prepare_rows(const std::string&,
                                                                         std::span<const Descriptor>,
                                                                         MemoryKind);
template Result<std::shared_ptr<const PreparedList>> Agent::prepare_rows(const std::string&,
                                                                         std::span<const Strided>,
                                                                         MemoryKind);

Result<std::shared_ptr<Request>> Agent::make(Operation operation, const PreparedList& local,
                                             std::span<const std::uint32_t> local_entries, bool all_local,
                                             const PreparedList& remote,
                                             std::span<const std::uint32_t> remote_entries, bool all_remote) {
  if (!local.agent.empty()) return Status(Code::kInvalidArgument, "the local list belongs to a remote agent");
  if (remote.agent.empty()) return Status(Code::kInvalidArgument, "the remote list names no agent");
  const std::size_t num = all_local ? local.size() : local_entries.size();
  const std::size_t num_remote = all_remote ? remote.size() : remote_entries.size();
  if (num != num_remote || num == 0)
    return Status(num == 0 ? Code::kInvalidArgument : Code::kLengthMismatch,
                  num == 0 ? "a transfer has at least one pair of descriptors"
                           : std::to_string(num) +
                                 " local descriptors were given, but the number of remote ones is " +
                                 std::to_string(num_remote));
  const bool writes = operation == Operation::kWrite;
  const std::uint32_t* const near = all_local ? nullptr : local_entries.data();
  const std::uint32_t* const far = all_remote ? nullptr : remote_entries.data();
  Result<std::vector<Way>> ways =
      writes ? find_ways(local, near, remote, far, num) : find_ways(remote, far, local, near, num);
  if (!ways.ok()) return ways.status();
  auto request = std::make_shared<Request>();
  request->remote_ = remote.agent;
  request->operation_ = operation;
  request->num_descriptors_ = num;
  for (const Way& way : ways.value()) request->nbytes_ += way.nbytes;
  if (remote.agent == name()) {
    for (std::size_t i = 0; i < num; ++i) {
      const std::uint32_t n = near == nullptr ? static_cast<std::uint32_t>(i) : near[i];
      const std::uint32_t f = far == nullptr ? static_cast<std::uint32_t>(i) : far[i];
      const std::uint64_t nbytes = local.grids[local.grid_of(n)].nbytes;
      auto* const ours =
          reinterpret_cast<std::byte*>(local.addresses[local.grid_of(n)] + local.ids[n] * nbytes);
      auto* const theirs =
          reinterpret_cast<std::byte*>(remote.addresses[remote.grid_of(f)] + remote.ids[f] * nbytes);
      request->runs_.push_back(writes ? Request::Run{theirs, ours, nbytes}
                                      : Request::Run{ours, theirs, nbytes});
    }
    return request;
  }
  request->ways_ = std::move(ways).value();
  request->programs_.resize(request->ways_.size());
  for (const Way& way : request->ways_) request->keys_.push_back(way.is_regular ? way.key() : std::string());
  return request;
}

Status Agent::move_locally(Request& request) {
  for (const Request::Run& run : request.runs_) std::memmove(run.to, run.from, run.nbytes);
  if (!request.notify_.empty()) notices_.push_back({name(), {.payload = std::exchange(request.notify_, {})}});
  request.state_ = Request::State::kDone;
  request.ended_at_ = Runtime::now();
  return {};
}

Status Agent::post(Request& request, wire::Bytes notify) {
  if (Status alive = runtime_->check_alive(); !alive.ok()) return alive;
  if (notify.size() > wire::kMaxMessage - 1)
    return {Code::kInvalidArgument,
            "a notification has up to " + std::to_string(wire::kMaxMessage - 1) + " bytes"};
  {
    const std::lock_guard lock(mutex_);
    refresh(request);
    if (request.state_ == Request::State::kWaiting || request.state_ == Request::State::kMoving)
      return {Code::kRefused, "the transfer is under way"};
    request.notify_ = std::move(notify);
    request.status_ = {};
    request.handles_.clear();
    request.posted_at_ = Runtime::now();
    if (!request.runs_.empty()) return move_locally(request);
    Remote* const remote = find(request.remote_);
    if (remote == nullptr) return unknown(request.remote_);
    if (remote->is_ready()) {
      if (Status begun = start_ways(request, *remote); !begun.ok()) return begun;
    } else {
      if (remote->session == 0)
        if (Status begun = dial(*remote); !begun.ok()) return begun;
      request.state_ = Request::State::kWaiting;
      remote->waiting.push_back(request.shared_from_this());
    }
    request.begun_at_ = Runtime::now();
  }
  return check(request);
}

Status Agent::start_ways(Request& request, Remote& remote) {
  request.session_ = remote.session;
  request.state_ = Request::State::kMoving;
  const bool notifies = request.ways_.size() == 1 && request.notify_.size() <= wire::kMaxNotify;
  Status status = install(request, remote);
  if (status.ok()) {
    auto posted = runtime_->with_open_engine([&](Engine& engine, Time now) -> Status {
      for (std::size_t i = 0; i < request.ways_.size(); ++i) {
        const Way& way = request.ways_[i];
        TransferRequest transfer;
        transfer.peer = remote.session;
        transfer.program = request.programs_[i]->id();
        transfer.src_ids = way.src_ids;
        transfer.dst_ids = way.dst_ids;
        transfer.num_layers = transfer.layers_ready = way.program.num_layers;
        transfer.timeout_ns = options_.timeout_ns;
        transfer.awaits_last_word = true;  // or release() would be no fence
        if (notifies) transfer.notify = request.notify_;
        Result<std::shared_ptr<Handle>> handle = engine.post(now, std::move(transfer));
        if (!handle.ok()) return handle.status();
        request.handles_.push_back(std::move(handle).value());
      }
      return {};
    });
    status = posted ? *posted : runtime_->check_alive();
  }
  if (status.ok()) {
    if (notifies) request.notify_.clear();
    return {};
  }
  // Those that were posted end first: refresh().
  for (const auto& handle : request.handles_) runtime_->cancel(*handle);
  request.status_ = status;
  request.notify_.clear();
  request.ended_at_ = Runtime::now();
  refresh(request);
  return status;
}

// Tells the peer every program of the request that it does not know.
Status Agent::install(Request& request, Remote& remote) {
  const bool writes = request.operation_ == Operation::kWrite;
  for (std::size_t i = 0; i < request.ways_.size(); ++i) {
    const Way& way = request.ways_[i];
    std::shared_ptr<Installed>& program = request.programs_[i];
    if (program != nullptr && program->session() == remote.session) continue;
    const std::string key = way.is_regular ? (writes ? "w" : "r") + request.keys_[i] : std::string();
    if (const auto known = remote.programs.find(key); known != remote.programs.end()) {
      program = known->second;
      continue;
    }
    auto installed = runtime_->with_open_engine([&](Engine& engine, Time now) {
      return engine.install_program(now, remote.session, writes, way.src, way.dst, way.program);
    });
    if (!installed) return runtime_->check_alive();
    if (!installed->ok()) return installed->status();
    program = std::make_shared<Installed>(runtime_, remote.session, installed->value());
    if (!way.is_regular) continue;
    if (remote.programs.size() >= kMostPrograms)
      std::erase_if(remote.programs, [](const auto& each) { return each.second.use_count() == 1; });
    if (remote.programs.size() < kMostPrograms) remote.programs.emplace(key, program);
  }
  return {};
}

// The request ends once all of its transfers have ended, or if it waited too long for the first one.
void Agent::refresh(Request& request) {
  if (request.state_ == Request::State::kWaiting &&
      Runtime::now() - request.posted_at_ > options_.timeout_ns) {
    if (Remote* const remote = find(request.remote_))
      std::erase_if(remote->waiting, [&](const auto& each) { return each.get() == &request; });
    request.state_ = Request::State::kFailed;
    request.status_ = {Code::kDeadline, "agent " + request.remote_ +
                                            " did not grant in time the memory that its metadata name"};
  }
  if (request.state_ != Request::State::kMoving) return;
  Status failed = request.status_;  // it did not start whole
  for (const auto& handle : request.handles_) {
    const Outcome outcome = handle->outcome();
    if (outcome == Outcome::kPending) return;
    if (outcome != Outcome::kDone && failed.ok()) failed = handle->status();
    request.ended_at_ = std::max(request.ended_at_, handle->ended_at());
  }
  if (failed.ok() && !request.notify_.empty()) {
    failed = send(request.session_, kNotify, request.notify_);
    if (failed.code() == Code::kExhausted) return;  // room will come
    request.notify_.clear();
  }
  request.state_ = failed.ok() ? Request::State::kDone : Request::State::kFailed;
  request.status_ = failed;
}

Status Agent::check(Request& request) {
  for (int look = 0;; ++look) {
    {
      const std::lock_guard lock(mutex_);
      refresh(request);
      switch (request.state_) {
        case Request::State::kMade: return {Code::kInvalidArgument, "the transfer was not posted"};
        case Request::State::kDone: return {};
        case Request::State::kFailed: return request.status_;
        case Request::State::kWaiting:
        case Request::State::kMoving: break;
      }
    }
    const Time now = Runtime::now();
    if (look == 1) {
      checked_at_.store(now, std::memory_order_relaxed);
      return {Code::kAgain, "the transfer is under way"};
    }
    if (Status alive = runtime_->check_alive(); !alive.ok()) return alive;
    // A caller that asks again at once would only take the processor from the thread that copies.
    const bool is_spinning = now - checked_at_.load(std::memory_order_relaxed) < kSpinning;
    const std::vector<std::shared_ptr<Handle>> handles =
        is_spinning ? pending(request) : decltype(pending(request))();
    if (handles.empty())
      (void)runtime_->poll();
    else
      (void)runtime_->wait(
          [&] {
            return std::all_of(handles.begin(), handles.end(),
                               [](const auto& each) { return each->outcome() != Outcome::kPending; });
          },
          kSpinWait);
  }
}

std::vector<std::shared_ptr<Handle>> Agent::pending(const Request& request) {
  const std::lock_guard lock(mutex_);
  if (request.state_ != Request::State::kMoving) return {};
  return request.handles_;
}

Status Agent::release(Request& request) {
  std::vector<std::shared_ptr<Handle>> pending;
  {
    const std::lock_guard lock(mutex_);
    if (request.state_ == Request::State::kWaiting) {
      if (Remote* const remote = find(request.remote_))
        std::erase_if(remote->waiting, [&](const auto& each) { return each.get() == &request; });
      request.state_ = Request::State::kMade;
    }
    refresh(request);
    if (request.state_ == Request::State::kMoving) pending = request.handles_;
    request.notify_.clear();
    request.status_ = {Code::kCancelled, "the transfer was released"};
  }
  if (!runtime_->check_alive().ok()) return {};
  const auto has_ended = [&] {
    return std::all_of(pending.begin(), pending.end(),
                       [](const auto& each) { return each->outcome() != Outcome::kPending; });
  };
  for (const auto& handle : pending) runtime_->cancel(*handle);
  (void)runtime_->wait(has_ended, options_.timeout_ns);
  if (has_ended() || !runtime_->check_alive().ok()) {
    const std::lock_guard lock(mutex_);
    request.state_ = Request::State::kFailed;
    return {};
  }
  return {Code::kDeadline, "agent " + request.remote_ + " has not said within " +
                               std::to_string(options_.timeout_ns / 1'000'000) +
                               " ms that no byte of the transfer can land any more. Do not use its memory "
                               "again, and release the transfer once more"};
}

// ---- notifications ---------------------------------------------------------------------------------

Status Agent::send(SessionKey session, std::uint8_t kind, std::span<const std::byte> payload) {
  wire::Bytes bytes;
  bytes.reserve(payload.size() + 1);
  bytes.push_back(std::byte{kind});
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  auto sent = runtime_->with_open_engine(
      [&](Engine& engine, Time now) { return engine.send_message(now, session, std::move(bytes)); });
  return sent ? *sent : runtime_->check_alive();
}

Status Agent::notify(const std::string& remote_name, wire::Bytes payload) {
  if (payload.size() > wire::kMaxMessage - 1)
    return {Code::kInvalidArgument,
            "a notification has up to " + std::to_string(wire::kMaxMessage - 1) + " bytes"};
  {
    const std::lock_guard lock(mutex_);
    if (remote_name == name()) {
      notices_.push_back({name(), {.payload = std::move(payload)}});
      return {};
    }
  }
  if (Status connected = connect(remote_name); !connected.ok()) return connected;
  for (const Time until = Runtime::now() + options_.timeout_ns;;) {
    SessionKey session = 0;
    {
      const std::lock_guard lock(mutex_);
      if (const Remote* const remote = find(remote_name)) session = remote->session;
    }
    Status sent = send(session, kNotify, payload);
    if (sent.code() != Code::kExhausted || Runtime::now() > until) return sent;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

std::string Agent::name_of(SessionKey session) {
  if (const auto found = names_.find(session); found != names_.end()) return found->second;
  const auto view = runtime_->with_engine([&](Engine& engine, Time) { return engine.peer(session); });
  std::string name = view ? view->name : std::string();
  if (!name.empty()) names_.emplace(session, name);
  if (names_.size() > kMostNames) names_.erase(names_.begin());  // the oldest
  return name;
}

std::vector<std::pair<std::string, wire::Bytes>> Agent::take_notifications() {
  std::vector<std::pair<std::string, wire::Bytes>> out;
  if (!runtime_->check_alive().ok()) return out;
  (void)runtime_->poll();
  const std::lock_guard lock(mutex_);
  for (Notice& notice : notices_) {
    notice.mail.charge.release();
    if (notice.mail.tells) runtime_->message_taken(notice.mail.peer);
    out.emplace_back(std::move(notice.from), std::move(notice.mail.payload));
  }
  notices_.clear();
  while (std::optional<Mail> mail = runtime_->ring().take(MailKind::kNotification)) {
    if (mail->tells) runtime_->message_taken(mail->peer);
    out.emplace_back(name_of(mail->peer), std::move(mail->payload));
  }
  return out;
}

}  // namespace kvxfer::raw_agent
