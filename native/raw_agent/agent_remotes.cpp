// Remote agents: their metadata, the sessions with them, and metadata exchanged by the agents themselves.
#include <algorithm>

#include "raw_agent/agent.h"
#include "raw_agent/messages.h"

namespace kvxfer::raw_agent {
namespace {

constexpr Time kConnectTimeout = 10'000'000'000;
constexpr std::size_t kMostIntroductions = 1024;  // under way
constexpr std::size_t kMostMetadata = std::size_t{4} << 20;  // bytes
// Of all peers together, while they send in several messages.
constexpr std::size_t kMostParts = 16 * kMostMetadata;
// What one peer may tell of itself, and what all of them may that our caller has not used.
constexpr std::uint64_t kMostTold = 2 * kMostMetadata;
constexpr std::uint64_t kMostUnused = 16 * kMostMetadata;

}  // namespace

// ---- remote agents ---------------------------------------------------------------------------------

Agent::Remote* Agent::find(const std::string& name) {
  const auto found = remotes_.find(name);
  if (found == remotes_.end()) return nullptr;
  use(*found->second);
  return found->second.get();
}

Agent::Remote* Agent::find(SessionKey session) {
  const auto found = by_session_.find(session);
  return found == by_session_.end() ? nullptr : found->second;
}

void Agent::use(Remote& remote) {
  if (!remote.unused) return;
  told_nbytes_ -= remote.nbytes();
  told_.erase(*remote.unused);
  remote.unused.reset();
}

void Agent::forget(std::map<std::string, std::unique_ptr<Remote>>::iterator remote, const Status& why) {
  use(*remote->second);
  lose(*remote->second, why);
  remotes_.erase(remote);
}

Result<Agent::Told> Agent::read(wire::ByteSpan bytes) {
  Result<Metadata> decoded = Metadata::decode(bytes);
  if (!decoded.ok()) return decoded.status();
  Told told;
  told.sections = SectionMap(std::move(decoded.value().sections));
  told.metadata = std::move(decoded).value();
  return told;
}

Result<std::string> Agent::add_remote(wire::ByteSpan bytes) {
  const Result<Told> told = read(bytes);
  if (!told.ok()) return told.status();
  const std::lock_guard lock(mutex_);
  Result<std::string> name = take_in(told.value(), UINT64_MAX);
  if (!name.ok()) return name;
  Remote& remote = *find(name.value());
  if (!remote.is_up && remote.session == 0) (void)dial(remote);  // a failure is reported when it is used
  return name;
}

Result<std::string> Agent::take_in(const Told& told, std::uint64_t most_nbytes) {
  const Metadata& metadata = told.metadata;
  const std::string& name = metadata.name;
  if (name == this->name()) return Status(Code::kInvalidArgument, "these are this agent's own metadata");
  const auto found = remotes_.find(name);
  const bool is_known = found != remotes_.end() && found->second->incarnation == metadata.incarnation;
  if (!is_known && metadata.address.empty())
    return Status(Code::kUnknownRegion,
                  "load the metadata with an address before those without one: agent " + name);
  auto sections = std::make_shared<SectionMap>();
  std::vector<Token> tokens;
  if (is_known) {
    *sections = *found->second->sections;
    tokens = found->second->tokens;
  }
  sections->take(told.sections);
  if (std::find(tokens.begin(), tokens.end(), metadata.token) == tokens.end())
    tokens.push_back(metadata.token);
  if (Remote::nbytes_of(sections->all().size(), tokens.size()) > most_nbytes)
    return Status(Code::kExhausted, "the metadata that agent " + name + " tells take more than " +
                                        std::to_string(most_nbytes) + " bytes");
  if (!is_known && found != remotes_.end())
    forget(found, {Code::kPeerRestarted, "agent " + name + " was restarted"});
  std::unique_ptr<Remote>& remote = remotes_[name];
  if (remote == nullptr) remote = std::make_unique<Remote>();
  remote->incarnation = metadata.incarnation;
  if (!metadata.address.empty()) remote->address = metadata.address;
  remote->sections = std::move(sections);
  remote->tokens = std::move(tokens);
  if (remote->is_up) claim(*remote);
  return name;
}

// What a peer tells of itself. It is not dialled before our caller uses it: a peer that could have this agent
// dial any address would reach what only this host reaches.
Status Agent::take_in_from(SessionKey peer, const Told& told) {
  const std::string& name = told.metadata.name;
  const auto view = runtime_->with_engine([&](Engine& engine, Time) { return engine.peer(peer); });
  if (!view || view->name != name || view->incarnation != told.metadata.incarnation)
    return {Code::kNotPermitted, "an agent tells only its own metadata"};
  const auto known = remotes_.find(name);
  const bool is_used = known != remotes_.end() && !known->second->unused;
  if (known != remotes_.end()) use(*known->second);
  const Result<std::string> taken = take_in(told, kMostTold);
  const auto found = remotes_.find(name);
  if (is_used || found == remotes_.end()) return taken.status();
  found->second->unused = told_.insert(told_.end(), name);
  told_nbytes_ += found->second->nbytes();
  while (told_nbytes_ > kMostUnused)
    forget(remotes_.find(told_.front()), {Code::kExhausted, "newer agents have told their metadata"});
  return taken.status();
}

Status Agent::dial(Remote& remote) {
  remote.failure = {};
  const Result<SessionKey> begun = runtime_->begin_connect(remote.address, kConnectTimeout);
  if (!begun.ok()) {
    remote.failure = begun.status();
    return remote.failure;
  }
  remote.session = begun.value();
  by_session_.insert_or_assign(remote.session, &remote);
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
  by_session_.erase(session);
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
  forget(found, {Code::kCancelled, "agent " + name + " was removed"});
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
                     [&](const Descriptor& each) { return remote->sections->find(each, kind) != nullptr; });
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

bool Agent::is_exchanging() {
  const std::lock_guard lock(mutex_);
  return !introductions_.empty();
}

void Agent::advertise(std::string address) {
  const std::lock_guard lock(mutex_);
  options_.advertise = std::move(address);
}

void Agent::send_long(SessionKey session, std::uint8_t kind, wire::Bytes payload) {
  if (outgoing_.empty()) runtime_->ring().add_waiters(1);  // only waiters are told of kRoom
  outgoing_.try_emplace(session, Outgoing{kind, std::move(payload), 0});  // one at a time
  send_more(session);
}

void Agent::end_sending(SessionKey session) {
  if (outgoing_.erase(session) != 0 && outgoing_.empty()) runtime_->ring().add_waiters(-1);
}

void Agent::send_more(SessionKey session) {
  constexpr std::size_t kMost = wire::kMaxMessage - 1;
  const auto found = outgoing_.find(session);
  if (found == outgoing_.end()) return;
  Outgoing& outgoing = found->second;
  for (bool is_last = false; !is_last; outgoing.num_sent += kMost) {
    const auto left = std::span<const std::byte>(outgoing.payload).subspan(outgoing.num_sent);
    is_last = left.size() <= kMost;
    const Status sent =
        send(session, is_last ? outgoing.kind : kPart, left.first(std::min(left.size(), kMost)));
    if (sent.code() == Code::kExhausted) return;  // kRoom will come
    if (!sent.ok()) break;
  }
  end_sending(session);
}

void Agent::add_part(SessionKey peer, const wire::Bytes& payload) {
  wire::Bytes& parts = parts_[peer];
  if (parts.size() + payload.size() > kMostMetadata)
    return end_introduction(peer, "metadata have up to " + std::to_string(kMostMetadata) + " bytes");
  parts.insert(parts.end(), payload.begin(), payload.end());
  parts_nbytes_ += payload.size();
  // Sessions are numbered as they come. One that has begun long ago and has not sent all gives way.
  while (parts_nbytes_ > kMostParts)
    end_introduction(parts_.begin()->first, "too many agents send their metadata at once: send them again");
}

wire::Bytes Agent::take_parts(SessionKey peer, wire::Bytes last) {
  auto parts = parts_.extract(peer);
  if (parts.empty()) return last;
  parts_nbytes_ -= parts.mapped().size();
  parts.mapped().insert(parts.mapped().end(), last.begin(), last.end());
  return std::move(parts.mapped());
}

void Agent::end_introduction(SessionKey peer, const std::string& why) {
  (void)take_parts(peer, {});
  introductions_.erase(peer);
  runtime_->with_open_engine([&](Engine& engine, Time now) {
    engine.end_session(now, peer, Code::kPeerLost, why);
    return 0;
  });
}

void Agent::on_introduced(std::unique_lock<std::mutex>& lock, SessionKey peer, std::uint8_t kind,
                          wire::Bytes payload) {
  const auto introduction = introductions_.find(peer);
  const bool is_ours = introduction != introductions_.end();
  const bool is_answer_to_us = is_ours && kind != kAsk && kind != kTell && kind != kForget;
  if (!is_answer_to_us && !options_.exchanges)
    return end_introduction(peer,
                            "agent " + name() +
                                " exchanges no metadata: make it with enable_listen_thread, or hand its "
                                "metadata on in another way");
  if (kind == kPart) return add_part(peer, payload);
  payload = take_parts(peer, std::move(payload));
  const bool is_answer = is_answer_to_us && kind == kAnswer && introduction->second.kind == kAsk;
  const std::string asked = is_answer ? introduction->second.name : std::string();
  if (kind == kAsk) {
    send_long(peer, kAnswer, described(nullptr, true).encode());
    return;
  }
  if (kind == kTell || is_answer) {
    lock.unlock();
    const Result<Told> told = read(payload);
    lock.lock();
    if (told.ok() && (!is_answer || told.value().metadata.name == asked))
      (void)take_in_from(peer, told.value());
  }
  if (kind == kForget)
    if (const auto found = remotes_.find(name_of(peer)); found != remotes_.end())
      forget(found, {Code::kCancelled, "agent " + name_of(peer) + " has withdrawn its metadata"});
  if (kind == kTell || kind == kForget) {
    (void)send(peer, kThanks, {});
    return;
  }
  if (is_answer_to_us) end_introduction(peer, "the exchange of metadata is complete");
}

}  // namespace kvxfer::raw_agent
