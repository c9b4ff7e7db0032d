// The raw agent: an agent for callers that name memory by addresses, without layouts and leases. Bindings
// for such callers' own interfaces (NIXL's) only convert.
//
// Registering memory makes it a region of one block. Metadata that name the region carry a token. A peer that
// shows the token, in a session that has proved the secret, is granted leases to read and write that region.
// The leases end with the registration, with invalidate() or with the session. So a peer has no right before
// it has proved itself, and none after deregistration.
//
// A thread of the agent's own answers peers that show tokens, and posts requests that waited for a session.
// It sleeps otherwise. Any thread may call the functions below.
//
// agent.cpp            life, memory, metadata, the thread
// agent_remotes.cpp    remote agents, and metadata exchanged by the agents themselves
// agent_transfers.cpp  transfers, notifications
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
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

#include "core/installed.h"
#include "core/runtime.h"
#include "raw_agent/descriptor_list.h"
#include "raw_agent/metadata.h"
#include "raw_agent/ways.h"

namespace kvxfer::raw_agent {

enum class Operation : std::uint8_t { kRead, kWrite };

struct Options {
  std::string advertise;  // address that metadata name; "": the one that it listens at
  Time timeout_ns = 120'000'000'000;  // of a transfer, counted from its post
  // Whether agents that have proved the secret may ask for this one's metadata, and send their own. Metadata
  // open all memory that they name.
  bool exchanges = false;
};

class Request;

class Agent {
 public:
  static std::unique_ptr<Agent> create(std::shared_ptr<Runtime> runtime, Options options);
  // Ends everything. Nothing is under way any more when it returns.
  ~Agent();

  const std::string& name() const noexcept { return runtime_->identity().name; }
  Runtime& runtime() noexcept { return *runtime_; }

  // ---- memory of ours
  Status register_memory(std::span<const Descriptor> descriptors, MemoryKind kind);
  // The descriptors must be as they were registered. If only some of those that were registered together are
  // given, their region ends for peers, and the others become a new region. When it returns, nothing lands in
  // the memory.
  Status deregister_memory(std::span<const Descriptor> descriptors, MemoryKind kind);

  // ---- metadata
  wire::Bytes metadata();
  // Metadata of the registered memory that holds these descriptors. `with_address`: also those of the
  // connection.
  Result<wire::Bytes> metadata_of(std::span<const Descriptor> descriptors, MemoryKind kind,
                                  bool with_address);
  // Ends the rights that peers have by metadata given out until now; they have ended when it returns.
  void invalidate();

  // ---- remote agents
  Result<std::string> add_remote(wire::ByteSpan metadata);
  Status remove_remote(const std::string& name);
  // Begins to connect if that has not begun, and waits until the agent is connected or has failed.
  Status connect(const std::string& name);
  // Whether the descriptors lie in the memory that the agent's metadata name. Without descriptors: whether
  // the agent is known.
  bool has_remote(const std::string& name, std::span<const Descriptor> descriptors, MemoryKind kind);
  // Whether a session with the agent is open.
  bool is_connected(const std::string& name);

  // ---- metadata exchanged by the agents themselves: their sessions prove the secret, as all sessions do
  // Sends metadata to the agent that listens at an address; it takes them in if it exchanges metadata
  // (Options). Returns before that.
  Status tell(const std::string& address, wire::Bytes metadata);
  // Asks the agent that listens there for its metadata, and takes them in if they are `name`'s.
  Status ask(const std::string& address, std::string name);
  // Makes the agent that listens there forget this agent.
  Status withdraw(const std::string& address);
  // Whether one of these three is under way.
  bool is_exchanging();
  // Sets the address that metadata name for this agent from now on.
  void advertise(std::string address);

  // ---- transfers
  // "" is our memory as the near end; our own name is our memory as the far end.
  Result<std::shared_ptr<const PreparedList>> prepare(const std::string& agent,
                                                      std::span<const Descriptor> descriptors,
                                                      MemoryKind kind) {
    return prepare_rows(agent, descriptors, kind);
  }
  Result<std::shared_ptr<const PreparedList>> prepare(const std::string& agent, std::span<const Strided> rows,
                                                      MemoryKind kind) {
    return prepare_rows(agent, rows, kind);
  }
  // Null entries: all of them.
  Result<std::shared_ptr<Request>> make(Operation operation, const PreparedList& local,
                                        std::span<const std::uint32_t> local_entries, bool all_local,
                                        const PreparedList& remote,
                                        std::span<const std::uint32_t> remote_entries, bool all_remote);
  // Begins the request. `notify` reaches the remote agent once all bytes are in place. kAgain: it is under
  // way.
  Status post(Request& request, wire::Bytes notify);
  // kOk: it is done. kAgain: it is under way. Else: how it failed. Drives progress.
  Status check(Request& request);
  // Ends what is under way of the request, and waits until none of its bytes can land, at either end: of a
  // write, until the remote agent has said so, or its session is lost. kDeadline: that took longer than a
  // transfer may; the request is not released, and may be released again.
  Status release(Request& request);

  // ---- notifications
  Status notify(const std::string& remote, wire::Bytes payload);
  // (remote agent, payload), oldest first. Drives progress.
  std::vector<std::pair<std::string, wire::Bytes>> take_notifications();

 private:
  // Descriptors that were registered together; they become one region.
  struct Registration {
    RegionId region = 0;
    MemoryKind kind = MemoryKind::kHost;
    std::multiset<Descriptor> descriptors;
  };
  struct Remote {
    std::string address;
    wire::Id128 incarnation{};
    std::shared_ptr<const SectionMap> sections = std::make_shared<SectionMap>();
    std::vector<Token> tokens;  // of its metadata
    std::size_t num_claimed = 0, num_granted = 0;  // of these tokens, in this session
    SessionKey session = 0;  // 0: none
    bool is_up = false;
    Status failure;  // why the last session ended, or a token was refused
    std::deque<std::shared_ptr<Request>> waiting;  // requests that wait for the session
    std::map<std::string, std::shared_ptr<Installed>> programs;  // told in this session, by Way::key()
    // Its place in told_, if it has told its metadata itself and our caller has not used them.
    std::optional<std::list<std::string>::iterator> unused;

    static std::uint64_t nbytes_of(std::size_t num_sections, std::size_t num_tokens) noexcept {
      return sizeof(Remote) + num_sections * sizeof(Section) + num_tokens * sizeof(Token);
    }
    std::uint64_t nbytes() const noexcept { return nbytes_of(sections->all().size(), tokens.size()); }
    bool is_ready() const noexcept { return is_up && num_granted == tokens.size(); }
  };

  Agent(std::shared_ptr<Runtime> runtime, Options options)
      : options_(std::move(options)), runtime_(std::move(runtime)) {}
  void serve();  // the thread
  void on_event(const Event& event);
  void end_for(SessionKey peer, const std::exception& why) noexcept;
  void on_message(Mail mail);
  void on_claim(SessionKey peer, const Token& token);
  // What a session says that is opened to say one thing only.
  struct Introduction {
    std::uint8_t kind = 0;  // of the message
    wire::Bytes payload;
    std::string name;  // the agent that must answer
  };
  Status introduce(const std::string& address, Introduction introduction);
  void send_long(SessionKey session, std::uint8_t kind, wire::Bytes payload);
  void send_more(SessionKey session);
  void end_sending(SessionKey session);
  void on_introduced(std::unique_lock<std::mutex>& lock, SessionKey peer, std::uint8_t kind,
                     wire::Bytes payload);
  void add_part(SessionKey peer, const wire::Bytes& payload);
  wire::Bytes take_parts(SessionKey peer, wire::Bytes last);
  void end_introduction(SessionKey peer, const std::string& why);
  // Metadata that are decoded, which is done without the mutex: they may be long.
  struct Told {
    Metadata metadata;
    SectionMap sections;
  };
  static Result<Told> read(wire::ByteSpan bytes);
  Result<std::string> take_in(const Told& told, std::uint64_t most_nbytes);
  Status take_in_from(SessionKey peer, const Told& told);
  void use(Remote& remote);
  void forget(std::map<std::string, std::unique_ptr<Remote>>::iterator remote, const Status& why);
  Result<std::vector<Section>> make_region(const std::multiset<Descriptor>& descriptors, MemoryKind kind);
  Status add_region(std::multiset<Descriptor> descriptors, MemoryKind kind);
  std::optional<std::size_t> find_registration(const Descriptor& descriptor, MemoryKind kind) const;
  Metadata described(const std::set<RegionId>* regions, bool with_address);
  Token token_of(const std::set<RegionId>& regions);
  Remote* find(const std::string& name);  // for our caller, who uses it from then on
  Remote* find(SessionKey session);
  Status dial(Remote& remote);
  void claim(Remote& remote);
  void lose(Remote& remote, const Status& why);
  template <class Row>
  Result<std::shared_ptr<const PreparedList>> prepare_rows(const std::string& agent,
                                                           std::span<const Row> rows, MemoryKind kind);
  Status start_ways(Request& request, Remote& remote);
  Status install(Request& request, Remote& remote);
  Status move_locally(Request& request);
  void refresh(Request& request);
  std::vector<std::shared_ptr<Handle>> pending(const Request& request);
  Status send(SessionKey session, std::uint8_t kind, std::span<const std::byte> payload);
  std::string name_of(SessionKey session);

  Options options_;
  const std::shared_ptr<Runtime> runtime_;
  std::thread thread_;
  std::atomic<bool> stops_{false};
  std::atomic<std::uint64_t> num_regions_{0};  // regions made so far, ended ones included
  std::atomic<Time> checked_at_{0};  // when a request was last found under way

  std::mutex mutex_;  // guards all that follows
  std::vector<Registration> registrations_;
  std::shared_ptr<const SectionMap> sections_ = std::make_shared<SectionMap>();
  std::map<std::set<RegionId>, Token> tokens_;
  std::map<std::pair<SessionKey, RegionId>, std::vector<LeaseId>> granted_;
  std::map<std::string, std::unique_ptr<Remote>> remotes_;
  std::map<SessionKey, Remote*> by_session_;
  // Agents that have told their metadata themselves, the oldest first, and what these take: until our caller
  // uses them, the oldest give way to newer ones.
  std::list<std::string> told_;
  std::uint64_t told_nbytes_ = 0;
  std::map<SessionKey, std::string> names_;  // of peers, by session
  std::map<SessionKey, Introduction> introductions_;
  // What is longer than the room for messages: the rest goes when there is room again.
  struct Outgoing {
    std::uint8_t kind = 0;
    wire::Bytes payload;
    std::size_t num_sent = 0;
  };
  std::map<SessionKey, Outgoing> outgoing_;
  std::map<SessionKey, wire::Bytes> parts_;  // parts of what a peer sends in several messages
  std::uint64_t parts_nbytes_ = 0;
  // Notifications that came as messages, or from this agent itself. A peer's count against its budget until
  // our caller takes them.
  struct Notice {
    std::string from;
    Mail mail;
  };
  std::deque<Notice> notices_;
};

// Ways of one remote agent. It may be posted again and again, one post after another has ended. Released
// before it is destroyed.
class Request : public std::enable_shared_from_this<Request> {
 public:
  const std::string& remote() const noexcept { return remote_; }
  std::uint64_t nbytes() const noexcept { return nbytes_; }
  std::size_t num_descriptors() const noexcept { return num_descriptors_; }
  std::size_t num_transfers() const noexcept { return ways_.size(); }
  Time posted_at() const noexcept { return posted_at_; }
  Time begun_at() const noexcept { return begun_at_; }  // when post() had returned
  Time ended_at() const noexcept { return ended_at_; }

 private:
  friend class Agent;
  enum class State : std::uint8_t { kMade, kWaiting, kMoving, kDone, kFailed };

  std::string remote_;
  Operation operation_ = Operation::kRead;
  std::vector<Way> ways_;
  std::vector<std::string> keys_;  // of regular ways
  std::vector<std::shared_ptr<Installed>> programs_;
  std::vector<std::shared_ptr<Handle>> handles_;
  SessionKey session_ = 0;  // the session that it moves by
  wire::Bytes notify_;  // still to be sent
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
  std::vector<Run> runs_;  // of a request within this agent
};

}  // namespace kvxfer::raw_agent
