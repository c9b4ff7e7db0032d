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
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/faulty_transport.h"
#include "core/mistake.h"
#include "core/system/fork_guard.h"
#include "core/system/pool_memory.h"
#include "core/system/random.h"
#include "core/system/signals_blocked.h"

namespace kvxfer {
namespace {

// The most reads of the secrets' file in one call; if the file changes all the time, the watch reads it.
constexpr int kMaxReads = 8;

// How often a caller polls every transport to collect what has ended at once. Further polls are for the
// driving thread.
constexpr int kEndedRounds = 16;

// False: the system has no thread left.
template <class Body>
bool start_thread(std::vector<std::jthread>& threads, Body&& body) {
  const SignalsBlocked blocked;
  try {
    threads.emplace_back(std::forward<Body>(body));
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

// After start() has drawn its first bytes, no draw is refused, except by a sandbox that is set up later.
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
  return random_id();  // equal to no other: no transport of one host is tried
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

}  // namespace

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
  // Inherited by all threads that begin here, also those of libraries that transports open.
  const SignalsBlocked blocked;
  nvtx::attach();
  wire::Id128 drawn;
  if (Status status = fill_random(drawn); !status.ok()) return status;
  Result<std::unique_ptr<FenceTable>> fences = FenceTable::create();
  if (!fences.ok()) return fences.status();
  fences_ = std::move(fences).value();
  if (options_.copy_threads > 1)
    workers_ =
        std::make_shared<CopyWorkers>(reactor_, CopyWorkers::Options{.num_threads = options_.copy_threads});
  if (Status status = rails_.add_transports(options_, reactor_, *fences_, workers_); !status.ok())
    return status;
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
  for (const TransportKind* kind : rails_.kinds()) self_.transports.emplace_back(kind->name);
  waker_.fd.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  for (SystemThreads::Bell* bell : drivers_.bells()) bell->fd.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  const std::array fds = own_fds();
  if (std::ranges::any_of(fds, [](int fd) { return fd < 0; }) || !reactor_.usable())
    return {Code::kSystem, "the agent's eventfds and its epoll: " + words_of(EMFILE)};
  for (const int fd : fds) guard_fd(fd);
  if (Status status = reactor_.add(waker_.fd.get(), EPOLLIN, waker_); !status.ok()) return status;

  const bool is_certified = options_.credentials != nullptr;
  const bool is_open_to_others = is_certified || !options_.secret.empty();
  if (!options_.listen.empty()) {
    if (Status status = listeners_.open(options_.listen, is_open_to_others); !status.ok()) return status;
    self_.unix_name = listeners_.unix_name();
  }
  EngineConfig config;
  config.session.secret = is_open_to_others ? options_.secret : options_.user_secret;
  config.session.second_secret = options_.second_secret;
  config.session.needs_certificate = is_certified;
  if (is_certified)
    if (Status status = options_.credentials->check_own_name(options_.name); !status.ok()) return status;
  if (is_certified) config.session.other_secret = "its certificates or this agent's may be refused";
  if (!is_open_to_others)
    config.session.other_secret =
        "this agent was given no secret and uses its user's own: run both agents as one user, or give both "
        "the same secret";
  config.session.self = self_;
  config.session.features.eager_nbytes = options_.eager_nbytes;
  config.session.handshake_timeout_ns = options_.handshake_ns;
  config.session.heartbeat_ns = options_.heartbeat_ns;
  config.session.silent_ns = options_.silent_ns;
  config.lease_margin_ns = options_.lease_margin_ns;
  config.max_open_transfers = options_.max_transfers_per_peer;
  config.required_transports = options_.require;
  config.peer_budget = peer_budget(config.max_open_transfers, config.max_open_pairs);
  engine_ = std::make_unique<Engine>(std::move(config), static_cast<EngineHost&>(*this), workers_);
  connections_.serve(*engine_, self_);
  if (!options_.secret_file.empty()) {
    secrets_ = std::make_unique<WatchedSecrets>(
        reactor_, options_.secret_file, Secrets{options_.secret, options_.second_secret},
        [this](const Secrets& secrets) { engine_->set_secrets(secrets.first, secrets.second); },
        [this](std::string text) { log(std::move(text)); });
    secrets_->start();
  }
  if (is_certified) {
    credentials_ = std::make_unique<WatchedCredentials>(
        reactor_, options_.credential_files,
        [this](std::shared_ptr<const tls::Credentials> read) { return renew(std::move(read)); },
        [this](std::string text) { log(std::move(text)); });
    credentials_->start();
  }
  thread_ = std::thread([this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), "kvxfer");
  return {};
}

Runtime::~Runtime() {
  if (engine_ != nullptr) close(Time{1'000'000'000});  // otherwise it never started
  // If a number stayed guarded, a forked child would close it, even when another file has it by then.
  for (const int fd : own_fds())
    if (fd >= 0) unguard_fd(fd);
}

std::array<int, 4> Runtime::own_fds() {
  const auto [thread_bell, driver_bell] = drivers_.bells();
  return {waker_.fd.get(), thread_bell->fd.get(), driver_bell->fd.get(), ring_.fd()};
}

Status Runtime::check_alive() const {
  if (is_forked(owner_))
    return {Code::kForked,
            "agent '" + options_.name +
                "' belongs to the process that made it: a forked child must make its own agent"};
  if (broken()) return {Code::kInternal, mistake_};
  if (closed()) return {Code::kClosed, "agent '" + options_.name + "' is closed"};
  return {};
}

void Runtime::close(Time timeout_ns) {
  if (is_forked(owner_)) return;
  const std::lock_guard closing(closing_);
  closed_ = true;
  if (ended_) return;  // otherwise an earlier call found no memory: this one goes on
  const Time deadline = now() + timeout_ns;
  {
    const CallerTurn turn(*this);
    commands_.close_all();
    engine_->close(turn.now);
  }
  // Posted works still complete.
  await([this] { return engine_->num_transfers() == 0; }, deadline - now());
  await_unmapped(kEveryRegion, "GPU memory of this agent", std::min(deadline - now(), options_.silent_ns));
  drivers_.stop();
  if (thread_.joinable()) thread_.join();
  triggers_.clear();
  std::unique_lock lock(gate_);
  secrets_.reset();
  credentials_.reset();
  listeners_.close();
  connections_.close_all();
  rails_.disconnect_all();
  if (const std::size_t left = engine_->num_transfers(); left != 0)
    log("close() waits for the copies of " + std::to_string(left) +
        " transfers that a device has not ended: their memory is not given back before that");
  // With everything that they opened: exported handles, streams, a device's context. Works under way end
  // here, and no other thread is to wait for that.
  std::vector<std::shared_ptr<Transport>> transports = rails_.take_transports();
  auto pinned = kept_.unpin_all();
  lock.unlock();
  transports.clear();
  pinned.clear();
  lock.lock();
  rails_.forget_works();
  engine_->abandon(now());
  workers_.reset();
  const auto owners = kept_.disown_all();
  {
    const std::lock_guard streams_lock(streams_mutex_);
    stream_writes_.reset();  // a thread that enqueues a store right now holds it until it has done so
  }
  ended_ = true;
  ring_.wake();
  lock.unlock();  // before the owners are dropped
}

// ---- callers' requests that need more than the engine

Result<RegionId> Runtime::register_region(std::string name,
                                          std::vector<std::pair<std::byte*, std::uint64_t>> spans,
                                          std::uint32_t num_blocks, const CopyProgram& loops,
                                          wire::Bytes layout, MemoryKind kind,
                                          std::shared_ptr<const void> owner, int device) {
  Result<std::unique_ptr<Region>> described_region =
      make_region(std::move(name), std::move(spans), num_blocks, loops, std::move(layout), kind, device);
  if (!described_region.ok()) return described_region.status();
  std::unique_ptr<Region> region = std::move(described_region).value();
  LocalRegion& memory = region->memory;
  LocalRegion described = memory;
  Status failure;
  // `region` is ours until the engine has it; afterwards notes go to the engine.
  const auto note = [&](std::size_t rail, const Status& why) {
    std::string text = std::string(rails_.kind(rail).name) + ": " + why.message();
    failure = {why.code(), failure.ok() ? text : failure.message() + "; " + text};
    if (region != nullptr)
      region->notes.push_back(std::move(text));
    else
      engine_->add_note(described.id, std::move(text));
  };
  const auto add = [&](std::size_t rail, const Pinned& pinned, Time at) {
    Result<RegionKeys> made = rails_.at(rail).register_memory(described, pinned);
    if (!made.ok()) return note(rail, made.status());
    if (pinned != nullptr) kept_.pin(described.id, pinned);
    wire::TransportKeys keys{std::string(rails_.kind(rail).name), std::move(made).value(),
                             rails_.instance_of(rail)};
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
    kept_.own(described.id, owner);
    return {};
  };
  const auto lies_on = [&](int node) {
    if (region != nullptr)
      region->memory.numa_node = node;
    else
      engine_->region_lies_on(described.id, node);
  };
  std::vector<std::pair<std::size_t, std::shared_ptr<Transport>>> slow;
  bool asks_node = false;
  {
    const CallerTurn turn(*this);
    if (closed()) return check_alive();
    if (engine_->num_regions() >= wire::kMaxRegions)
      return Status(Code::kExhausted, "agent '" + options_.name + "' has " +
                                          std::to_string(wire::kMaxRegions) +
                                          " regions, the most that a peer accepts: deregister some, or "
                                          "register several tensors as one region");
    region->memory.id = described.id = engine_->reserve_region_id();
    for (std::size_t i = 0; i < rails_.size(); ++i) {
      const Capabilities capabilities = rails_.at(i).capabilities();
      if (!capabilities.memory.has(kind)) continue;
      asks_node = asks_node || (kind == MemoryKind::kHost && capabilities.far.differ_by_node());
      if (capabilities.pins)
        slow.emplace_back(i, rails_.share(i));
      else
        add(i, nullptr, turn.now);
    }
    if (Status status = announce(turn.now); !status.ok()) return status;
  }
  // Peers reach the region over those rails while devices pin it for the others. All pin at the same time,
  // since each takes seconds for a large pool.
  Status ended;  // under the gate
  Status starved{Code::kExhausted, "no memory left"};
  const auto pin = [&](std::size_t rail, Transport& transport) noexcept {
    try {
      const Result<Pinned> pinned = transport.prepare(described);
      // Pages that were never touched lie on no node before a device has pinned them.
      const int node = asks_node && pinned.ok() ? options_.numa_node_of(described) : -1;
      const CallerTurn turn(*this);
      if (!ended.ok()) return;
      if (closed()) {
        ended = check_alive();
        return;
      }
      if (node >= 0) lies_on(node);
      if (!pinned.ok())
        note(rail, pinned.status());
      else
        add(rail, pinned.value(), turn.now);
      ended = announce(turn.now);
    } catch (const std::bad_alloc&) {
      const CallerTurn turn(*this);
      ended = std::move(starved);
    } catch (const std::exception& mistake) {
      const CallerTurn turn(*this);
      ended = mistake_in_words(mistake);
    }
  };
  {
    std::vector<std::jthread> threads;
    threads.reserve(slow.size());
    for (std::size_t i = 0; i < slow.size(); ++i) {
      const auto& [rail, transport] = slow[i];
      const bool is_last = i + 1 == slow.size();
      if (is_last ||
          !start_thread(threads, [&pin, rail = rail, &transport = *transport] { pin(rail, transport); }))
        pin(rail, *transport);
    }
  }
  if (!ended.ok()) return ended;
  if (region == nullptr) return described.id;
  if (!failure.ok())
    return Status(failure.code(), "registering '" + region->name + "' with " + failure.message());
  return Status(Code::kUnsupported, "no transport of agent '" + options_.name + "' reaches " +
                                        (kind == MemoryKind::kGpu ? "GPU" : "host") +
                                        " memory: make it with one that does (" + names_reaching(kind) + ")");
}

bool Runtime::take_ended(const std::function<bool()>& is_so) {
  for (int round = 0; round < kEndedRounds; ++round)
    if (is_so() || !rails_.poll(now(), *engine_)) break;
  return is_so();
}

bool Runtime::await(const std::function<bool()>& is_so, Time timeout_ns) {
  const auto asked = [&] {
    const std::lock_guard lock(gate_);
    return is_so();
  };
  const Time until = time_after(now(), timeout_ns);
  if (!closed() && drivers_.wait(asked, until)) return true;
  return closed() ? drivers_.wait(asked, until, true) : asked();
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

Result<int> Runtime::watch_records(std::size_t capacity) {
  // If several threads call this at a time, the last call takes effect.
  const std::lock_guard watching(watching_);
  Result<int> fd = records_.resize(capacity);
  if (fd.ok())
    with_engine([&](Engine& engine, Time) { engine.watch_records(capacity == 0 ? nullptr : &records_); });
  return fd;
}

void Runtime::message_taken(SessionKey peer) {
  with_open_engine([&](Engine& engine, Time at) {
    engine.message_taken(at, peer);
    return true;
  });
}

Status Runtime::switch_rails(const std::string& transport, bool on) {
  if (Status status = check_alive(); !status.ok()) return status;
  std::string names;
  bool is_known = false;
  for (const std::string& name : self_.transports) {
    names += (names.empty() ? "" : ", ") + name;
    is_known = is_known || name == transport;
  }
  if (!is_known)
    return {Code::kInvalidArgument,
            "agent '" + options_.name + "' has no transport '" + transport + "': it has " + names};
  return with_engine([&](Engine& engine, Time at) { return engine.switch_rails(at, transport, on); });
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
    if (const std::string* const begun = kept_.leaving(id)) {
      name = *begun;
    } else {
      if (const Region* region = engine_->region(id)) name = region->name;
      if (Status status = engine_->deregister_region(turn.now, id); !status.ok()) return status;
      if (!take_ended(has_left)) kept_.begin_leaving(id, name);
    }
  }
  if (!await(has_left, timeout_ns))
    return {Code::kDeadline, "region '" + name +
                                 "' is withdrawn from peers, but a device still copies to or from it: do not "
                                 "free its memory before a later deregister() returns"};
  std::vector<Pinned> unpinned;  // dropped when this returns, and without the gate
  {
    const std::lock_guard lock(gate_);
    unpinned = kept_.unpin(id);
  }
  await_unmapped(id, "GPU memory of region '" + name + "'", options_.silent_ns);
  // An agent that closes first takes its transports away, and then stops them.
  if (closed()) {
    const std::lock_guard closing(closing_);
  }
  KeptMemory::Owner owner;  // dropped without the gate
  const std::lock_guard lock(gate_);
  owner = kept_.disown(id);
  return {};
}

void Runtime::await_unmapped(RegionId region, const std::string& what, Time timeout_ns) {
  const nvtx::Range range("wait for unmapping", region);
  if (await([&] { return !rails_.held_by_peers(region); }, timeout_ns)) return;
  const CallerTurn turn(*this);
  for (const std::string& peer : rails_.give_up_holders(region))
    log(what + " may still be mapped by peer '" + peer + "', which did not confirm its release in time (" +
        std::to_string(std::max<Time>(timeout_ns, 0) / 1'000'000) +
        " ms): the peer's process keeps the mapping until it ends. Free memory of cudaMalloc after that, if "
        "possible");
}

// ---- what the engine wants -----------------------------------------------------------------------

Result<SessionKey> Runtime::begin_connect(const std::string& address, Time timeout_ns) {
  Result<std::unique_ptr<Connections::Connection>> called = connections_.call(address, timeout_ns);
  if (!called.ok()) return called.status();
  const CallerTurn turn(*this);
  // Destroyed under the gate.
  std::unique_ptr<Connections::Connection> connection = std::move(called).value();
  if (closed()) return check_alive();
  return connections_.add(std::move(connection), turn.now);
}

Budget Runtime::strangers() {
  const std::lock_guard lock(gate_);
  return connections_.strangers();
}

Status Runtime::renew(std::shared_ptr<const tls::Credentials> credentials) {
  if (options_.credentials == nullptr)
    return {Code::kInvalidArgument, "this agent was made without certificates: pass AgentOptions(tls=...)"};
  if (Status status = credentials->check_own_name(options_.name); !status.ok()) return status;
  connections_.renew(std::move(credentials));
  return {};
}

Status Runtime::reload_secrets() {
  if (Status status = check_has_secret(); !status.ok()) return status;
  if (options_.secret_file.empty())
    return {Code::kInvalidArgument,
            "the secret of agent '" + options_.name + "' was not read from a file: use set_secret()"};
  // The watch may have read the file meanwhile, and its read may have been the later one.
  for (int tries = 0; tries < kMaxReads; ++tries) {
    const auto num_reads = with_open_engine([&](Engine&, Time) { return secrets_->num_reads(); });
    if (!num_reads) break;
    Result<Secrets> found = read_secret_file(options_.secret_file);
    if (!found.ok()) return found.status();
    const auto taken = with_open_engine([&](Engine&, Time) {
      if (secrets_->num_reads() != *num_reads) return false;
      secrets_->take(std::move(found).value());
      return true;
    });
    if (!taken || *taken) break;
  }
  return check_alive();
}

Status Runtime::check_has_secret() const {
  if (options_.credentials != nullptr)
    return {Code::kInvalidArgument,
            "agent '" + options_.name + "' has certificates and no secret: renew those instead"};
  if (options_.secret.empty())
    return {Code::kInvalidArgument,
            "agent '" + options_.name +
                "' was made without a secret and uses its user's own, which does not change: "
                "make it with secret= or KVXFER_SECRET_FILE"};
  return check_alive();
}

Status Runtime::set_secrets(std::string first, std::string second) {
  if (Status status = check_has_secret(); !status.ok()) return status;
  if (first.empty()) return {Code::kInvalidArgument, "the first secret is empty: pass one or two secrets"};
  with_open_engine([&](Engine& engine, Time) {
    engine.set_secrets(std::move(first), std::move(second));
    return true;
  });
  return check_alive();
}

void Runtime::close_session(SessionKey session) {
  connections_.close_session(session);
  rails_.unbind_session(session);
}

void Runtime::emit(Event event) {
  if (is_of_state(event.kind)) records_.note_change();
  if (event.kind == EventKind::kPeerUp) connections_.has_come_up(event.peer);
  if (event.kind == EventKind::kEnded) commands_.on_ended(event.handle);
  // A stranger that never became a peer gives a caller no event, only a log line.
  if (event.kind == EventKind::kPeerLost && connections_.never_opened(event.peer))
    return log("a connection was refused: " + event.message);
  if (event.kind == EventKind::kNotification || event.kind == EventKind::kMessage)
    ring_.deliver(event.kind == EventKind::kMessage ? MailKind::kMessage : MailKind::kNotification,
                  {.peer = event.peer,
                   .payload = std::move(event.payload),
                   .charge = std::move(event.charge),
                   .tells = event.tells,
                   .context = std::move(event.context),
                   .sender = engine_->sender(event.peer)});
  else
    ring_.push(std::move(event));
  drivers_.tell_ended();
}

void Runtime::random(std::span<std::byte> bytes) { draw(bytes); }

void Runtime::log(std::string text) {
  Event event;
  event.kind = EventKind::kLog;
  event.message = std::move(text);
  ring_.push(std::move(event));
}

}  // namespace kvxfer
