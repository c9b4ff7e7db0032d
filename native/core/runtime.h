// An agent alive: the progress thread, and its gate, around an Engine and the parts that give it sockets and
// transports (core/runtime/).
//
// runtime.cpp           life, calls, what the engine wants
// runtime_rounds.cpp    rounds of progress, for whichever thread drives (runtime/drivers.h)
// runtime_triggers.cpp  transfers that wait for a word of memory
// runtime_commands.cpp  transfers that kernels start
// runtime_streams.cpp   streams of a GPU that wait for transfers
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/commands/command_watch.h"
#include "core/commands/stream_wait.h"
#include "core/commands/trigger_watch.h"
#include "core/completion_ring.h"
#include "core/engine.h"
#include "core/record_ring.h"
#include "core/runtime/clock.h"
#include "core/runtime/connections.h"
#include "core/runtime/drivers.h"
#include "core/runtime/kept_memory.h"
#include "core/runtime/listeners.h"
#include "core/runtime/rail_table.h"
#include "core/runtime/watched_credentials.h"
#include "core/runtime/watched_secrets.h"
#include "core/runtime_options.h"
#include "core/system/epoll_reactor.h"
#include "core/system/gate.h"
#include "gpu/stream_writes.h"

namespace kvxfer {

class Runtime final : private EngineHost {
 public:
  // A forked child leaks it when the last reference goes: the child has no progress thread, a lock may
  // stay held for ever, and even destroying a condition variable waits for threads that wait in the
  // parent.
  static Result<std::shared_ptr<Runtime>> create(RuntimeOptions options);
  ~Runtime() override;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  const std::string& address() const noexcept { return listeners_.address(); }
  const wire::Identity& identity() const noexcept { return self_; }
  // What connections hold that have proved nothing yet.
  Budget strangers();
  // For an agent with certificates: connections that begin from now on prove themselves by these
  // credentials.
  Status renew(std::shared_ptr<const tls::Credentials> credentials);
  // For an agent that was made with a secret: sessions that begin from now on prove `first`, or `second`
  // if the peer knows only that one; "" for none. Sessions that are open, or have begun, go on.
  Status set_secrets(std::string first, std::string second);
  // The same with the secrets that are in the secrets' file now.
  Status reload_secrets();
  CompletionRing& ring() noexcept { return ring_; }
  // The records of what has ended. From any thread, without the gate, and even when the agent is closed.
  RecordRing& records() noexcept { return records_; }
  // Keeps at most `capacity` records of what ends from now on; 0: none. Returns a descriptor that is
  // readable while there are some.
  Result<int> watch_records(std::size_t capacity);
  int gpu() const noexcept { return options_.gpus.empty() ? -1 : options_.gpus.front().device; }

  // Calls f(engine, now) under the gate, pumps, and flushes the results. All requests of callers to the
  // engine go through here; not after close(), and not in a forked child.
  template <class F>
  auto with_engine(F&& f) -> decltype(f(std::declval<Engine&>(), Time{})) {
    const CallerTurn turn(*this);
    return f(*engine_, turn.now);
  }
  // The same for requests that are refused once the agent is closed. Another thread may close it before
  // this one has the gate: then f is not called, and check_alive() says why.
  template <class F>
  auto with_open_engine(F&& f) -> std::optional<decltype(f(std::declval<Engine&>(), Time{}))> {
    const CallerTurn turn(*this);
    if (closed()) return std::nullopt;
    return f(*engine_, turn.now);
  }
  // The rails of a peer, in words (RailTable::paths): within with_engine().
  std::vector<std::string> paths(SessionKey peer) const { return rails_.paths(peer); }
  std::string path(RailId rail) const { return rails_.path(rail); }  // likewise, for one rail
  Status check_alive() const;
  bool forked() const noexcept;  // check_alive() says kForked

  // `owner` keeps the memory. deregister_region() or close() drops it, without the gate, when no work on
  // the region is under way any more; the holder of the region's number need not live so long. `device`:
  // see LocalRegion.
  Result<RegionId> register_region(std::string name, std::vector<std::pair<std::byte*, std::uint64_t>> spans,
                                   std::uint32_t num_blocks, const CopyProgram& footprint, wire::Bytes layout,
                                   MemoryKind kind = MemoryKind::kHost,
                                   std::shared_ptr<const void> owner = nullptr, int device = -1);
  // Takes a region from peers. kOk: the memory is its owner's again. No work on it is under way, and peers
  // have unmapped it if they would otherwise hold what its owner frees. It waits for such peers up to
  // silent_ns; after that their rails are down. It waits for works of a device as long as `timeout_ns`,
  // and then returns kDeadline: the region is gone from peers all the same, and another call waits on.
  // Call it on another thread than the driving one.
  Status deregister_region(RegionId id, Time timeout_ns = kNever);

  // Ends a lease. True: nothing under it is under way any more, and its blocks may be used again. False:
  // that takes longer than `timeout_ns`; the right has ended all the same. Another call waits on.
  bool revoke(LeaseId lease, Time timeout_ns = kNever);
  // Cancels a transfer or an expectation. Its handle has ended when this returns, unless a device first
  // has to end works that it has under way.
  void cancel(const Handle& handle);
  Result<SessionKey> begin_connect(const std::string& address, Time timeout_ns);

  // Posts a transfer whose layers go only as the trigger releases them; the trigger is kept until the
  // transfer has ended. In everything else the transfer is as if it did not wait.
  Result<std::shared_ptr<Handle>> post_after(TransferRequest request, After after);
  // Makes a trigger with a word that the agent's GPU reaches; without a GPU, with a word of this process.
  Result<std::shared_ptr<Trigger>> make_trigger() const;
  // Has a stream of the agent's GPU store a value to a trigger of make_trigger(). The other two return
  // what a transfer waits for, so that it waits for a stream or an event directly. kUnsupported without a
  // GPU.
  Status record(Trigger& trigger, gpu::Stream stream, Trigger::Word value);
  Result<After> after_stream(gpu::Stream stream);
  Result<After> after_event(gpu::Event event);

  // Opens a ring of commands: kernels start transfers by writing to it. It lies in memory that the agent's
  // GPU reaches, if the agent has one. The agent looks at it again and again until the ring or the agent
  // is closed.
  Result<std::shared_ptr<CommandReader>> open_command_ring(std::uint32_t num_commands);
  void close_command_ring(CommandReader& reader);

  // Has a stream of the agent's GPU wait until one layer of a transfer or an expectation has arrived, or
  // without a layer until it has ended. The stream goes on however it ends. If it fails, the stream goes
  // on before the fence, since the fence may wait for work behind the stream. The returned object says how
  // it ended; dropping it changes nothing. kUnsupported without a GPU, kInvalidArgument for a stream of
  // another GPU or one that is being captured, kOutOfRange for a layer that does not arrive here.
  Result<std::shared_ptr<StreamWait>> wait_in(gpu::Stream stream, Handle& handle,
                                              std::optional<std::uint32_t> layer = std::nullopt);

  // The caller took a message of that peer from ring(), and the message `tells`.
  void message_taken(SessionKey peer);
  // See Engine::switch_rails; kInvalidArgument if the agent does not have that transport.
  Status switch_rails(const std::string& transport, bool on);

  bool poll();  // one round on the caller's thread; true if anything moved or came in
  // Readable while sockets have something to read or may be written to.
  int sockets_fd() const noexcept { return reactor_.fd(); }
  // For an event loop that found sockets_fd() readable: does the short work on the loop's thread, which
  // saves a wake-up of the agent's thread. False if another thread drives, or if more than short work is
  // left; that is for the other thread, or for the agent's. The loop should then ignore sockets_fd() until
  // the ring wakes it.
  bool serve();
  // A loop that served ignores the sockets from now on, whatever comes next: the agent's thread takes over
  // at once.
  void leave();
  // True if serve() is worth a loop's while. If frames come through memory, short work ends after one
  // wake-up. Over sockets alone it takes more wake-ups, and a loop answers each later than a thread does.
  bool serves() const noexcept { return serves_ && drivers_.serves(); }
  // Drives progress on the caller's thread until done() or the time is over; false in the latter case. If
  // another thread drives already, this one sleeps until something has ended.
  bool wait(const std::function<bool()>& done, Time timeout_ns);
  // Ends everything. Several threads may close the agent; when this returns in any of them, the agent has
  // let go of all registered memory.
  void close(Time timeout_ns);
  // Or close() is under way, or the agent has ended by a mistake of its own.
  bool closed() const noexcept { return closed_.load(std::memory_order_acquire) || broken(); }
  bool broken() const noexcept { return is_broken_.load(std::memory_order_acquire); }
  bool ended() const noexcept { return ended_.load(std::memory_order_acquire); }    // close() has returned

  static Time now() noexcept { return monotonic_now(); }

  // The longest processor time for which a thread held the gate since the last forget_holds(); exact with
  // meter_gate. Time that other processes of the machine take meanwhile does not count.
  Time longest_hold_ns() const noexcept { return gate_.longest_hold_ns(); }
  Gate::Histogram holds() const noexcept { return gate_.holds(); }
  void forget_holds() noexcept { gate_.forget_holds(); }

 private:
  struct Waker final : Reactor::Handler {
    UniqueFd fd;
    void on_ready(std::uint32_t events) override;
  };
  friend class Drivers<Runtime>;
  // Holds the gate for one call of a caller. When it ends, the results of the call are sent, and waiters
  // are woken.
  struct CallerTurn {
    explicit CallerTurn(Runtime& owner);
    ~CallerTurn();
    Runtime& runtime;
    const Time now;
  };

  explicit Runtime(RuntimeOptions options);
  Status start();
  std::array<int, 4> own_fds();  // that a forked child closes
  Status check_has_secret() const;
  // Under the gate: collects what has ended, until is_so() is true. Rails that stop at once have ended it
  // already.
  bool take_ended(const std::function<bool()>& is_so);
  // Outside the gate, while the agent goes on for all others: waits until is_so(), which is called under
  // the gate.
  bool await(const std::function<bool()>& is_so, Time timeout_ns);
  // `timeout_ns`: after that time, peers that do not answer are given up.
  void await_unmapped(RegionId region, const std::string& what, Time timeout_ns);

  // runtime_rounds.cpp
  bool is_alive() const noexcept;  // check_alive() without words
  void run();  // the progress thread
  // Under the gate; true if there is more to do at once. `look`: also at the sockets, whatever else came.
  bool progress(bool look = true);
  bool round(bool look);
  // Under the gate. A round threw what only a mistake of ours throws: the agent ends, and not the process.
  void give_up(const char* what) noexcept;
  bool check_deadlines(Time now);  // true if input came first
  void pump_and_flush(Time now);
  void flush_sockets();  // and collects the connections that closed meanwhile
  Time next_deadline() const;
  bool busy() const;
  void wake_reactor();  // wakes the thread that sleeps on it

  // What drivers ask beside.
  Gate& gate() noexcept { return gate_; }
  Time spin_ns() const noexcept { return options_.spin_ns; }
  bool gave_up() const noexcept;  // no more rounds are made
  bool left() const noexcept { return left_; }
  bool has_work() const;  // that no descriptor announces
  bool moves_bytes() const { return rails_.busy(); }
  bool polls_sockets(Time at);  // whether a polling caller is to look at them now
  bool shares_any_memory() const { return connections_.shares_any_memory(); }
  void wake() { drivers_.wake(); }

  // runtime_triggers.cpp
  // Sleeps on the reactor until that time, or until input comes, the sleeper's bell rings, or the word of
  // a trigger has news.
  void sleep(Time until, const SystemThreads::Bell& bell);
  bool unannounced() const noexcept;  // stores may come without a bell: words have to be looked at
  Result<std::shared_ptr<gpu::StreamWrites>> streams() const;
  Result<After> once(const std::function<Status(gpu::StreamWrites&, Trigger::Word*)>& write);

  // What the engine wants (EngineHost): passed on to the part that does it, or done in runtime.cpp.
  void send(SessionKey session, wire::Bytes&& frame) override {
    connections_.send(session, std::move(frame));
  }
  Unsent unsent(SessionKey session) const override { return connections_.unsent(session); }
  void close_session(SessionKey session) override;
  std::uint32_t session_open(SessionKey session) override { return connections_.dial_rails(session); }
  void dial_rail(SessionKey session, const wire::RailName& rail) override {
    connections_.dial_rail(session, rail);
  }
  Code post(RailId rail, const Work& work) override { return rails_.post(rail, work); }
  WorkKind choose(RailId rail, const Move& move, std::uint32_t piece) override {
    return rails_.choose(rail, move, piece);
  }
  void cancel(RailId rail, std::span<const WorkId> works) override { rails_.cancel(rail, works); }
  Status attach(RailId rail, const RemoteRegion& region) override { return rails_.attach(rail, region); }
  void detach(RailId rail, RegionId region) override { rails_.detach(rail, region); }
  void drop_rail(RailId rail) override { rails_.drop_rail(rail); }
  void region_fenced(RegionId region) override { rails_.region_fenced(region); }
  std::uint64_t fence_generation(std::uint32_t slot) override { return fences_->generation(slot); }
  void bump_fence(std::uint32_t slot) override { fences_->bump(slot); }
  void emit(Event event) override;
  void random(std::span<std::byte> bytes) override;

  bool arm();  // before sleeping: peers and devices are asked to announce what comes
  void log(std::string text);

  const RuntimeOptions options_;
  const pid_t owner_;
  wire::Identity self_;
  Gate gate_;
  EpollReactor reactor_;
  CompletionRing ring_;
  RecordRing records_;
  std::unique_ptr<FenceTable> fences_;
  std::shared_ptr<CopyWorkers> workers_;  // for rails and engine; null with copy_threads 1
  RailTable rails_;
  Connections connections_{options_, reactor_, rails_, [this](std::string text) { log(std::move(text)); }};
  Listeners listeners_{reactor_, connections_};
  KeptMemory kept_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<WatchedSecrets> secrets_;  // null if the secrets came from no file
  std::unique_ptr<WatchedCredentials> credentials_;  // null if there are none
  Waker waker_;
  std::atomic<bool> serves_{false};  // the frames of all sessions may come through memory
  int rounds_without_sockets_ = 0;
  Time looked_at_ = 0;  // when a polling caller last looked at the sockets
  bool sockets_quiet_ = false;  // nothing was there at the last look
  bool left_ = false;  // busy() after the last round

  std::mutex watching_;  // for watch_records()
  mutable std::mutex streams_mutex_;
  std::shared_ptr<gpu::StreamWrites> stream_writes_;  // under it; with a GPU, as long as the agent is open
  TriggerWatch triggers_{[this] { wake(); }};
  CommandWatch commands_;
  std::atomic<std::uint64_t> next_command_ring_{1};

  std::thread thread_;
  std::atomic<bool> closed_{false}, ended_{false}, is_broken_{false};
  std::atomic<int> num_mistakes_{0};
  std::string mistake_;  // why it is broken; written once, before is_broken_
  std::recursive_mutex closing_;  // held by close(); dropping an owner may close the agent once more
  Drivers<Runtime> drivers_{*this};
};

}  // namespace kvxfer
