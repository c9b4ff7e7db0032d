#include "door/agent.h"

#include <poll.h>

#include <algorithm>
#include <cstring>

#include "core/system/random.h"

namespace kvxfer::door {
namespace {

// First byte of a message.
constexpr std::uint8_t kClaim = 1;  // a token
constexpr std::uint8_t kGranted = 2;  // a token
constexpr std::uint8_t kRefused = 3;  // a token
constexpr std::uint8_t kNotify = 4;  // a caller's bytes
constexpr std::uint8_t kPart = 5;  // of what the next of those below says
constexpr std::uint8_t kTell = 6;  // metadata
constexpr std::uint8_t kAsk = 7;  // for metadata
constexpr std::uint8_t kAnswer = 8;  // metadata
constexpr std::uint8_t kForget = 9;
constexpr std::uint8_t kThanks = 10;  // it is done

// A loop of a region's own bytes (core/copy/footprint.cpp).
constexpr std::uint64_t kMostLoopNbytes = std::uint64_t{1} << 30;
constexpr Time kConnectTimeout = 10'000'000'000;
// Two checks that are so close are of a caller who does nothing else.
constexpr Time kSpinning = 20'000;
constexpr Time kSpinWait = 100'000;
constexpr Time kLeaseTtl = 30'000'000'000;  // renewed by heartbeats
constexpr Time kClosingTimeout = 2'000'000'000;
// Of a session, for those who may use the same again.
constexpr std::size_t kMostPrograms = 512;
constexpr std::size_t kMostIntroductions = 1024;  // under way
constexpr std::size_t kMostMetadata = std::size_t{4} << 20;  // bytes
constexpr std::size_t kMostNames = 65536, kMostLeft = 65536;

Status unknown(const std::string& name) {
  return {Code::kUnknownRegion, "no metadata of agent " + name + " were loaded"};
}

}  // namespace

Installed::~Installed() {
  if (!runtime_->check_alive().ok()) return;
  runtime_->with_open_engine([&](Engine& engine, Time) {
    engine.forget_program(session_, id_);
    return 0;
  });
}

std::unique_ptr<Agent> Agent::create(std::shared_ptr<Runtime> runtime, Options options) {
  std::unique_ptr<Agent> agent(new Agent(std::move(runtime), std::move(options)));
  agent->runtime_->ring().add_mail_waiters(MailKind::kMessage, 1);
  agent->thread_ = std::thread([raw = agent.get()] { raw->serve(); });
  return agent;
}

Agent::~Agent() {
  if (runtime_->check_alive().code() == Code::kForked) {  // the thread is not there
    (void)new std::thread(std::move(thread_));
    return;
  }
  runtime_->close(kClosingTimeout);
  stops_ = true;
  runtime_->ring().wake();
  thread_.join();
}

// ---- memory of ours --------------------------------------------------------------------------------

// Without the mutex: it may take as long as a device takes to pin memory.
Result<std::vector<Section>> Agent::make_region(const std::multiset<Descriptor>& descriptors,
                                                MemoryKind kind) {
  // In one piece what overlaps or touches.
  std::vector<std::pair<std::byte*, std::uint64_t>> spans;
  for (const Descriptor& each : descriptors) {
    auto* const first = reinterpret_cast<std::byte*>(each.address);
    if (!spans.empty() && first <= spans.back().first + spans.back().second) {
      std::uint64_t& nbytes = spans.back().second;
      nbytes = std::max<std::uint64_t>(nbytes,
                                       static_cast<std::uint64_t>(first - spans.back().first) + each.nbytes);
    } else {
      spans.emplace_back(first, each.nbytes);
    }
  }
  CopyProgram all;
  all.num_layers = 1;
  const std::byte* const base = spans.front().first;
  for (const auto& [first, nbytes] : spans)
    for (std::uint64_t at = 0; at < nbytes; at += kMostLoopNbytes) {
      CopyLoop loop{};
      loop.num_layers = loop.counts[0] = loop.counts[1] = 1;
      loop.src_offset = loop.dst_offset = static_cast<std::uint64_t>(first - base) + at;
      loop.nbytes = std::min(nbytes - at, kMostLoopNbytes);
      all.loops.push_back(loop);
    }
  const int device = kind == MemoryKind::kGpu ? static_cast<int>(descriptors.begin()->device) : -1;
  const Result<RegionId> region = runtime_->register_region("memory-" + std::to_string(++num_regions_), spans,
                                                            1, all, {}, kind, nullptr, device);
  if (!region.ok()) return region.status();
  std::vector<Section> sections;
  for (const auto& [first, nbytes] : spans)
    sections.push_back({reinterpret_cast<std::uint64_t>(first), nbytes, region.value(),
                        static_cast<std::uint64_t>(first - base), kind, std::max(device, 0)});
  return sections;
}

Status Agent::add_region(std::multiset<Descriptor> descriptors, MemoryKind kind) {
  const Result<std::vector<Section>> made = make_region(descriptors, kind);
  if (!made.ok()) return made.status();
  const std::lock_guard lock(mutex_);
  for (const Section& section : made.value()) sections_.add(section);
  registrations_.push_back({made.value().front().region, kind, std::move(descriptors)});
  return {};
}

Status Agent::register_memory(std::span<const Descriptor> descriptors, MemoryKind kind) {
  if (descriptors.empty()) return {Code::kInvalidArgument, "no memory is named"};
  std::multiset<Descriptor> sorted(descriptors.begin(), descriptors.end());
  for (const Descriptor& each : sorted) {
    if (each.nbytes == 0 || each.address == 0 || each.address > UINT64_MAX - each.nbytes)
      return {Code::kInvalidArgument, "memory has an address, and a length of at least one byte"};
    if (kind == MemoryKind::kGpu && each.device != sorted.begin()->device)
      return {Code::kInvalidArgument, "memory that is registered together is one device's"};
  }
  return add_region(std::move(sorted), kind);
}

std::optional<std::size_t> Agent::find_registration(const Descriptor& descriptor, MemoryKind kind) const {
  for (std::size_t i = registrations_.size(); i-- > 0;)
    if (registrations_[i].kind == kind && registrations_[i].descriptors.contains(descriptor)) return i;
  return std::nullopt;
}

Status Agent::deregister_memory(std::span<const Descriptor> descriptors, MemoryKind kind) {
  std::vector<RegionId> gone;
  std::vector<std::multiset<Descriptor>> rest;  // of what was registered together with them
  {
    const std::lock_guard lock(mutex_);
    std::vector<Registration> left = registrations_;
    for (const Descriptor& each : descriptors) {
      const auto at = std::find_if(left.rbegin(), left.rend(), [&](const Registration& registration) {
        return registration.kind == kind && registration.descriptors.contains(each);
      });
      if (at == left.rend())
        return {Code::kUnknownRegion, "it was never registered as it is named, or is not any more"};
      at->descriptors.erase(at->descriptors.find(each));
    }
    for (std::size_t i = 0; i < left.size(); ++i) {
      if (left[i].descriptors.size() == registrations_[i].descriptors.size()) continue;
      gone.push_back(left[i].region);
      sections_.remove(left[i].region);
      if (!left[i].descriptors.empty()) rest.push_back(std::move(left[i].descriptors));
    }
    const auto is_gone = [&](RegionId region) {
      return std::find(gone.begin(), gone.end(), region) != gone.end();
    };
    std::erase_if(left, [&](const Registration& each) { return is_gone(each.region); });
    registrations_ = std::move(left);
    std::erase_if(tokens_, [&](const auto& each) {
      return std::any_of(each.first.begin(), each.first.end(), is_gone);
    });
    std::erase_if(granted_, [&](const auto& each) { return is_gone(each.first.second); });
  }
  Status status;
  const auto note = [&](Status ended) {
    if (status.ok()) status = std::move(ended);
  };
  for (const RegionId region : gone) note(runtime_->deregister_region(region));
  for (std::multiset<Descriptor>& each : rest) note(add_region(std::move(each), kind));
  return status;
}

// ---- metadata --------------------------------------------------------------------------------------

Token Agent::token_of(const std::set<RegionId>& regions) {
  const auto [found, is_new] = tokens_.try_emplace(regions);
  if (is_new) (void)fill_random(found->second);
  return found->second;
}

Metadata Agent::described(const std::set<RegionId>* regions, bool with_address) {
  Metadata out;
  out.name = name();
  out.incarnation = runtime_->identity().incarnation;
  if (with_address) out.address = options_.advertise.empty() ? runtime_->address() : options_.advertise;
  std::set<RegionId> named;
  for (const Section& section : sections_.all())
    if (regions == nullptr || regions->contains(section.region)) {
      out.sections.push_back(section);
      named.insert(section.region);
    }
  out.token = token_of(named);
  return out;
}

wire::Bytes Agent::metadata() {
  const std::lock_guard lock(mutex_);
  return described(nullptr, true).encode();
}

Result<wire::Bytes> Agent::metadata_of(std::span<const Descriptor> descriptors, MemoryKind kind,
                                       bool with_address) {
  const std::lock_guard lock(mutex_);
  std::set<RegionId> regions;
  for (const Descriptor& each : descriptors) {
    const std::optional<std::size_t> found = find_registration(each, kind);
    if (!found) return Status(Code::kUnknownRegion, "metadata are of memory as it was registered");
    regions.insert(registrations_[*found].region);
  }
  return described(&regions, with_address).encode();
}

void Agent::invalidate() {
  std::vector<LeaseId> leases;
  {
    const std::lock_guard lock(mutex_);
    tokens_.clear();
    for (const auto& [key, granted] : std::exchange(granted_, {}))
      leases.insert(leases.end(), granted.begin(), granted.end());
  }
  for (const LeaseId lease : leases) (void)runtime_->revoke(lease);
}

// ---- remote agents ---------------------------------------------------------------------------------

Agent::Remote* Agent::find(const std::string& name) {
  const auto found = remotes_.find(name);
  return found == remotes_.end() ? nullptr : found->second.get();
}

Agent::Remote* Agent::find(SessionKey session) {
  for (auto& [name, remote] : remotes_)
    if (remote->session == session) return remote.get();
  return nullptr;
}

Result<std::string> Agent::add_remote(wire::ByteSpan bytes) {
  const std::lock_guard lock(mutex_);
  return take_in(bytes);
}

Result<std::string> Agent::take_in(wire::ByteSpan bytes) {
  Result<Metadata> decoded = Metadata::decode(bytes);
  if (!decoded.ok()) return decoded.status();
  Metadata& told = decoded.value();
  if (told.name == name()) return Status(Code::kInvalidArgument, "these are this agent's own metadata");
  std::unique_ptr<Remote>& remote = remotes_[told.name];
  const bool is_new = remote == nullptr || remote->incarnation != told.incarnation;
  if (is_new && told.address.empty()) {
    if (remote == nullptr) remotes_.erase(told.name);
    return Status(Code::kUnknownRegion,
                  "metadata without a connection come after such that have one: agent " + told.name);
  }
  if (is_new) {
    if (remote != nullptr) lose(*remote, {Code::kPeerRestarted, "agent " + told.name + " was started again"});
    remote = std::make_unique<Remote>();
    remote->incarnation = told.incarnation;
  }
  if (!told.address.empty()) remote->address = told.address;
  std::set<RegionId> regions;
  for (const Section& section : told.sections) regions.insert(section.region);
  for (const RegionId region : regions) remote->sections.remove(region);
  for (const Section& section : told.sections) remote->sections.add(section);
  if (std::find(remote->tokens.begin(), remote->tokens.end(), told.token) == remote->tokens.end())
    remote->tokens.push_back(told.token);
  if (remote->is_up)
    claim(*remote);
  else if (remote->session == 0)
    (void)dial(*remote);  // what it fails with is told when it is used
  return told.name;
}

Status Agent::dial(Remote& remote) {
  remote.failure = {};
  const Result<SessionKey> begun = runtime_->begin_connect(remote.address, kConnectTimeout);
  if (!begun.ok()) {
    remote.failure = begun.status();
    return remote.failure;
  }
  remote.session = begun.value();
  return {};
}

void Agent::claim(Remote& remote) {
  for (; remote.num_claimed < remote.tokens.size(); ++remote.num_claimed)
    if (Status sent = send(remote.session, kClaim, remote.tokens[remote.num_claimed]); !sent.ok()) {
      lose(remote, sent);
      return;
    }
}

void Agent::lose(Remote& remote, const Status& why) {
  const SessionKey session = std::exchange(remote.session, 0);
  remote.is_up = false;
  remote.num_claimed = remote.num_granted = 0;
  remote.programs.clear();
  remote.failure = why;
  for (const std::shared_ptr<Request>& request : std::exchange(remote.waiting, {})) {
    request->state_ = Request::State::kFailed;
    request->status_ = why;
    request->ended_at_ = Runtime::now();
  }
  if (session != 0 && runtime_->check_alive().ok())
    runtime_->with_open_engine([&](Engine& engine, Time now) {
      engine.end_session(now, session, Code::kPeerLost, "it is not used any more");
      return 0;
    });
}

Status Agent::remove_remote(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = remotes_.find(name);
  if (found == remotes_.end()) return unknown(name);
  lose(*found->second, {Code::kCancelled, "agent " + name + " was removed"});
  remotes_.erase(found);
  return {};
}

Status Agent::connect(const std::string& name) {
  {
    const std::lock_guard lock(mutex_);
    if (name == this->name()) return {};
    Remote* const remote = find(name);
    if (remote == nullptr) return unknown(name);
    if (remote->session == 0)
      if (Status begun = dial(*remote); !begun.ok()) return begun;
  }
  for (const Time until = Runtime::now() + kConnectTimeout;;) {
    {
      const std::lock_guard lock(mutex_);
      const Remote* const remote = find(name);
      if (remote == nullptr) return unknown(name);
      if (remote->is_ready()) return {};
      if (!remote->failure.ok()) return remote->failure;
    }
    if (Runtime::now() > until)
      return {Code::kDeadline, "agent " + name + " did not grant in time what its metadata name"};
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

bool Agent::has_remote(const std::string& name, std::span<const Descriptor> descriptors, MemoryKind kind) {
  const std::lock_guard lock(mutex_);
  const Remote* const remote = find(name);
  return remote != nullptr &&
         std::all_of(descriptors.begin(), descriptors.end(),
                     [&](const Descriptor& each) { return remote->sections.find(each, kind) != nullptr; });
}

// ---- metadata by the agents' own way ------------------------------------------------------------------

Status Agent::introduce(const std::string& address, Introduction introduction) {
  const std::lock_guard lock(mutex_);
  if (introductions_.size() >= kMostIntroductions)
    return {Code::kExhausted, "so many agents are told something already"};
  const Result<SessionKey> session = runtime_->begin_connect(address, kConnectTimeout);
  if (!session.ok()) return session.status();
  introductions_.emplace(session.value(), std::move(introduction));
  return {};
}

Status Agent::tell(const std::string& address, wire::Bytes metadata) {
  return introduce(address, {kTell, std::move(metadata), {}});
}
Status Agent::ask(const std::string& address, std::string name) {
  return introduce(address, {kAsk, {}, std::move(name)});
}
Status Agent::withdraw(const std::string& address) { return introduce(address, {kForget, {}, {}}); }

void Agent::advertise(std::string address) {
  const std::lock_guard lock(mutex_);
  options_.advertise = std::move(address);
}

Status Agent::send_long(SessionKey session, std::uint8_t kind, const wire::Bytes& payload) {
  constexpr std::size_t kMost = wire::kMaxMessage - 1;
  std::size_t at = 0;
  for (; payload.size() - at > kMost; at += kMost)
    if (Status sent = send(session, kPart, std::span(payload).subspan(at, kMost)); !sent.ok()) return sent;
  return send(session, kind, std::span(payload).subspan(at));
}

void Agent::on_introduced(SessionKey peer, std::uint8_t kind, wire::Bytes payload) {
  if (kind == kPart) {
    wire::Bytes& parts = parts_[peer];
    if (parts.size() + payload.size() <= kMostMetadata)
      parts.insert(parts.end(), payload.begin(), payload.end());
    return;
  }
  if (auto parts = parts_.extract(peer); !parts.empty()) {
    parts.mapped().insert(parts.mapped().end(), payload.begin(), payload.end());
    payload = std::move(parts.mapped());
  }
  if (kind == kAsk) {
    (void)send_long(peer, kAnswer, described(nullptr, true).encode());
    return;
  }
  if (kind == kTell || kind == kForget) {
    // A peer speaks for itself alone.
    const std::string name = name_of(peer);
    const Result<Metadata> told = kind == kTell ? Metadata::decode(payload) : Result<Metadata>(Metadata());
    if (kind == kTell && told.ok() && told.value().name == name) (void)take_in(payload);
    if (kind == kForget)
      if (const auto found = remotes_.find(name); found != remotes_.end()) {
        lose(*found->second, {Code::kCancelled, "agent " + name + " has withdrawn its metadata"});
        remotes_.erase(found);
      }
    (void)send(peer, kThanks, {});
    return;
  }
  const auto introduction = introductions_.extract(peer);
  if (introduction.empty()) return;
  if (kind == kAnswer && introduction.mapped().kind == kAsk) {
    const Result<Metadata> told = Metadata::decode(payload);
    if (told.ok() && told.value().name == introduction.mapped().name) (void)take_in(payload);
  }
  runtime_->with_open_engine([&](Engine& engine, Time now) {
    engine.end_session(now, peer, Code::kPeerLost, "it was said what there was to say");
    return 0;
  });
}

// ---- transfers -------------------------------------------------------------------------------------

Result<std::shared_ptr<const PreparedList>> Agent::prepare(const std::string& agent,
                                                           std::span<const Descriptor> descriptors,
                                                           MemoryKind kind) {
  // While others go on: a list may be long.
  SectionMap sections;
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
  Result<PreparedList> prepared = door::prepare(sections, descriptors, kind, agent);
  if (!prepared.ok()) return prepared.status();
  return std::make_shared<const PreparedList>(std::move(prepared).value());
}

Result<std::shared_ptr<Request>> Agent::make(Operation operation, const PreparedList& local,
                                             std::span<const std::uint32_t> local_entries, bool all_local,
                                             const PreparedList& remote,
                                             std::span<const std::uint32_t> remote_entries, bool all_remote) {
  if (!local.agent.empty()) return Status(Code::kInvalidArgument, "the local list is a remote agent's");
  if (remote.agent.empty()) return Status(Code::kInvalidArgument, "the remote list names no agent");
  const std::size_t num = all_local ? local.size() : local_entries.size();
  const std::size_t num_remote = all_remote ? remote.size() : remote_entries.size();
  if (num != num_remote || num == 0)
    return Status(num == 0 ? Code::kInvalidArgument : Code::kLengthMismatch,
                  num == 0
                      ? "a transfer has at least one pair of descriptors"
                      : std::to_string(num) + " descriptors cannot go with " + std::to_string(num_remote));
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
  if (!request.notify_.empty()) told_.push_back({name(), {.payload = std::exchange(request.notify_, {})}});
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
    settle(request);
    if (request.state_ == Request::State::kWaiting || request.state_ == Request::State::kMoving)
      return {Code::kRefused, "it is under way"};
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
  for (const auto& handle : request.handles_) runtime_->cancel(*handle);
  request.state_ = Request::State::kFailed;
  request.status_ = status;
  request.ended_at_ = Runtime::now();
  return status;
}

// Has the peer know every program of the request.
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

// Where all of its transfers have ended, or it waited too long for the first, so has it.
void Agent::settle(Request& request) {
  if (request.state_ == Request::State::kWaiting &&
      Runtime::now() - request.posted_at_ > options_.timeout_ns) {
    if (Remote* const remote = find(request.remote_))
      std::erase_if(remote->waiting, [&](const auto& each) { return each.get() == &request; });
    request.state_ = Request::State::kFailed;
    request.status_ = {Code::kDeadline,
                       "agent " + request.remote_ + " did not grant in time what its metadata name"};
  }
  if (request.state_ != Request::State::kMoving) return;
  Status failed;
  for (const auto& handle : request.handles_) {
    const Outcome outcome = handle->outcome();
    if (outcome == Outcome::kPending) return;
    if (outcome != Outcome::kDone && failed.ok()) failed = handle->status();
    request.ended_at_ = std::max(request.ended_at_, handle->ended_at());
  }
  if (failed.ok() && !request.notify_.empty()) {
    failed = send(request.session_, kNotify, request.notify_);
    if (failed.code() == Code::kExhausted) return;  // room comes
    request.notify_.clear();
  }
  request.state_ = failed.ok() ? Request::State::kDone : Request::State::kFailed;
  request.status_ = failed;
}

Status Agent::check(Request& request) {
  for (int look = 0;; ++look) {
    {
      const std::lock_guard lock(mutex_);
      settle(request);
      switch (request.state_) {
        case Request::State::kMade: return {Code::kInvalidArgument, "it was not posted"};
        case Request::State::kDone: return {};
        case Request::State::kFailed: return request.status_;
        case Request::State::kWaiting:
        case Request::State::kMoving: break;
      }
    }
    const Time now = Runtime::now();
    if (look == 1) {
      checked_at_.store(now, std::memory_order_relaxed);
      return {Code::kAgain, "it is under way"};
    }
    if (Status alive = runtime_->check_alive(); !alive.ok()) return alive;
    // Who asks again at once would only take the processor from who copies.
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

void Agent::release(Request& request) {
  std::vector<std::shared_ptr<Handle>> pending;
  {
    const std::lock_guard lock(mutex_);
    if (request.state_ == Request::State::kWaiting)
      if (Remote* const remote = find(request.remote_))
        std::erase_if(remote->waiting, [&](const auto& each) { return each.get() == &request; });
    settle(request);
    if (request.state_ == Request::State::kMoving) pending = request.handles_;
    request.state_ = Request::State::kFailed;
    request.status_ = {Code::kCancelled, "it was released"};
  }
  if (!runtime_->check_alive().ok()) return;
  for (const auto& handle : pending) runtime_->cancel(*handle);
  for (const auto& handle : pending)
    (void)runtime_->wait([&] { return handle->outcome() != Outcome::kPending; }, options_.timeout_ns);
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
      told_.push_back({name(), {.payload = std::move(payload)}});
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
  for (Told& told : told_) {
    told.mail.charge.release();
    if (told.mail.tells) runtime_->message_taken(told.mail.peer);
    out.emplace_back(std::move(told.from), std::move(told.mail.payload));
  }
  told_.clear();
  while (std::optional<Mail> mail = runtime_->ring().take(MailKind::kNotification)) {
    if (mail->tells) runtime_->message_taken(mail->peer);
    out.emplace_back(name_of(mail->peer), std::move(mail->payload));
  }
  return out;
}

// ---- the thread ------------------------------------------------------------------------------------

void Agent::serve() {
  CompletionRing& ring = runtime_->ring();
  for (;;) {
    const std::vector<Event> events = ring.drain(256, true);
    if (events.empty()) {
      if (stops_) return;  // its wake-up may be the one that drain() took
      pollfd waits{ring.fd(), POLLIN, 0};
      (void)::poll(&waits, 1, -1);
      continue;
    }
    for (const Event& event : events) on_event(event);
  }
}

void Agent::on_event(const Event& event) {
  if (event.kind == EventKind::kMessage) {
    while (std::optional<Mail> mail = runtime_->ring().take(MailKind::kMessage, true))
      on_message(std::move(*mail));
    return;
  }
  const std::lock_guard lock(mutex_);
  if (event.kind == EventKind::kPeerUp) {
    const std::string name = name_of(event.peer);
    if (const auto introduction = introductions_.find(event.peer); introduction != introductions_.end()) {
      (void)send_long(event.peer, introduction->second.kind, introduction->second.payload);
      return;
    }
    Remote* const remote = find(event.peer);
    if (remote == nullptr) return;
    const auto view = runtime_->with_engine([&](Engine& engine, Time) { return engine.peer(event.peer); });
    if (!view) return;
    if (view->incarnation != remote->incarnation)
      return lose(*remote, {Code::kPeerRestarted,
                            "another process than that of the metadata is at " + remote->address});
    remote->is_up = true;
    claim(*remote);
  } else if (event.kind == EventKind::kPeerLost) {
    std::erase_if(granted_, [&](const auto& each) { return each.first.first == event.peer; });
    introductions_.erase(event.peer);
    parts_.erase(event.peer);
    // What peers that come and go leave is bounded.
    while (told_.size() > kMostLeft && told_.front().mail.peer == event.peer) told_.pop_front();
    if (Remote* const remote = find(event.peer)) {
      remote->session = 0;  // it is gone
      lose(*remote, {event.code, event.message});
    }
  }
}

void Agent::on_message(Mail mail) {
  const std::lock_guard lock(mutex_);
  const SessionKey peer = mail.peer;
  wire::Bytes& payload = mail.payload;
  const std::uint8_t kind = payload.empty() ? 0 : static_cast<std::uint8_t>(payload.front());
  if (kind == kNotify) {
    payload.erase(payload.begin());
    std::string from = name_of(peer);
    told_.push_back({std::move(from), std::move(mail)});
    return;
  }
  mail.charge.release();
  if (mail.tells) runtime_->message_taken(peer);
  if (kind >= kPart && kind <= kThanks) {
    payload.erase(payload.begin());
    return on_introduced(peer, kind, std::move(payload));
  }
  Token token;
  if (payload.size() != 1 + token.size()) return;
  std::memcpy(token.data(), payload.data() + 1, token.size());
  if (kind == kClaim) return on_claim(peer, token);
  Remote* const remote = find(peer);
  if (remote == nullptr || (kind != kGranted && kind != kRefused)) return;
  const auto at = std::find(remote->tokens.begin(), remote->tokens.end(), token);
  if (at == remote->tokens.end()) return;
  if (kind == kRefused) {
    // Older metadata end when newer are given out: what they named is refused where it is used.
    remote->tokens.erase(at);
    --remote->num_claimed;
  } else {
    ++remote->num_granted;
  }
  if (!remote->is_ready()) return;
  for (const std::shared_ptr<Request>& request : std::exchange(remote->waiting, {}))
    (void)start_ways(*request, *remote);
}

void Agent::on_claim(SessionKey peer, const Token& token) {
  const auto found =
      std::find_if(tokens_.begin(), tokens_.end(), [&](const auto& each) { return each.second == token; });
  bool ok = found != tokens_.end();
  if (ok)
    for (const RegionId region : found->first) {
      std::vector<LeaseId>& leases = granted_[{peer, region}];
      if (!leases.empty()) continue;
      for (const wire::LeaseMode mode : {wire::LeaseMode::kRead, wire::LeaseMode::kWrite}) {
        const auto lease = runtime_->with_open_engine([&](Engine& engine, Time now) {
          return engine.grant(now, {peer, region, mode, true, {}, kLeaseTtl, true});
        });
        if (lease && lease->ok()) leases.push_back(lease->value());
        ok = ok && lease && lease->ok();
      }
    }
  (void)send(peer, ok ? kGranted : kRefused, token);
}

}  // namespace kvxfer::door
