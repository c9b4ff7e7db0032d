// Remote agents: their metadata, the sessions with them, and metadata exchanged by the agents themselves.
#include <algorithm>

#include "door/agent.h"
#include "door/messages.h"

namespace kvxfer::door {
namespace {

constexpr Time kConnectTimeout = 10'000'000'000;
constexpr std::size_t kMostIntroductions = 1024;  // under way
constexpr std::size_t kMostMetadata = std::size_t{4} << 20;  // bytes

}  // namespace

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
                  "load the metadata with an address before those without one: agent " + told.name);
  }
  if (is_new) {
    if (remote != nullptr) lose(*remote, {Code::kPeerRestarted, "agent " + told.name + " was restarted"});
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
    (void)dial(*remote);  // a failure is reported when the agent is used
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
      engine.end_session(now, session, Code::kPeerLost, "this session is not used any more");
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
      return {Code::kDeadline, "agent " + name + " did not grant in time the memory that its metadata name"};
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

bool Agent::is_connected(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const Remote* const remote = find(name);
  return remote != nullptr && remote->is_up;
}

// ---- metadata exchanged by the agents themselves -----------------------------------------------------

Status Agent::introduce(const std::string& address, Introduction introduction) {
  const std::lock_guard lock(mutex_);
  if (introductions_.size() >= kMostIntroductions)
    return {Code::kExhausted, "too many exchanges of metadata are under way: try again later"};
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
    // A peer speaks only for itself.
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
    engine.end_session(now, peer, Code::kPeerLost, "the exchange of metadata is complete");
    return 0;
  });
}

}  // namespace kvxfer::door
