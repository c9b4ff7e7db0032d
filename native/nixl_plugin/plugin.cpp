// A backend of NIXL's own agent. NIXL_PLUGIN_DIR names its folder, "KVXFER" its type. It only converts; the
// raw agent does the rest.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/transport_kind.h"
#include "nixl_plugin/engine_interface.h"
#include "nixl_plugin/secrets.h"
#include "raw_agent/agent.h"

namespace kvxfer::nixl {
namespace {

constexpr const char* kName = "KVXFER";
constexpr double kMostSeconds = 1e9;  // 31 years, in nanoseconds still a Time

void say(const std::string& words) { std::fprintf(stderr, "kvxfer: NIXL plug-in: %s\n", words.c_str()); }

Answer answer_of(Code code) {
  switch (code) {
    case Code::kOk: return kSuccess;
    case Code::kAgain: return kInProgress;
    case Code::kInvalidArgument:
    case Code::kOutOfRange:
    case Code::kDuplicateBlock:
    case Code::kLengthMismatch:
    case Code::kLayoutMismatch: return kInvalidParam;
    case Code::kUnknownRegion:
    case Code::kRegionGone: return kNotFound;
    case Code::kNotPermitted:
    case Code::kLeaseEnded: return kNotAllowed;
    case Code::kPeerLost:
    case Code::kPeerSilent:
    case Code::kPeerRestarted:
    case Code::kAuthFailed:
    case Code::kUnreachable:
    case Code::kNoAnswer:
    case Code::kNoPath: return kRemoteDisconnect;
    case Code::kProtocol: return kMismatch;
    case Code::kUnsupported: return kNotSupported;
    case Code::kRefused: return kRepostActive;
    case Code::kCancelled: return kCanceled;
    default: return kBackendError;
  }
}

// NIXL's agent takes only a number, so the words go to standard error.
Answer answer_of(const Status& status) {
  const Answer answer = answer_of(status.code());
  if (answer < 0) say(status.message() + " [" + std::string(name_of(status.code())) + "]");
  return answer;
}

MemoryKind kind_of(Segment segment) { return segment == kVram ? MemoryKind::kGpu : MemoryKind::kHost; }

struct Memory final : Metadata {
  Memory(bool is_own, const raw_agent::Descriptor& of, MemoryKind its_kind)
      : Metadata(is_own), descriptor(of), kind(its_kind) {}
  const raw_agent::Descriptor descriptor;
  const MemoryKind kind;
};

struct Posted final : Transfer { std::shared_ptr<raw_agent::Request> request; };

wire::Bytes bytes_of(const std::string& text) {
  const auto* const first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}
std::string text_of(const wire::Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<raw_agent::Descriptor> descriptors_of(const List<Named>& list) {
  std::vector<raw_agent::Descriptor> out;
  out.reserve(list.entries.size());
  for (const Named& each : list.entries) out.push_back({each.address, each.nbytes, each.device});
  return out;
}

class KvxferEngine final : public Engine {
 public:
  explicit KvxferEngine(const EngineOptions& options) : Engine(options) {
    const Parameters given = options.parameters == nullptr ? Parameters() : *options.parameters;
    std::string named;  // what was set, and by which name: an error names it
    const auto setting = [&](const char* name, const char* variable, const std::string& otherwise) {
      std::string value, source = std::string("parameter ") + name;
      if (const auto found = given.find(name); found != given.end()) value = found->second;
      if (const char* const of_environment = std::getenv(variable);
          value.empty() && of_environment != nullptr) {
        value = of_environment;
        source = variable;
      }
      if (value.empty()) return otherwise;
      named += (named.empty() ? "; set: " : ", ") + source + "=" + value;
      return value;
    };
    RuntimeOptions runtime;
    runtime.name = options.agent;
    runtime.listen = setting("listen", "KVXFER_NIXL_LISTEN", "tcp://127.0.0.1:0");
    std::istringstream transports(setting("transports", "KVXFER_NIXL_TRANSPORTS", ""));
    for (std::string each; std::getline(transports, each, ',');) {
      each.erase(0, each.find_first_not_of(' '));
      each.erase(each.find_last_not_of(' ') + 1);
      runtime.transports.push_back(each);
    }
    if (runtime.transports.empty())
      for (const TransportKind* const kind : transport_kinds())
        if (kind->is_default) runtime.transports.emplace_back(kind->name);
    const std::string timeout_s = setting("timeout_s", "KVXFER_NIXL_TIMEOUT_S", "120");
    raw_agent::Options asked;
    asked.advertise = setting("advertise", "KVXFER_NIXL_ADVERTISE", "");
    char* end = nullptr;
    const double seconds = std::strtod(timeout_s.c_str(), &end);
    Status status;
    if (timeout_s.empty() || *end != '\0' || !(seconds > 0))
      status = {Code::kInvalidArgument, "timeout_s is '" + timeout_s + "', not a positive number of seconds"};
    else
      asked.timeout_ns = static_cast<Time>(std::min(seconds, kMostSeconds) * 1e9);
    if (status.ok()) status = find_secret(runtime);
    if (status.ok()) {
      Result<std::shared_ptr<Runtime>> made = Runtime::create(std::move(runtime));
      status = made.status();
      if (status.ok()) agent = raw_agent::Agent::create(std::move(made).value(), std::move(asked));
    }
    if (status.ok()) return;
    say(status.message() + named);
    has_failed_ = true;
  }

  bool supports_remote() const override { return true; }
  bool supports_local() const override { return true; }
  bool supports_notifications() const override { return true; }
  Segments segments() const override { return {kDram}; }

  Answer register_memory(const Registered& memory, const Segment& segment, Metadata*& out) override {
    const raw_agent::Descriptor descriptor{memory.address, memory.nbytes, memory.device};
    if (Status status = agent->register_memory({&descriptor, 1}, kind_of(segment)); !status.ok())
      return answer_of(status);
    out = new Memory(true, descriptor, kind_of(segment));
    return kSuccess;
  }
  Answer deregister_memory(Metadata* metadata) override {
    const std::unique_ptr<Memory> memory(static_cast<Memory*>(metadata));
    return answer_of(agent->deregister_memory({&memory->descriptor, 1}, memory->kind));
  }

  // Loading the connection's metadata has already begun to connect.
  Answer connect(const std::string&) override { return kSuccess; }
  Answer disconnect(const std::string& remote) override {
    if (remote == agent_) return kSuccess;
    return answer_of(agent->remove_remote(remote));
  }
  Answer unload(Metadata* metadata) override {
    delete static_cast<Memory*>(metadata);
    return kSuccess;
  }

  Answer prepare(const Operation& operation, const List<Named>& local, const List<Named>& remote,
                 const std::string& name, Transfer*& handle, const TransferOptions*) const override {
    const auto near = agent->prepare("", descriptors_of(local), kind_of(local.segment));
    if (!near.ok()) return answer_of(near.status());
    const auto far = agent->prepare(name, descriptors_of(remote), kind_of(remote.segment));
    if (!far.ok()) return answer_of(far.status());
    auto made = agent->make(operation == kWrite ? raw_agent::Operation::kWrite : raw_agent::Operation::kRead,
                            *near.value(), {}, true, *far.value(), {}, true);
    if (!made.ok()) return answer_of(made.status());
    auto posted = std::make_unique<Posted>();
    posted->request = std::move(made).value();
    handle = posted.release();
    return kSuccess;
  }
  Answer post(const Operation&, const List<Named>&, const List<Named>&, const std::string&, Transfer*& handle,
              const TransferOptions* options) const override {
    wire::Bytes notification;
    if (options != nullptr && options->notifies) notification = bytes_of(options->notification);
    return answer_of(agent->post(*static_cast<Posted*>(handle)->request, std::move(notification)));
  }
  Answer check(Transfer* handle) const override {
    return answer_of(agent->check(*static_cast<Posted*>(handle)->request));
  }
  Answer release(Transfer* handle) const override {
    Posted* const posted = static_cast<Posted*>(handle);
    if (Status status = agent->release(*posted->request); !status.ok()) return answer_of(status);
    delete posted;
    return kSuccess;
  }

  Answer public_data(const Metadata* metadata, std::string& out) const override {
    const auto& memory = *static_cast<const Memory*>(metadata);
    const Result<wire::Bytes> told = agent->metadata_of({&memory.descriptor, 1}, memory.kind, false);
    if (told.ok()) out = text_of(told.value());
    return answer_of(told.status());
  }
  Answer connection(std::string& out) const override {
    const Result<wire::Bytes> told = agent->metadata_of({}, MemoryKind::kHost, true);
    if (told.ok()) out = text_of(told.value());
    return answer_of(told.status());
  }
  Answer load_connection(const std::string&, const std::string& told) override {
    return answer_of(agent->add_remote(bytes_of(told)).status());
  }
  Answer load_remote(const Registered& told, const Segment& segment, const std::string&,
                     Metadata*& out) override {
    if (Status status = agent->add_remote(bytes_of(told.note)).status(); !status.ok())
      return answer_of(status);
    out = new Memory(false, {told.address, told.nbytes, told.device}, kind_of(segment));
    return kSuccess;
  }
  Answer load_local(Metadata* own, Metadata*& out) override {
    const auto& memory = *static_cast<const Memory*>(own);
    out = new Memory(false, memory.descriptor, memory.kind);
    return kSuccess;
  }

  Answer notifications(Notifications& out) override {
    for (auto& [from, payload] : agent->take_notifications()) out.emplace_back(from, text_of(payload));
    return kSuccess;
  }
  Answer notify(const std::string& remote, const std::string& payload) const override {
    return answer_of(agent->notify(remote, bytes_of(payload)));
  }

 private:
  std::unique_ptr<raw_agent::Agent> agent;
};

Plugin plugin{
    kPluginApi,
    [](const EngineOptions* options) -> Engine* { return new KvxferEngine(*options); },
    [](Engine* engine) { delete engine; },
    [] { return kName; },
    [] { return KVXFER_VERSION; },
    [] { return Parameters{{"listen", ""}, {"advertise", ""}, {"transports", ""}, {"timeout_s", ""}}; },
    [] { return Segments{kDram}; }};

}  // namespace
}  // namespace kvxfer::nixl

extern "C" {
__attribute__((visibility("default"))) void* nixl_plugin_init() { return &kvxfer::nixl::plugin; }
__attribute__((visibility("default"))) void nixl_plugin_fini() {}
}
