#include "raw_agent/agent.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>

#include "core/system/random.h"
#include "core/system/signals_blocked.h"
#include "raw_agent/messages.h"

namespace kvxfer::raw_agent {
namespace {

constexpr Time kClosingTimeout = 2'000'000'000;
constexpr std::chrono::milliseconds kStarvedPause{1};
constexpr std::size_t kMostLeft = 65536;

}  // namespace

std::unique_ptr<Agent> Agent::create(std::shared_ptr<Runtime> runtime, Options options) {
  std::unique_ptr<Agent> agent(new Agent(std::move(runtime), std::move(options)));
  agent->runtime_->ring().add_mail_waiters(MailKind::kMessage, 1);
  const SignalsBlocked blocked;
  agent->thread_ = std::thread([raw = agent.get()] { raw->serve(); });
  return agent;
}

Agent::~Agent() {
  if (runtime_->forked()) {  // a forked child does not have the thread
    (void)new std::thread(std::move(thread_));
    return;
  }
  runtime_->close(kClosingTimeout);
  stops_ = true;
  runtime_->ring().wake();
  thread_.join();
}

// ---- memory of ours --------------------------------------------------------------------------------

// Called without the mutex: a device may take long to pin memory.
Result<std::vector<Section>> Agent::make_region(const std::multiset<Descriptor>& descriptors,
                                                MemoryKind kind) {
  // Merges descriptors that overlap or touch.
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
  Result<std::vector<Section>> made = make_region(descriptors, kind);
  if (!made.ok()) return made.status();
  const std::lock_guard lock(mutex_);
  const RegionId region = made.value().front().region;
  change(sections_, [&](SectionMap& sections) { sections.take(SectionMap(std::move(made).value())); });
  registrations_.push_back({region, kind, std::move(descriptors)});
  return {};
}

Status Agent::register_memory(std::span<const Descriptor> descriptors, MemoryKind kind) {
  if (descriptors.empty()) return {Code::kInvalidArgument, "no memory is named"};
  std::multiset<Descriptor> sorted(descriptors.begin(), descriptors.end());
  for (const Descriptor& each : sorted) {
    if (each.nbytes == 0 || each.address == 0 || each.address > UINT64_MAX - each.nbytes)
      return {Code::kInvalidArgument, "memory has an address, and a length of at least one byte"};
    if (kind == MemoryKind::kGpu && each.device != sorted.begin()->device)
      return {Code::kInvalidArgument, "memory that is registered in one call must be on one device"};
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
  std::vector<std::multiset<Descriptor>> rest;  // what was registered together with them and stays
  {
    const std::lock_guard lock(mutex_);
    std::vector<Registration> left = registrations_;
    for (const Descriptor& each : descriptors) {
      const auto at = std::find_if(left.rbegin(), left.rend(), [&](const Registration& registration) {
        return registration.kind == kind && registration.descriptors.contains(each);
      });
      if (at == left.rend())
        return {Code::kUnknownRegion,
                "a descriptor is not registered: name memory exactly as it was registered"};
      at->descriptors.erase(at->descriptors.find(each));
    }
    for (std::size_t i = 0; i < left.size(); ++i) {
      if (left[i].descriptors.size() == registrations_[i].descriptors.size()) continue;
      gone.push_back(left[i].region);
      if (!left[i].descriptors.empty()) rest.push_back(std::move(left[i].descriptors));
    }
    const auto is_gone = [&](RegionId region) {
      return std::find(gone.begin(), gone.end(), region) != gone.end();
    };
    change(sections_, [&](SectionMap& sections) { sections.remove(gone); });
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
  for (const Section& section : sections_->all())
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
    if (!found)
      return Status(
          Code::kUnknownRegion,
          "a descriptor is not registered: ask for metadata of memory exactly as it was registered");
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

// ---- the thread ------------------------------------------------------------------------------------

void Agent::serve() {
  CompletionRing& ring = runtime_->ring();
  for (;;) {
    std::vector<Event> events;
    try {
      events = ring.drain(256, true);
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(kStarvedPause);
      continue;
    }
    if (events.empty()) {
      if (stops_) return;  // drain() may have taken the wake-up for this
      pollfd waits{ring.fd(), POLLIN, 0};
      (void)::poll(&waits, 1, -1);
      continue;
    }
    for (const Event& event : events) try {
        on_event(event);
      } catch (const std::exception& why) {
        end_for(event.peer, why);
      }
  }
}

// What the peer said is lost, for want of memory or by a mistake of ours, so the session cannot go on.
void Agent::end_for(SessionKey peer, const std::exception& why) noexcept {
  try {
    runtime_->with_engine([&](Engine& engine, Time now) {
      engine.end_session(now, peer, Code::kInternal,
                         std::string("its words could not be taken in: ") + why.what());
      return 0;
    });
  } catch (const std::exception&) {  // its requests end by their time
  }
}

void Agent::on_event(const Event& event) {
  if (event.kind == EventKind::kMessage) {
    while (std::optional<Mail> mail = runtime_->ring().take(MailKind::kMessage, true)) {
      const SessionKey peer = mail->peer;
      try {
        on_message(std::move(*mail));
      } catch (const std::exception& why) {
        end_for(peer, why);
      }
    }
    return;
  }
  const std::lock_guard lock(mutex_);
  if (event.kind == EventKind::kRoom) return send_more(event.peer);
  if (event.kind == EventKind::kPeerUp) {
    const std::string name = name_of(event.peer);
    if (const auto introduction = introductions_.find(event.peer); introduction != introductions_.end()) {
      send_long(event.peer, introduction->second.kind, std::move(introduction->second.payload));
      return;
    }
    Remote* const remote = find(event.peer);
    if (remote == nullptr) return;
    const auto view = runtime_->with_engine([&](Engine& engine, Time) { return engine.peer(event.peer); });
    if (!view) return;
    if (view->incarnation != remote->incarnation)
      return lose(*remote,
                  {Code::kPeerRestarted,
                   "the metadata are of an earlier process than the one that is now at " + remote->address});
    remote->is_up = true;
    claim(*remote);
  } else if (event.kind == EventKind::kPeerLost) {
    granted_.erase(granted_.lower_bound({event.peer, 0}), granted_.lower_bound({event.peer + 1, 0}));
    introductions_.erase(event.peer);
    end_sending(event.peer);
    (void)take_parts(event.peer, {});
    // Bounds what is kept of peers that come and go.
    while (notices_.size() > kMostLeft && notices_.front().mail.peer == event.peer) notices_.pop_front();
    if (Remote* const remote = find(event.peer)) {
      by_session_.erase(std::exchange(remote->session, 0));  // it has ended
      lose(*remote, {event.code, event.message});
    }
  }
}

void Agent::on_message(Mail mail) {
  std::unique_lock lock(mutex_);
  const SessionKey peer = mail.peer;
  wire::Bytes& payload = mail.payload;
  const std::uint8_t kind = payload.empty() ? 0 : static_cast<std::uint8_t>(payload.front());
  if (kind == kNotify) {
    payload.erase(payload.begin());
    std::string from = name_of(peer);
    notices_.push_back({std::move(from), std::move(mail)});
    return;
  }
  mail.charge.release();
  if (mail.tells) runtime_->message_taken(peer);
  if (kind >= kPart && kind <= kThanks) {
    payload.erase(payload.begin());
    return on_introduced(lock, peer, kind, std::move(payload));
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
    // Giving out newer metadata ends the older ones. A use of what those named is refused.
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
          // The lease lasts as long as the session. A session with a silent peer ends.
          return engine.grant(now, {peer, region, mode, true, {}, kNever, true});
        });
        if (lease && lease->ok()) leases.push_back(lease->value());
        ok = ok && lease && lease->ok();
      }
    }
  (void)send(peer, ok ? kGranted : kRefused, token);
}

}  // namespace kvxfer::raw_agent
