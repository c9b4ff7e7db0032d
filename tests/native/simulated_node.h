// A simulated agent: an Engine on a simulated network, with real bytes behind its regions.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/copy/pack.h"
#include "core/engine.h"
#include "core/mailbox.h"
#include "simulated_layout.h"
#include "simulated_network.h"

namespace simulation {

using namespace kvxfer;

class Node;

// The node whose engine runs, for tests in which it runs out of memory (memory_failure.h); the host's part
// does not count.
inline const Node* running = nullptr;
class Running {
 public:
  explicit Running(const Node* node) : before_(std::exchange(running, node)) {}
  ~Running() { running = before_; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  const Node* before_;
};

// One rail between two nodes.
struct Link {
  struct End {
    Node* node = nullptr;
    std::uint64_t life = 0;
    SessionKey session = 0;
    RailId rail = 0;
    bool dead = false;
    std::set<RegionId> attached{};
    std::shared_ptr<Memories> memories;
    std::shared_ptr<std::vector<std::uint64_t>> fences;
    Time last_at = 0;  // when the newest frame of this end arrives
  };
  Capabilities capabilities;
  wire::RailName name;
  bool muted = false;  // nothing comes over it, and neither end is told
  Time fetch_ns = 0;  // for one fetch, one after the other; 0: each has its own time, all run at once
  Time free_at = 0;
  std::size_t num_fetched = 0;
  End ends[2];
};

struct RailPlan {
  Capabilities capabilities;
  bool comes_up = true;
};

inline RailPlan one_sided_rail(std::uint32_t piece_nbytes = 128) {
  return {{.name = "mapped", .one_sided = true, .rank = 0, .window = 8, .piece_nbytes = piece_nbytes}};
}
inline RailPlan two_sided_rail(std::uint32_t piece_nbytes = 128) {
  return {{.name = "stream", .two_sided = true, .rank = 1, .window = 4, .piece_nbytes = piece_nbytes}};
}
// A rail that fetches some pieces and has others sent.
inline RailPlan either_rail(std::uint32_t piece_nbytes = 128) {
  RailPlan plan = one_sided_rail(piece_nbytes);
  plan.capabilities.two_sided = true;
  return plan;
}
// A stream that carries pages of GPUs as well.
inline RailPlan staged_rail(std::uint32_t piece_nbytes = 128) {
  RailPlan plan = two_sided_rail(piece_nbytes);
  plan.capabilities.memory = MemoryKinds(MemoryKind::kHost) | MemoryKind::kGpu;
  return plan;
}
// A rail between memories of GPUs, which ranks before all others.
inline RailPlan gpu_rail(std::uint32_t piece_nbytes = 256) {
  return {{.name = "kernels",
           .one_sided = true,
           .rank = 0,
           .window = 8,
           .piece_nbytes = piece_nbytes,
           .memory = MemoryKind::kGpu}};
}

class Node final : public EngineHost {
 public:
  Node(Network& network, int place, std::string name, EngineConfig config)
      : network_(network), place_(place), name_(std::move(name)), config_(std::move(config)) {
    start();
  }

  // ---- lifetimes
  void start() {
    ++life_;
    paused_ = false;
    timer_at_ = kNever;
    memories_ = std::make_shared<Memories>();
    fences_ = std::make_shared<std::vector<std::uint64_t>>(FenceTable::kNumSlots);
    EngineConfig config = config_;
    config.session.self.name = name_;
    random({config.session.self.incarnation.data(), 16});
    engine_ = std::make_unique<Engine>(config, *this);
    note("starts");
  }
  // Ends the process at once. `heard`: its peers see their connections end.
  void crash(bool heard = true) {
    note(heard ? "crashes" : "crashes, unheard");
    engine_.reset();
    ++life_;
    for (auto& [key, connection] : std::exchange(connections_, {}))
      heard ? connection.pipe->close(connection.side, "reset") : connection.pipe->cut();
    for (auto& [id, rail] : std::exchange(rails_, {})) {
      rail.link->ends[rail.side].dead = true;
      if (heard) kill_end(rail.link, 1 - rail.side, "connection reset");
    }
    jobs_.clear();
    inbox_.clear();
    unread_.clear();
    paused_ = false;
  }
  bool alive() const { return engine_ != nullptr; }
  bool paused() const { return paused_; }
  void pause() {
    note("is stopped");
    paused_ = true;
  }
  void resume() {
    if (!paused_) return;
    note("goes on");
    paused_ = false;
    // When a process goes on, it may look at the clock first, or at its sockets.
    if (network_.random().chance(50)) in_engine()->on_time(now());
    for (auto& body : std::exchange(inbox_, {})) {
      if (!engine_ || paused_) return;
      body();
      if (network_.random().chance(50)) settle();
    }
    settle();
  }

  // ---- what the agent's callers do; each call is followed by what a progress thread does
  Engine& engine() { return *engine_; }
  Time now() const { return network_.clock().now(); }
  void settle() {
    in_engine()->pump(now());
    arm();
    if (engine_->wants_pump()) run_soon(20 * kMicrosecond, [] {});
  }
  // `staged`: if the region lies on a GPU, streams carry it as well.
  Status send_message(SessionKey to, wire::Bytes payload) {
    Status status = engine_->send_message(now(), to, std::move(payload));
    settle();
    return status;
  }
  // Reads the oldest message, as a caller does.
  std::optional<Mail> read_message() {
    if (unread_.empty()) return std::nullopt;
    std::optional<Mail> read(std::move(unread_.front()));
    unread_.pop_front();
    read->charge.release();
    if (read->tells) engine_->message_taken(now(), read->peer);
    settle();
    return read;
  }
  RegionId add_region(const Layout& layout, MemoryKind kind = MemoryKind::kHost, bool staged = false) {
    auto memory = std::make_shared<Memory>(layout);
    auto region = std::make_unique<Region>();
    region->memory.base = memory->bytes.data();
    region->memory.spans = {{0, memory->bytes.size()}};
    const RegionId id = region->memory.id = engine_->reserve_region_id();
    region->name = "kv" + std::to_string(id);
    region->num_blocks = layout.num_blocks;
    region->footprint = Footprint::create(program_between(layout, layout), Side::kDst, layout.num_blocks,
                                          region->memory.spans)
                            .value();
    region->memory.kind = kind;
    if (kind == MemoryKind::kHost)
      region->keys = {{"mapped", {}}, {"stream", {}}};
    else
      region->keys = {{"kernels", {}}};
    if (kind == MemoryKind::kGpu && staged) region->keys.push_back({"stream", {}});
    (*memories_)[id] = memory;
    REQUIRE(engine_->register_region(now(), std::move(region)).ok());
    settle();
    return id;
  }
  Status deregister(RegionId id) {
    Status status = engine_->deregister_region(now(), id);
    settle();
    return status;
  }
  Memory& memory(RegionId id) { return *memories_->at(id); }
  std::shared_ptr<Memories> memories() const { return memories_; }
  void cancel(const std::shared_ptr<Handle>& handle) { engine_->cancel(now(), handle->id()), settle(); }
  void revoke(LeaseId lease) { engine_->revoke(now(), lease), settle(); }

  // The open session with the peer of that name; 0 for none.
  SessionKey session_with(const std::string& peer) const {
    for (const SessionKey key : engine_->open_peers())
      if (engine_->peer(key)->name == peer) return key;
    return 0;
  }

  // ---- connections
  void call(Node& other, std::vector<RailPlan> rails) {
    auto pipe = std::make_shared<Pipe>(network_, pipe_end(), other.pipe_end());
    pipe->set_key(0, open(SessionRole::kInitiator, pipe, 0, &other, std::move(rails)));
    other.accept(pipe, place_);
  }
  // The caller is an end that a test drives by hand.
  std::shared_ptr<Pipe> accept_from(Pipe::End caller) {
    const int place = caller.place;
    auto pipe = std::make_shared<Pipe>(network_, std::move(caller), pipe_end());
    accept(pipe, place);
    return pipe;
  }
  // A rail to a peer whose end of the session a test drives by hand; `far` has its memory.
  RailId give_rail(SessionKey session, const RailPlan& plan, Node& far) {
    auto link = std::make_shared<Link>();
    link->capabilities = plan.capabilities;
    link->ends[0] = {.node = &far, .life = far.life_, .memories = far.memories_, .fences = far.fences_};
    link->ends[1] = {.node = this,
                     .life = life_,
                     .session = session,
                     .rail = next_rail_++,
                     .memories = memories_,
                     .fences = fences_};
    rails_[link->ends[1].rail] = {link, 1};
    engine_->rail_up(now(), session, {link->ends[1].rail, 0, link->capabilities});
    settle();
    return link->ends[1].rail;
  }
  void cut_rail(RailId id, const std::string& why) {
    auto found = rails_.find(id);
    if (found == rails_.end()) return;
    const auto link = found->second.link;
    for (int side : {0, 1}) kill_end(link, side, why);
  }
  // Only this end finds the rail broken; the other end hears of it as of any rail that is dropped.
  void cut_rail_here(RailId id, const std::string& why) {
    drop_rail(id);
    engine_->rail_down(now(), id, why);
    settle();
  }
  void end_session_with(SessionKey session) {
    engine_->end_session(now(), session, Code::kClosed, "enough");
    settle();
  }
  std::vector<RailId> rails_with(SessionKey session) const {
    std::vector<RailId> out;
    for (const auto& [id, rail] : rails_)
      if (rail.link->ends[rail.side].session == session && !rail.link->ends[rail.side].dead)
        out.push_back(id);
    return out;
  }
  // The session that runs over that connection, if it is open; two agents may have several sessions.
  SessionKey session_on(const Pipe& connection) const {
    for (const SessionKey key : engine_->open_peers())
      if (auto found = connections_.find(key);
          found != connections_.end() && found->second.pipe.get() == &connection)
        return key;
    return 0;
  }
  std::shared_ptr<Link> link(RailId id) const { return rails_.at(id).link; }
  std::shared_ptr<Pipe> pipe(SessionKey session) const { return connections_.at(session).pipe; }
  int side(SessionKey session) const { return connections_.at(session).side; }

  // ---- EngineHost
  void send(SessionKey session, wire::Bytes&& frame) override {
    const Running host = enter_host();
    num_sent_nbytes += frame.size();
    if (const auto header = wire::decode_header(frame, wire::kMaxBody); header.ok())
      note("to session " + std::to_string(session) + ": " + std::string(wire::name_of(header.value().type)));
    if (auto found = connections_.find(session); found != connections_.end())
      found->second.pipe->send(found->second.side, std::move(frame));
    else
      early_.push_back(std::move(frame));  // called within add_session
  }
  // Nothing announces that a connection takes more, so the engine is pumped again and again.
  Unsent unsent(SessionKey session) const override {
    const auto found = connections_.find(session);
    return {found == connections_.end() ? 0 : found->second.pipe->num_unsent(found->second.side), false};
  }
  void close_session(SessionKey session) override {
    const Running host(nullptr);
    auto found = connections_.find(session);
    if (found == connections_.end()) return;
    found->second.pipe->close(found->second.side);
    connections_.erase(found);
  }
  std::uint32_t session_open(SessionKey session) override;
  void dial_rail(SessionKey session, const wire::RailName& rail) override;
  Code post(RailId rail, const Work& work) override;
  WorkKind choose(RailId, const Move&, std::uint32_t) override {
    return network_.random().chance(50) ? WorkKind::kFetch : WorkKind::kReceive;
  }
  void cancel(RailId rail, std::span<const WorkId> works) override;
  Status attach(RailId rail, const RemoteRegion& region) override;
  void detach(RailId rail, RegionId region) override;
  void drop_rail(RailId rail) override;
  void region_fenced(RegionId region) override {
    const Running host(nullptr);
    memory(region).registered = false;
    if (on_region_fenced) on_region_fenced(*this, region);
  }
  std::uint64_t fence_generation(std::uint32_t slot) override { return fences_->at(slot); }
  void bump_fence(std::uint32_t slot) override { ++fences_->at(slot); }
  void emit(Event event) override {
    const Running host = enter_host();
    note("event " + std::to_string(static_cast<int>(event.kind)) + " handle " + std::to_string(event.handle) +
         " lease " + std::to_string(event.lease) + " " + std::string(name_of(event.code)) + " " +
         event.message);
    if (event.kind == EventKind::kMessage) {
      unread_.push_back({event.peer, event.payload, std::move(event.charge), event.tells});
      if (takes_events) read_later();
    } else if (takes_events) {
      event.charge.release();
    }
    if (on_event) on_event(*this, event);
    events.push_back(std::move(event));
  }
  void random(std::span<std::byte> bytes) override { network_.random().fill(bytes.data(), bytes.size()); }

  void note(const std::string& line) { network_.clock().note(name_ + " " + line); }
  int place() const { return place_; }
  const std::string& name() const { return name_; }
  std::uint64_t life() const { return life_; }
  std::size_t num_works() const { return jobs_.size(); }

  // ---- for tests
  std::function<void()> before_host;  // may throw, as a host without memory does
  std::vector<Event> events;
  bool takes_events = true;  // events are drained at once; otherwise they stay charged to their peers
  std::function<void(Node&, const Event&)> on_event;
  // Called before bytes land: the peer they come from, the region's memory, offset and size.
  std::function<void(Node&, SessionKey, Memory&, std::uint64_t, std::uint64_t)> on_write;
  std::function<void(Node&, RegionId)> on_region_fenced;
  unsigned again_percent = 0;       // of posts
  unsigned flip_percent = 0;        // of pieces that land here; in each, one byte changes
  unsigned lost_rail_percent = 0;   // of rails that are dialled
  Time work_ns = 100 * kMicrosecond;  // up to this for each step of a work
  Time read_ns = 0;                   // a message waits at most so long for its reader
  Time fence_ns = 0;  // works that were cancelled go on for at most so long; 0: they stop at once
  std::set<std::string_view> unattachable;  // transports that cannot reach any memory here
  bool takes_rails = true;  // whether it accepts rails that others dial
  std::vector<std::pair<Time, wire::RailName>> dials;  // of rails
  std::map<WorkKind, std::size_t> posted;  // works so far
  std::size_t num_sent_nbytes = 0;  // of frames so far
  std::vector<std::pair<RailId, std::size_t>> cancels;  // calls so far: the rail, and how many works

 private:
  // Marks the engine as running while one of its functions is called.
  struct InEngine {
    InEngine(const Node* node, Engine* its) : running(node), engine(its) {}
    Engine* operator->() const { return engine; }
    Running running;
    Engine* engine;
  };
  InEngine in_engine() { return {this, engine_.get()}; }
  Running enter_host() const {
    if (running == this && before_host) before_host();
    return Running(nullptr);
  }

  struct Connection {
    std::shared_ptr<Pipe> pipe;
    int side;
    Node* other;
    std::vector<RailPlan> rails;
  };
  struct RailEnd {
    std::shared_ptr<Link> link;
    int side;
  };
  struct Run { std::uint64_t src, dst, nbytes; };
  struct Job {
    Work work;
    std::shared_ptr<Link> link;
    int side = 0;
    SessionKey session = 0;
    bool stopped = false, finished = false;
    std::vector<Run> runs;
    std::uint64_t nbytes = 0, moved = 0;
    WorkId sender = 0;  // kReceive: the send that it is bound to
  };
  struct Packet {
    TransferId transfer;
    std::uint32_t piece;
    WorkId sender;
    std::uint64_t first;
    std::vector<std::byte> bytes;
    bool last, held;
  };

  Pipe::End pipe_end();
  SessionKey open(SessionRole role, std::shared_ptr<Pipe> pipe, int side, Node* other,
                  std::vector<RailPlan> rails) {
    const SessionKey key = engine_->add_session(now(), role);
    connections_[key] = {pipe, side, other, std::move(rails)};
    for (wire::Bytes& frame : std::exchange(early_, {})) pipe->send(side, std::move(frame));
    arm();
    return key;
  }
  void accept(const std::shared_ptr<Pipe>& pipe, int caller) {
    network_.carry(caller, place_, 0, [this, pipe, life = life_] {
      on_thread(life, [this, pipe] { pipe->set_key(1, open(SessionRole::kAcceptor, pipe, 1, nullptr, {})); });
    });
  }

  // Runs body later, as a progress thread does, unless the process has restarted.
  void run_soon(Time delay, std::function<void()> body) {
    network_.clock().after(
        delay, [this, life = life_, body = std::move(body)]() mutable { on_thread(life, std::move(body)); });
  }
  void on_thread(std::uint64_t life, std::function<void()> body) {
    if (life != life_ || !engine_) return;
    if (paused_) {
      inbox_.push_back(std::move(body));
      return;
    }
    body();
    if (engine_) settle();
  }
  void arm() {
    const Time at = engine_->next_deadline();
    if (at >= timer_at_) return;
    timer_at_ = at;
    run_soon(at - now(), [this, at] {
      if (timer_at_ == at) timer_at_ = kNever;
      in_engine()->on_time(now());
    });
  }

  void read_later() {
    const auto longest = static_cast<std::uint64_t>(read_ns);
    run_soon(static_cast<Time>(network_.random().below(longest + 1)), [this] { read_message(); });
  }
  Time moment() {
    return static_cast<Time>(network_.random().between(1, static_cast<std::uint64_t>(work_ns)));
  }
  void rail_meets(std::shared_ptr<Link> link, Node* other);
  void kill_end(const std::shared_ptr<Link>& link, int side, const std::string& why);
  void end_jobs(RailId rail, Code code);
  void end_job(const std::shared_ptr<Job>& job, Code code);
  void finish(const std::shared_ptr<Job>& job, Code code);
  void fetch(const std::shared_ptr<Job>& job);
  void send_piece(const std::shared_ptr<Job>& job);
  void compare_fence(const std::shared_ptr<Job>& job);
  void pass(const std::shared_ptr<Job>& job, std::uint64_t first, std::uint64_t last, bool end, bool held);
  void arrive(const std::shared_ptr<Link>& link, Packet& packet);
  void land(Job& job, std::uint64_t first, std::span<const std::byte> bytes);
  std::vector<std::byte> gather(const Job& job, const std::byte* base, std::uint64_t first,
                                std::uint64_t last) const;
  Memory& memory_at(const std::byte* base);

  Network& network_;
  const int place_;
  const std::string name_;
  const EngineConfig config_;
  std::unique_ptr<Engine> engine_;
  std::uint64_t life_ = 0;
  bool paused_ = false;
  std::vector<std::function<void()>> inbox_;
  std::deque<Mail> unread_;
  Time timer_at_ = kNever;
  std::map<SessionKey, Connection> connections_;
  std::vector<wire::Bytes> early_;
  std::map<RailId, RailEnd> rails_;
  RailId next_rail_ = 1;
  std::map<WorkId, std::shared_ptr<Job>> jobs_;
  std::shared_ptr<Memories> memories_;
  std::shared_ptr<std::vector<std::uint64_t>> fences_;
};

}  // namespace simulation

#include "simulated_rail.h"
