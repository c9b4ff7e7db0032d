// The native door: an agent for callers that name memory by addresses, and neither layouts nor leases. What binds kvxfer to
// such callers' own interfaces (NIXL's) converts and decides nothing.
//
// Registering memory makes it a region of one block. Metadata that name it carry a token; a peer that shows the token, in a
// session that has proved the secret, is granted leases to read and write these regions, which end with the registration, with
// invalidate() or with the session. So there is no right before a peer has proved itself, and none after deregistration.
//
// A thread of the agent's own answers those who show tokens, and posts what waited for a session. It sleeps meanwhile.
// Anything here may be called from any thread.
//
// agent.cpp            life, memory, metadata, the thread
// agent_remotes.cpp    remote agents, and metadata by the agents' own way
// agent_transfers.cpp  transfers, notifications
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/runtime.h"
#include "door/descriptor_list.h"
#include "door/metadata.h"
#include "door/ways.h"

namespace kvxfer::door {

enum class Operation : std::uint8_t { kRead, kWrite };

struct Options {
  std::string advertise;  // address that metadata name; "": that which it listens at
  Time timeout_ns = 120'000'000'000;  // of a transfer, from its post on
};

class Installed;
class Request;

class Agent {
 public:
  static std::unique_ptr<Agent> create(std::shared_ptr<Runtime> runtime, Options options);
  // Ends everything; what is under way has ended when it returns.
  ~Agent();

  const std::string& name() const noexcept { return runtime_->identity().name; }
  Runtime& runtime() noexcept { return *runtime_; }

  // ---- memory of ours
  Status register_memory(std::span<const Descriptor> descriptors, MemoryKind kind);
  // Of descriptors that were registered as they are. Some of those that were registered together end that region for peers, and
  // register the others as a new one. When it returns nothing lands there.
  Status deregister_memory(std::span<const Descriptor> descriptors, MemoryKind kind);

  // ---- metadata
  wire::Bytes metadata();
  // Of registered memory that holds some of these descriptors. `with_address`: of the connection, too.
  Result<wire::Bytes> metadata_of(std::span<const Descriptor> descriptors, MemoryKind kind,
                                  bool with_address);
  // Peers' rights by metadata that were given out until now end, when it returns.
  void invalidate();

  // ---- remote agents
  Result<std::string> add_remote(wire::ByteSpan metadata);
  Status remove_remote(const std::string& name);
  // Begins to connect, where that is not so, and waits until it is or fails.
  Status connect(const std::string& name);
  // Whether descriptors lie in what its metadata name. Empty: whether it is known.
  bool has_remote(const std::string& name, std::span<const Descriptor> descriptors, MemoryKind kind);
  // Whether a session with it is open.
  bool is_connected(const std::string& name);

  // ---- metadata by the agents' own way: sessions prove the secret, as all do
  // Sends metadata to who listens at an address, who takes them in. Returns before that.
  Status tell(const std::string& address, wire::Bytes metadata);
  // Asks who listens there for its metadata, and takes them in if they are `name`'s.
  Status ask(const std::string& address, std::string name);
  // Has who listens there forget this agent.
  Status withdraw(const std::string& address);
  // What metadata name from now on as the address of this agent.
  void advertise(std::string address);

  // ---- transfers
  // "" is memory of ours as the near end, our own name the same as the far one.
  Result<std::shared_ptr<const PreparedList>> prepare(const std::string& agent,
                                                      std::span<const Descriptor> descriptors,
                                                      MemoryKind kind);
  // Entries null: all.
  Result<std::shared_ptr<Request>> make(Operation operation, const PreparedList& local,
                                        std::span<const std::uint32_t> local_entries, bool all_local,
                                        const PreparedList& remote,
                                        std::span<const std::uint32_t> remote_entries, bool all_remote);
  // Begins it. `notify` reaches the remote agent once all of its bytes are where they go. kAgain: it is under way.
  Status post(Request& request, wire::Bytes notify);
  // kOk: it is done; kAgain: it is under way; else how it failed. Drives progress.
  Status check(Request& request);
  // Ends what is under way of it, and waits until nothing of it can land.
  void release(Request& request);

  // ---- notifications
  Status notify(const std::string& remote, wire::Bytes payload);
  // (remote agent, payload), oldest first. Drives progress.
  std::vector<std::pair<std::string, wire::Bytes>> take_notifications();

 private:
  // Descriptors that were registered together.
  struct Registration {
    RegionId region = 0;
    MemoryKind kind = MemoryKind::kHost;
    std::multiset<Descriptor> descriptors;
  };
  struct Remote {
    std::string address;
    wire::Id128 incarnation{};
    SectionMap sections;
    std::vector<Token> tokens;  // of its metadata
    std::size_t num_claimed = 0, num_granted = 0;  // of those, in this session
    SessionKey session = 0;  // 0: none
    bool is_up = false;
    Status failure;  // of the last session, or of a token
    std::deque<std::shared_ptr<Request>> waiting;  // for the session
    std::map<std::string, std::shared_ptr<Installed>> programs;  // of the session, by Way::key()

    bool is_ready() const noexcept { return is_up && num_granted == tokens.size(); }
  };

  Agent(std::shared_ptr<Runtime> runtime, Options options)
      : options_(std::move(options)), runtime_(std::move(runtime)) {}
  void serve();  // the thread
  void on_event(const Event& event);
  void on_message(Mail mail);
  void on_claim(SessionKey peer, const Token& token);
  // A session that is opened to say one thing.
  struct Introduction {
    std::uint8_t kind = 0;  // of the message
    wire::Bytes payload;
    std::string name;  // whose metadata are asked for
  };
  Status introduce(const std::string& address, Introduction introduction);
  Status send_long(SessionKey session, std::uint8_t kind, const wire::Bytes& payload);
  void on_introduced(SessionKey peer, std::uint8_t kind, wire::Bytes payload);
  Result<std::string> take_in(wire::ByteSpan metadata);
  Result<std::vector<Section>> make_region(const std::multiset<Descriptor>& descriptors, MemoryKind kind);
  Status add_region(std::multiset<Descriptor> descriptors, MemoryKind kind);
  std::optional<std::size_t> find_registration(const Descriptor& descriptor, MemoryKind kind) const;
  Metadata described(const std::set<RegionId>* regions, bool with_address);
  Token token_of(const std::set<RegionId>& regions);
  Remote* find(const std::string& name);
  Remote* find(SessionKey session);
  Status dial(Remote& remote);
  void claim(Remote& remote);
  void lose(Remote& remote, const Status& why);
  Status start_ways(Request& request, Remote& remote);
  Status install(Request& request, Remote& remote);
  Status move_locally(Request& request);
  void settle(Request& request);
  std::vector<std::shared_ptr<Handle>> pending(const Request& request);
  Status send(SessionKey session, std::uint8_t kind, std::span<const std::byte> payload);
  std::string name_of(SessionKey session);

  Options options_;
  const std::shared_ptr<Runtime> runtime_;
  std::thread thread_;
  std::atomic<bool> stops_{false};
  std::atomic<std::uint64_t> num_regions_{0};  // that there were
  std::atomic<Time> checked_at_{0};  // and it was under way

  std::mutex mutex_;  // of all that follows
  std::vector<Registration> registrations_;
  SectionMap sections_;
  std::map<std::set<RegionId>, Token> tokens_;
  std::map<std::pair<SessionKey, RegionId>, std::vector<LeaseId>> granted_;
  std::map<std::string, std::unique_ptr<Remote>> remotes_;
  std::map<SessionKey, std::string> names_;  // of peers
  std::map<SessionKey, Introduction> introductions_;
  std::map<SessionKey, wire::Bytes> parts_;  // of what a peer says in several messages
  // That came as messages, or from ourselves. A peer's count against its budget until our caller takes them.
  struct Told {
    std::string from;
    Mail mail;
  };
  std::deque<Told> told_;
};

// A program that one session's peer was told of. Its number is used for another once this goes.
class Installed {
 public:
  Installed(std::shared_ptr<Runtime> runtime, SessionKey session, std::uint32_t id)
      : runtime_(std::move(runtime)), session_(session), id_(id) {}
  ~Installed();
  SessionKey session() const noexcept { return session_; }
  std::uint32_t id() const noexcept { return id_; }

 private:
  const std::shared_ptr<Runtime> runtime_;
  const SessionKey session_;
  const std::uint32_t id_;
};

// Some ways of one remote agent's, which may be posted again and again, one time after another. Released before it goes.
class Request : public std::enable_shared_from_this<Request> {
 public:
  const std::string& remote() const noexcept { return remote_; }
  std::uint64_t nbytes() const noexcept { return nbytes_; }
  std::size_t num_descriptors() const noexcept { return num_descriptors_; }
  std::size_t num_transfers() const noexcept { return ways_.size(); }
  Time posted_at() const noexcept { return posted_at_; }
  Time begun_at() const noexcept { return begun_at_; }  // post() had returned
  Time ended_at() const noexcept { return ended_at_; }

 private:
  friend class Agent;
  enum class State : std::uint8_t { kMade, kWaiting, kMoving, kDone, kFailed };

  std::string remote_;
  Operation operation_ = Operation::kRead;
  std::vector<Way> ways_;
  std::vector<std::string> keys_;  // of regular ones
  std::vector<std::shared_ptr<Installed>> programs_;
  std::vector<std::shared_ptr<Handle>> handles_;
  SessionKey session_ = 0;  // that it moves by
  wire::Bytes notify_;  // still to be told
  State state_ = State::kMade;
  Status status_;
  std::uint64_t nbytes_ = 0;
  std::size_t num_descriptors_ = 0;
  Time posted_at_ = 0, begun_at_ = 0, ended_at_ = 0;
  struct Run {
    std::byte* to;
    const std::byte* from;
    std::uint64_t nbytes;
  };
  std::vector<Run> runs_;  // of one within this agent
};

}  // namespace kvxfer::door
