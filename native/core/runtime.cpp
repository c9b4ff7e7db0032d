#include "core/runtime.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <utility>

#include "core/faulty_transport.h"
#include "core/fork_guard.h"
#include "core/pool_memory.h"
#include "core/random.h"

namespace kvxfer {
namespace {

// While the agent closes, between two looks whether what it waits for is so.
constexpr Time kClosingPause = 1'000'000;

// Polls of every transport in which a caller takes what has ended at once. More are for whoever drives.
constexpr int kEndedRounds = 16;

// After the first bytes of start() none are refused, but by a sandbox that is set up later.
void draw(std::span<std::byte> bytes) {
  const Status status = fill_random(bytes);
  if (status.ok()) return;
  std::fprintf(stderr, "kvxfer: %s\n", status.message().c_str());
  std::abort();
}

wire::Id128 random_id() {
  wire::Id128 id;
  draw(id);
  return id;
}

// Equal for all agents of one boot of one machine.
wire::Id128 host_id() {
  wire::Id128 id{};
  if (std::FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "re")) {
    char text[64] = {};
    const std::size_t length = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    std::size_t digits = 0;
    for (std::size_t i = 0; i < length && digits < 32; ++i) {
      const char c = text[i];
      const int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
      if (value < 0) continue;
      id[digits / 2] |= static_cast<std::byte>(value << (digits % 2 == 0 ? 4 : 0));
      ++digits;
    }
    if (digits == 32) return id;
  }
  return random_id();  // alike with nobody: no transport of one host is tried
}

const wire::Id128& process_id() {
  static wire::Id128 id = random_id();
  static pid_t pid = ::getpid();
  if (pid != ::getpid()) {  // a forked child is another process
    id = random_id();
    pid = ::getpid();
  }
  return id;
}

std::string_view stage_of(WorkKind kind) {
  switch (kind) {
    case WorkKind::kFetch: return "fetch";
    case WorkKind::kSend: return "send";
    case WorkKind::kReceive: return "receive";
    case WorkKind::kCheckFence: return "check fence";
  }
  return "";
}

std::string hex(const wire::Id128& id) {
  std::string text;
  for (const std::byte b : id) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[static_cast<unsigned>(b) >> 4];
    text += kDigits[static_cast<unsigned>(b) & 15];
  }
  return text;
}

}  // namespace

Time Runtime::now() noexcept {
  timespec time;
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return Time{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// ---- life -----------------------------------------------------------------------------------------

Runtime::Runtime(RuntimeOptions options)
    : options_(std::move(options)), owner_(::getpid()), gate_(options_.meter_gate) {}

Result<std::shared_ptr<Runtime>> Runtime::create(RuntimeOptions options) {
  std::shared_ptr<Runtime> runtime(new Runtime(std::move(options)), [](Runtime* owned) {
    if (!is_forked(owned->owner_)) delete owned;
  });
  if (Status status = runtime->start(); !status.ok()) return status;
  return runtime;
}

Status Runtime::start() {
  nvtx::attach();
  wire::Id128 drawn;
  if (Status status = fill_random(drawn); !status.ok()) return status;
  Result<std::unique_ptr<FenceTable>> fences = FenceTable::create();
  if (!fences.ok()) return fences.status();
  fences_ = std::move(fences).value();
  if (Status status = add_transports(); !status.ok()) return status;
  if (!options_.gpus.empty()) {
    const GpuPart& part = options_.gpus.front();
    Result<gpu::StreamWrites> writes = gpu::StreamWrites::create(*part.driver, part.device);
    if (!writes.ok()) return writes.status();
    stream_writes_ = std::make_shared<gpu::StreamWrites>(std::move(writes).value());
  }

  self_.name = options_.name;
  self_.incarnation = random_id();
  self_.host = host_id();
  self_.process = process_id();
  for (const TransportKind* kind : kinds_) self_.transports.emplace_back(kind->name);
  waker_.fd.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  for (Bell* bell : {&thread_bell_, &driver_bell_}) bell->fd.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!waker_.fd || !thread_bell_.fd || !driver_bell_.fd || ring_.fd() < 0 || !reactor_.usable())
    return {Code::kSystem, "no descriptor is left for the agent's eventfds and its epoll: raise ulimit -n"};
  guard_fd(waker_.fd.get());
  guard_fd(thread_bell_.fd.get());
  guard_fd(driver_bell_.fd.get());
  guard_fd(ring_.fd());
  if (Status status = reactor_.add(waker_.fd.get(), EPOLLIN, waker_); !status.ok()) return status;

  // An eighth of the descriptors that the process may have, and 64 at least, of which each has two frames of the
  // handshake here at most.
  rlimit descriptors{};
  ::getrlimit(RLIMIT_NOFILE, &descriptors);
  Budget::Amounts of_strangers{};
  const std::uint64_t num_strangers = std::clamp<std::uint64_t>(descriptors.rlim_cur / 8, 64, 1024);
  of_strangers[static_cast<std::size_t>(Resource::kDescriptors)] = num_strangers;
  of_strangers[static_cast<std::size_t>(Resource::kBytes)] =
      num_strangers * 2 * (wire::kHeaderNbytes + wire::kMaxHandshakeBody + wire::kMacNbytes);
  strangers_ = std::make_shared<Budget>(of_strangers);
  reserve_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));

  if (!options_.listen.empty()) {
    const Result<std::vector<TcpAddress>> resolved = TcpAddress::resolve(options_.listen);
    if (!resolved.ok()) return resolved.status();
    const TcpAddress& where = resolved.value().front();
    if (!where.loopback && options_.secret.empty())
      return {Code::kInvalidArgument,
              "listening on " + options_.listen +
                  " needs a secret: without one anybody who reaches it could read and write the cache"};
    Result<UniqueFd> listening = listen_tcp(where);
    if (!listening.ok()) return listening.status();
    tcp_listener_.runtime = this;
    tcp_listener_.tcp = true;
    tcp_listener_.fd = std::move(listening).value();
    Result<std::string> address = listening_address(tcp_listener_.fd.get());
    if (!address.ok()) return address.status();
    address_ = address.value();
    self_.unix_name = name_beside(address_);
    Result<UniqueFd> local = listen_unix(self_.unix_name);
    if (!local.ok()) {  // somebody has that name
      self_.unix_name = "kvxfer-" + hex(random_id());
      local = listen_unix(self_.unix_name);
    }
    if (!local.ok()) return local.status();
    unix_listener_.runtime = this;
    unix_listener_.fd = std::move(local).value();
    for (Listener* listener : {&tcp_listener_, &unix_listener_}) {
      guard_fd(listener->fd.get());
      if (Status status = reactor_.add(listener->fd.get(), EPOLLIN, *listener); !status.ok()) return status;
    }
  }

  EngineConfig config;
  config.session.secret = is_open_to_others() ? options_.secret : options_.user_secret;
  if (!is_open_to_others())
    config.session.other_secret =
        "this agent was given none and uses its user's own: run both as one user, or give both the same "
        "secret";
  config.session.self = self_;
  config.session.handshake_timeout_ns = options_.handshake_ns;
  config.session.heartbeat_ns = options_.heartbeat_ns;
  config.session.silent_ns = options_.silent_ns;
  config.lease_margin_ns = options_.lease_margin_ns;
  config.max_open_transfers = options_.max_transfers_per_peer;
  config.peer_budget = peer_budget(config.max_open_transfers, config.max_open_pairs);
  engine_ = std::make_unique<Engine>(std::move(config), static_cast<EngineHost&>(*this));
  thread_ = std::thread([this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), "kvxfer");
  return {};
}

Status Runtime::add_transports() {
  Result<Faults> faults = Faults::parse(options_.faults);
  if (!faults.ok()) return faults.status();
  if (options_.gpus.size() > 1)
    return {Code::kUnsupported, "an agent has one GPU for now: make an agent for each"};
  if (Status status = check_options(options_.transport_options); !status.ok()) return status;
  Result<std::vector<const TransportKind*>> used = transports_in_use(options_.transports);
  if (!used.ok()) return used.status();
  kinds_ = std::move(used).value();
  SharedParts shared;
  const RailParts parts{reactor_, *fences_, options_.gpus, shared};
  for (const TransportKind* kind : kinds_) {
    const auto failed = [&](Code code, const std::string& why) -> Status {
      return {code, "transport " + std::string(kind->name) + ": " + why};
    };
    if (const std::string why = kind->why_off(options_.gpus); !why.empty())
      return failed(Code::kInvalidArgument, why);
    auto rails = kind->make(parts, OptionValues(*kind, options_.transport_options));
    if (!rails.ok()) return failed(rails.status().code(), rails.status().message());
    for (std::unique_ptr<Transport>& rail : rails.value()) {
      if (!options_.faults.empty()) {
        Faults own = faults.value();
        own.seed += transports_.size();  // rails that fail in step would hide what failover does
        rail = std::make_unique<FaultyTransport>(std::move(rail), own);
      }
      transports_.push_back(std::move(rail));
      kind_of_.push_back(kind);
    }
  }
  return {};
}

Runtime::~Runtime() {
  if (engine_ != nullptr) close(Time{1'000'000'000});  // else it never came to life
  transports_.clear();
  connections_.clear();
  // A number that stays guarded would be closed in a forked child, whoever owns it by then.
  for (const int fd : {tcp_listener_.fd.get(), unix_listener_.fd.get(), waker_.fd.get(),
                       thread_bell_.fd.get(), driver_bell_.fd.get(), ring_.fd()})
    if (fd >= 0) unguard_fd(fd);
}

Status Runtime::check_alive() const {
  if (is_forked(owner_))
    return {Code::kForked, "agent '" + options_.name +
                               "' belongs to the process that made it: a forked child makes its own"};
  if (closed()) return {Code::kClosed, "agent '" + options_.name + "' is closed"};
  return {};
}

void Runtime::close(Time timeout_ns) {
  if (is_forked(owner_)) return;
  const std::lock_guard closing(closing_);
  if (closed_.exchange(true)) return;
  const Time deadline = now() + timeout_ns;
  {
    const CallerTurn turn(*this);
    commands_.close_all();
    engine_->close(turn.now);
  }
  // What was posted still completes.
  for (bool left = true; left && now() < deadline;) {
    const std::lock_guard lock(gate_);
    progress();
    left = engine_->num_transfers() != 0;
  }
  await_unmapped(kEveryRegion, "GPU memory of this agent", std::min(deadline - now(), options_.silent_ns));
  stop_ = true;
  wake_reactor();
  notify_waiting();
  if (thread_.joinable()) thread_.join();
  triggers_.clear();
  std::unique_lock lock(gate_);
  listeners_due_at_ = kNever;
  for (Listener* listener : {&tcp_listener_, &unix_listener_})
    if (listener->fd) {
      listener->rests_until = kNever;
      reactor_.remove(listener->fd.get());
      unguard_fd(listener->fd.get());
      listener->fd.reset();
    }
  for (std::unique_ptr<Connection>& connection : connections_)
    if (connection->socket) connection->socket->close();
  for (const auto& [place, rail] : bound_) transports_[place.first]->disconnect(place.second);
  bound_.clear();
  places_.clear();
  if (const std::size_t left = engine_->num_transfers(); left != 0)
    log("closing waits for copies of " + std::to_string(left) +
        " transfers that a device has under way: their memory is not given back before it has ended them");
  // With what they opened: exported handles, streams, a device's context. What is under way ends here, and
  // nobody else is to wait for it meanwhile.
  std::vector<std::shared_ptr<Transport>> transports = std::move(transports_);
  std::map<RegionId, std::vector<Pinned>> pinned = std::move(pinned_);
  transports_.clear();
  pinned_.clear();
  lock.unlock();
  transports.clear();
  pinned.clear();
  lock.lock();
  ranges_.clear();
  engine_->abandon(now());
  const auto owners = std::exchange(owners_, {});
  {
    const std::lock_guard streams_lock(streams_mutex_);
    stream_writes_.reset();  // whoever enqueues a store right now has it until then
  }
  ended_ = true;
  ring_.wake();
  lock.unlock();  // before the owners go
}

// ---- what callers do that is more than the engine's ----------------------------------------------

Result<RegionId> Runtime::register_region(std::string name,
                                          std::vector<std::pair<std::byte*, std::uint64_t>> spans,
                                          std::uint32_t num_blocks, const CopyProgram& loops,
                                          wire::Bytes layout, MemoryKind kind,
                                          std::shared_ptr<const void> owner, int device) {
  if (spans.empty() || spans.size() > wire::kMaxSpans || num_blocks == 0)
    return Status(Code::kInvalidArgument,
                  "a region has 1 to " + std::to_string(wire::kMaxSpans) + " ranges and at least one block");
  if (name.empty() || name.size() > wire::kMaxName || layout.size() > wire::kMaxLayout)
    return Status(Code::kInvalidArgument, "a region's name has 1 to " + std::to_string(wire::kMaxName) +
                                              " bytes, its layout up to " + std::to_string(wire::kMaxLayout));
  std::sort(spans.begin(), spans.end());
  auto region = std::make_unique<Region>();
  LocalRegion& memory = region->memory;
  memory.kind = kind;
  memory.device = device;
  memory.base = spans.front().first;
  for (const auto& [address, nbytes] : spans) {
    const auto offset = static_cast<std::uint64_t>(address - memory.base);
    if (nbytes == 0 ||
        (!memory.spans.empty() && offset < memory.spans.back().offset + memory.spans.back().nbytes))
      return Status(Code::kInvalidArgument, "the ranges of region '" + name + "' are empty or overlap");
    memory.spans.push_back({offset, nbytes});
  }
  if (Status status = check_program(loops); !status.ok()) return status;
  Result<Footprint> footprint = Footprint::create(loops, Side::kDst, num_blocks, memory.spans);
  if (!footprint.ok()) return footprint.status();
  region->footprint = std::move(footprint).value();
  region->name = std::move(name);
  region->num_blocks = num_blocks;
  region->layout = std::move(layout);
  const std::uint64_t extent = memory.spans.back().offset + memory.spans.back().nbytes;
  if (std::optional<PoolSlice> slice;
      kind == MemoryKind::kHost && (slice = PoolMemory::find(memory.base, extent)))
    region->keepalive = std::move(slice->keepalive);
  LocalRegion described = memory;
  Status failure;
  // `region` is ours until the engine has it; what comes later is told to the engine.
  const auto note = [&](std::size_t rail, const Status& why) {
    std::string text = std::string(kind_of_[rail]->name) + ": " + why.message();
    failure = {why.code(), failure.ok() ? text : failure.message() + "; " + text};
    if (region != nullptr)
      region->notes.push_back(std::move(text));
    else
      engine_->add_note(described.id, std::move(text));
  };
  const auto add = [&](std::size_t rail, const Pinned& pinned, Time at) {
    Result<RegionKeys> made = transports_[rail]->register_memory(described, pinned);
    if (!made.ok()) return note(rail, made.status());
    if (pinned != nullptr) pinned_[described.id].push_back(pinned);
    wire::TransportKeys keys{std::string(kind_of_[rail]->name), std::move(made).value(), instance_of(rail)};
    if (region != nullptr)
      region->keys.push_back(std::move(keys));
    else
      engine_->add_keys(at, described.id, std::move(keys));
  };
  const auto announce = [&](Time at) -> Status {
    if (region == nullptr || region->keys.empty()) return {};
    const Result<RegionId> added = engine_->register_region(at, std::move(region));
    if (!added.ok()) {
      region_fenced(described.id);
      return added.status();
    }
    owners_.emplace(described.id, owner);
    return {};
  };
  std::vector<std::pair<std::size_t, std::shared_ptr<Transport>>> slow;
  {
    const CallerTurn turn(*this);
    if (closed()) return check_alive();
    if (engine_->num_regions() >= wire::kMaxRegions)
      return Status(Code::kExhausted, "agent '" + options_.name + "' has " +
                                          std::to_string(wire::kMaxRegions) +
                                          " regions, as many as a peer takes: deregister some, or register "
                                          "tensors together, as one region");
    region->memory.id = described.id = engine_->reserve_region_id();
    for (std::size_t i = 0; i < transports_.size(); ++i) {
      if (!transports_[i]->capabilities().memory.has(kind)) continue;
      if (transports_[i]->prepares())
        slow.emplace_back(i, transports_[i]);
      else
        add(i, nullptr, turn.now);
    }
    if (Status status = announce(turn.now); !status.ok()) return status;
  }
  // Peers reach it over those, while devices pin it for others.
  for (auto& [rail, transport] : slow) {
    Result<Pinned> pinned = transport->prepare(described);
    const CallerTurn turn(*this);
    if (closed()) return check_alive();
    if (!pinned.ok())
      note(rail, pinned.status());
    else
      add(rail, pinned.value(), turn.now);
    if (Status status = announce(turn.now); !status.ok()) return status;
  }
  if (region == nullptr) return described.id;
  if (!failure.ok())
    return Status(failure.code(), "registering '" + region->name + "' with " + failure.message());
  return Status(Code::kUnsupported, "no transport of agent '" + options_.name + "' reaches " +
                                        (kind == MemoryKind::kGpu ? "GPU" : "host") +
                                        " memory: make it with one that does (" + names_reaching(kind) + ")");
}

std::uint16_t Runtime::instance_of(std::size_t transport) const {
  const auto first = std::find(kind_of_.begin(), kind_of_.end(), kind_of_[transport]);
  return static_cast<std::uint16_t>(transport - static_cast<std::size_t>(first - kind_of_.begin()));
}

bool Runtime::take_ended(const std::function<bool()>& is_so) {
  for (int round = 0; round < kEndedRounds; ++round)
    if (is_so() || !move(now())) break;
  return is_so();
}

bool Runtime::await(const std::function<bool()>& is_so, Time timeout_ns) {
  const auto asked = [&] {
    const std::lock_guard lock(gate_);
    return is_so();
  };
  const Time until = time_after(now(), timeout_ns);
  while (!asked()) {
    const Time left = until - now();
    if (left <= 0) return asked();
    if (closed()) {  // wait() is over for everybody
      {
        const std::lock_guard lock(gate_);
        progress();
      }
      reactor_.wait(std::min(left, kClosingPause), -1);
    } else {
      wait(asked, left);
    }
  }
  return true;
}

bool Runtime::revoke(LeaseId lease, Time timeout_ns) {
  const auto is_over = [&] { return engine_->lease_state(lease) != LeaseState::kEnding; };
  {
    const CallerTurn turn(*this);
    engine_->revoke(turn.now, lease);
    if (take_ended(is_over)) return true;
  }
  const nvtx::Range range("wait for a fence", lease);
  return await(is_over, timeout_ns);
}

void Runtime::message_taken(SessionKey peer) {
  with_open_engine([&](Engine& engine, Time at) {
    engine.message_taken(at, peer);
    return true;
  });
}

void Runtime::cancel(const Handle& handle) {
  const CallerTurn turn(*this);
  engine_->cancel(turn.now, handle.id());
  take_ended([&] { return handle.outcome() != Outcome::kPending; });
}

Status Runtime::deregister_region(RegionId id, Time timeout_ns) {
  const auto has_left = [&] { return !engine_->is_leaving(id); };
  std::string name;
  {
    const CallerTurn turn(*this);
    if (const auto begun = leaving_.find(id); begun != leaving_.end()) {
      name = begun->second;
    } else {
      if (const Region* region = engine_->region(id)) name = region->name;
      if (Status status = engine_->deregister_region(turn.now, id); !status.ok()) return status;
      if (!take_ended(has_left)) leaving_.emplace(id, name);
    }
  }
  if (!await(has_left, timeout_ns))
    return {Code::kDeadline, "region '" + name +
                                 "' is taken from peers, but a device still copies to or from it: its memory "
                                 "is not to be freed before a later deregister() returns"};
  std::vector<Pinned> unpinned;  // when this returns, and without the gate
  {
    const std::lock_guard lock(gate_);
    leaving_.erase(id);
    if (const auto found = pinned_.find(id); found != pinned_.end()) {
      unpinned = std::move(found->second);
      pinned_.erase(found);
    }
  }
  await_unmapped(id, "GPU memory of region '" + name + "'", options_.silent_ns);
  // An agent that closes takes its transports away first, and then stops them.
  if (closed()) {
    const std::lock_guard closing(closing_);
  }
  std::shared_ptr<const void> owner;
  const std::lock_guard lock(gate_);
  if (const auto kept = owners_.find(id); kept != owners_.end()) {
    owner = std::move(kept->second);
    owners_.erase(kept);
  }
  return {};
}

void Runtime::region_fenced(RegionId region) {
  for (auto& transport : transports_) transport->deregister_memory(region);
}

void Runtime::await_unmapped(RegionId region, const std::string& what, Time timeout_ns) {
  const nvtx::Range range("wait for unmapping", region);
  if (await(
          [&] {
            return std::none_of(transports_.begin(), transports_.end(), [&](const auto& transport) {
              MemoryLender* const lender = transport->lender();
              return lender != nullptr && lender->held_by_peers(region);
            });
          },
          timeout_ns))
    return;
  const CallerTurn turn(*this);
  for (auto& transport : transports_) {
    MemoryLender* const lender = transport->lender();
    if (lender == nullptr) continue;
    for (const std::string& peer : lender->give_up_holders(region))
      log(what + " may still be mapped by peer '" + peer + "', which did not say in time that it is not (" +
          std::to_string(std::max<Time>(timeout_ns, 0) / 1'000'000) +
          " ms): its process keeps the mapping until it ends. Memory of cudaMalloc is best freed after that");
  }
}

// ---- what the engine wants -----------------------------------------------------------------------

void Runtime::handle(std::size_t transport, const Completion& completion, Time at) {
  if (completion.kind == CompletionKind::kWork) {
    if (!ranges_.empty()) ranges_.erase(completion.work);
    engine_->on_completion(at, completion);
    return;
  }
  auto found = bound_.find({transport, completion.peer});
  if (found == bound_.end()) return;
  BoundRail& rail = found->second;
  if (completion.kind == CompletionKind::kRailUp) {
    rail.id = next_rail_++;
    places_[rail.id] = {transport, completion.peer};
    engine_->rail_up(at, rail.session,
                     {rail.id, rail.name, transports_[transport]->capabilities(), rail.peer_instance});
    return;
  }
  const BoundRail down = std::move(rail);
  unbind(transport, completion.peer);
  if (down.id != 0)
    engine_->rail_down(at, down.id, completion.detail);
  else
    engine_->rail_failed(at, down.session, down.name,
                         std::string(transports_[transport]->capabilities().name) + ": " + completion.detail);
}

void Runtime::unbind(std::size_t transport, PeerId peer) {
  auto found = bound_.find({transport, peer});
  if (found == bound_.end()) return;
  places_.erase(found->second.id);
  bound_.erase(found);
  transports_[transport]->disconnect(peer);
}

void Runtime::send(SessionKey session, wire::Bytes frame) {
  auto found = controls_.find(session);
  if (Connection* control = found != controls_.end() ? found->second : pending_control_)
    control->socket->send(std::move(frame));
  unsent_.push_back(session);
}

void Runtime::close_session(SessionKey session) {
  for (auto& connection : connections_)
    if (connection->session == session && connection->kind != ConnectionKind::kFresh && !connection->dead) {
      connection->socket->close();
      connection->dead = true;
      sweep_ = true;
      prove(*connection);
    }
  controls_.erase(session);
  std::vector<std::pair<std::size_t, PeerId>> rails;
  for (const auto& [place, rail] : bound_)
    if (rail.session == session) rails.push_back(place);
  for (const auto& [transport, peer] : rails) unbind(transport, peer);
}

PostResult Runtime::post(RailId rail, const Work& work) {
  auto place = places_.find(rail);
  if (place == places_.end()) return {0, Code::kRailFailed};
  Transport& transport = *transports_[place->second.transport];
  if (nvtx::tool() == nullptr) return transport.post(place->second.peer, std::span(&work, 1));
  nvtx::Range range(stage_of(work.kind), transport.capabilities().name, work.piece);
  const PostResult posted = transport.post(place->second.peer, std::span(&work, 1));
  if (posted.accepted != 0) ranges_.insert_or_assign(work.id, std::move(range));
  return posted;
}

WorkKind Runtime::choose(RailId rail, const Move& move, std::uint32_t piece) {
  auto place = places_.find(rail);
  return place == places_.end() ? WorkKind::kFetch  // which is not accepted
                                : transports_[place->second.transport]->choose(move, piece);
}

void Runtime::cancel(RailId rail, std::span<const WorkId> works) {
  // A rail that is gone has cancelled its works already. The stage lasts until a work has completed.
  if (nvtx::tool() != nullptr)
    for (const WorkId work : works) ranges_.insert_or_assign(work, nvtx::Range("fence", work));
  if (auto place = places_.find(rail); place != places_.end())
    transports_[place->second.transport]->cancel(works);
}

Status Runtime::attach(RailId rail, const RemoteRegion& region) {
  auto place = places_.find(rail);
  if (place == places_.end()) return {Code::kRailFailed, "the rail is down"};
  return transports_[place->second.transport]->attach(place->second.peer, region);
}

void Runtime::detach(RailId rail, RegionId region) {
  if (auto place = places_.find(rail); place != places_.end())
    transports_[place->second.transport]->detach(place->second.peer, region);
}

void Runtime::drop_rail(RailId rail) {
  if (auto place = places_.find(rail); place != places_.end())
    unbind(place->second.transport, place->second.peer);
}

void Runtime::emit(Event event) {
  if (event.kind == EventKind::kPeerUp)
    if (const auto control = controls_.find(event.peer); control != controls_.end())
      control->second->deadline = kNever;
  if (event.kind == EventKind::kEnded) commands_.on_ended(event.handle);
  if (event.kind == EventKind::kPeerLost) {
    // Of a stranger that never became a peer there is nothing to tell a caller, only a log.
    const bool stranger = std::any_of(connections_.begin(), connections_.end(), [&](const auto& connection) {
      return connection->session == event.peer && connection->kind == ConnectionKind::kControl &&
             connection->accepted && !connection->was_open;
    });
    if (stranger) {
      log("a connection was refused: " + event.message);
      return;
    }
  }
  if (event.kind == EventKind::kNotification || event.kind == EventKind::kMessage)
    ring_.deliver(event.kind == EventKind::kMessage ? MailKind::kMessage : MailKind::kNotification,
                  {.peer = event.peer,
                   .payload = std::move(event.payload),
                   .charge = std::move(event.charge),
                   .tells = event.tells,
                   .context = std::move(event.context)});
  else
    ring_.push(std::move(event));
  if (num_followers_ > 0) notify_waiting();
  if (driver_until_ != 0) rouse_driver();  // it may be what the driver waits for, and it sleeps
}

void Runtime::random(std::span<std::byte> bytes) { draw(bytes); }

void Runtime::log(std::string text) {
  Event event;
  event.kind = EventKind::kLog;
  event.message = std::move(text);
  ring_.push(std::move(event));
}

}  // namespace kvxfer
