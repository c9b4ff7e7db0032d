// An agent alive: the progress thread, and its gate, around an Engine and the parts that give it sockets and
// transports (core/runtime/).
//
// runtime.cpp           life, calls, what the engine wants
// runtime_drivers.cpp   who drives: the thread, callers, event loops
// runtime_triggers.cpp  transfers that wait for a word of memory
// runtime_commands.cpp  transfers that kernels start
// runtime_streams.cpp   streams of a GPU that wait for transfers
#pragma once

#include <atomic>
#include <condition_variable>
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
  // In a forked child the last reference leaks it: its thread is not there, a lock of its may be
  // held for ever, and even destroying a condition variable waits for those who wait in the parent.
  static Result<std::shared_ptr<Runtime>> create(RuntimeOptions options);
  ~Runtime() override;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  const std::string& address() const noexcept { return listeners_.address(); }
  const wire::Identity& identity() const noexcept { return self_; }
  // What connections hold that have proved nothing.
  Budget strangers();
  // Of an agent that has certificates: connections that begin from now on prove themselves by these.
  Status renew(std::shared_ptr<const tls::Credentials> credentials);
  // Of an agent that was made with a secret: sessions that begin from now on prove `first`, or `second` where the peer
  // knows that alone; "" for none. Those that are open, or have begun, go on.
  Status set_secrets(std::string first, std::string second);
  // The same, of those that are in the secrets' file by now.
  Status reload_secrets();
  CompletionRing& ring() noexcept { return ring_; }
  // Of what has ended, from any thread and without the gate; also once the agent is closed.
  RecordRing& records() noexcept { return records_; }
  // Keeps so many of what ends from now on; 0: none. Returns the descriptor that is readable while there are some.
  Result<int> watch_records(std::size_t capacity);
  int gpu() const noexcept { return options_.gpus.empty() ? -1 : options_.gpus.front().device; }

  // Calls f(engine, now) under the gate, pumps, and flushes what it led to. Everything that a
  // caller asks of the engine goes through here; after close() and in a forked child it does not.
  template <class F>
  auto with_engine(F&& f) -> decltype(f(std::declval<Engine&>(), Time{})) {
    const CallerTurn turn(*this);
    return f(*engine_, turn.now);
  }
  // The same for what is refused once the agent is closed, which another thread may do until the gate is ours:
  // nothing then, and check_alive() says why.
  template <class F>
  auto with_open_engine(F&& f) -> std::optional<decltype(f(std::declval<Engine&>(), Time{}))> {
    const CallerTurn turn(*this);
    if (closed()) return std::nullopt;
    return f(*engine_, turn.now);
  }
  // Of a peer's rails, in words (RailTable::paths): within with_engine().
  std::vector<std::string> paths(SessionKey peer) const { return rails_.paths(peer); }
  std::string path(RailId rail) const { return rails_.path(rail); }  // likewise, of one
  Status check_alive() const;

  // `owner` keeps the memory. It is let go without the gate, by deregister_region() or close(), when no work on the
  // region is under way any more; whoever holds the region's number need not live so long. `device`: as LocalRegion's.
  Result<RegionId> register_region(std::string name, std::vector<std::pair<std::byte*, std::uint64_t>> spans,
                                   std::uint32_t num_blocks, const CopyProgram& footprint, wire::Bytes layout,
                                   MemoryKind kind = MemoryKind::kHost,
                                   std::shared_ptr<const void> owner = nullptr, int device = -1);
  // Takes a region from peers. When this is kOk its memory is its owner's: no work on it is under way, and peers
  // have unmapped it where they would hold what its owner frees. For these it waits up to silent_ns, after which
  // their rails are down; for what a device has under way as long as the caller would wait, kDeadline then: the
  // region is gone from peers all the same, and called again this waits on. By another thread than the one that
  // drives.
  Status deregister_region(RegionId id, Time timeout_ns = kNever);

  // Ends a lease. True: nothing under it is under way any more, and its blocks may be used again. False: that
  // takes longer than the caller would wait; the right has ended all the same. Called again it waits on.
  bool revoke(LeaseId lease, Time timeout_ns = kNever);
  // Of a transfer or an expectation. Its handle has ended when this returns, unless a device has to end first
  // what it has under way.
  void cancel(const Handle& handle);
  Result<SessionKey> begin_connect(const std::string& address, Time timeout_ns);

  // Posts a transfer of which only so many layers go as the trigger says, which is kept until the transfer has
  // ended. Everything else is as if it did not wait.
  Result<std::shared_ptr<Handle>> post_after(TransferRequest request, After after);
  // A word that a GPU reaches where this agent has one, and else of this process.
  Result<std::shared_ptr<Trigger>> make_trigger() const;
  // Has a stream of the agent's GPU store a value to a trigger of make_trigger(); what to wait for where a
  // stream or an event is itself what is waited for. kUnsupported without a GPU.
  Status record(Trigger& trigger, gpu::Stream stream, Trigger::Word value);
  Result<After> after_stream(gpu::Stream stream);
  Result<After> after_event(gpu::Event event);

  // A ring of commands, in which what a kernel writes starts transfers; in memory that the agent's GPU reaches,
  // where it has one. It is looked at again and again until it is closed, or the agent is.
  Result<std::shared_ptr<CommandReader>> open_command_ring(std::uint32_t num_commands);
  void close_command_ring(CommandReader& reader);

  // Has a stream of the agent's GPU wait until one layer of a transfer or an expectation is in, or without a
  // layer until it has ended. However it ends the stream goes on: before the fence of one that fails, since
  // that may wait for what stands behind the stream. What is returned says how; dropping it changes nothing.
  // kUnsupported without a GPU, kInvalidArgument for a stream of another GPU or one that is being captured,
  // kOutOfRange for a layer that does not arrive here.
  Result<std::shared_ptr<StreamWait>> wait_in(gpu::Stream stream, Handle& handle,
                                              std::optional<std::uint32_t> layer = std::nullopt);

  // One of its messages was taken from ring(), and it `tells`.
  void message_taken(SessionKey peer);
  // Engine::switch_rails, of a transport that the agent has; kInvalidArgument of another.
  Status switch_rails(const std::string& transport, bool on);

  bool poll();  // one round on the caller's thread; whether anything moved or came in
  // Readable while sockets have something to read or may be written to.
  int sockets_fd() const noexcept { return reactor_.fd(); }
  // For an event loop that found sockets_fd() readable: does on its thread what is short, which spares
  // the way by ours. False where somebody else drives, or more is left than is short: that is theirs, or
  // our thread's, and the loop should look away from sockets_fd() until it hears of something by the ring.
  bool serve();
  // A loop that served looks away, whatever comes next: our thread has it again, at once.
  void leave();
  // Whether that is worth a loop's while: where frames come through memory the end of what is short is
  // one wake-up away. Over sockets alone there are more, each of which a loop answers later than a thread.
  bool serves() const noexcept { return serves_ && !driven_ && now() >= thread_serves_until_; }
  // Drives progress on the caller's thread until done() or the time is over; false then. Another
  // thread may be driving already: then this one sleeps until something ended.
  bool wait(const std::function<bool()>& done, Time timeout_ns);
  // Ends everything. When this returns, from whichever of several threads that close it, the agent has let go of all
  // memory that was registered.
  void close(Time timeout_ns);
  bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }  // or is just closing
  bool ended() const noexcept { return ended_.load(std::memory_order_acquire); }    // close() has returned

  static Time now() noexcept { return monotonic_now(); }

  // For how much processor time threads held the gate since that was forgotten, with meter_gate exactly: what other
  // processes of the machine take meanwhile does not count.
  Time longest_hold_ns() const noexcept { return gate_.longest_hold_ns(); }
  Gate::Histogram holds() const noexcept { return gate_.holds(); }
  void forget_holds() noexcept { gate_.forget_holds(); }

 private:
  struct Waker final : Reactor::Handler {
    UniqueFd fd;
    void on_ready(std::uint32_t events) override;
  };
  // Wakes one who sleeps on the reactor, and nobody else.
  struct Bell {
    UniqueFd fd;
    std::atomic<bool> rung{false};
    void ring();
    void answer();
  };
  // The gate for one call of a caller's; leaving it, what the call led to is sent and noticed.
  struct CallerTurn {
    explicit CallerTurn(Runtime& owner);
    ~CallerTurn();
    Runtime& runtime;
    const Time now;
  };

  explicit Runtime(RuntimeOptions options);
  Status start();
  Status check_has_secret() const;
  // Under the gate: takes what has ended, until that is so. Rails that stop at once have ended it already.
  bool take_ended(const std::function<bool()>& is_so);
  // Outside the gate, while the agent goes on for everybody else: until that is so, which is asked under it.
  bool await(const std::function<bool()>& is_so, Time timeout_ns);
  // `timeout_ns`: when those who do not answer are given up.
  void await_unmapped(RegionId region, const std::string& what, Time timeout_ns);

  // runtime_drivers.cpp
  bool is_alive() const noexcept;  // check_alive() without words
  void run();  // the progress thread
  // Under the gate; true when there is more to do at once. `look`: at the sockets, whatever came else.
  bool progress(bool look = true);
  bool round(bool look);
  bool judge(Time now);  // what has a deadline; true when something came first
  void settle(Time now);  // pump and flush
  void flush_sockets();  // and sweep up what they ended
  Time next_deadline() const;
  bool busy() const;
  void notify_waiting();  // followers, and the thread where it is parked
  // Under the gate, after anything that may have left work: wakes whoever drives, if it would sleep
  // too long.
  void kick();
  void wake_reactor();  // whoever sleeps on it
  // For certain, unlike wake_reactor: what that makes readable another thread may read first.
  void rouse_thread();
  void rouse_driver();
  void unpark();  // ends a linger; the thread looks for what there is
  void rouse();  // whoever drives or is to, from any thread and without the gate

  // runtime_triggers.cpp
  // On the reactor, until then or until something comes, a bell of the sleeper's rings or a word of a trigger
  // has news.
  void sleep(Time until, int bell);
  bool unannounced() const noexcept;  // somebody may store who rings nobody: words have to be looked at
  Result<std::shared_ptr<gpu::StreamWrites>> streams() const;
  Result<After> once(const std::function<Status(gpu::StreamWrites&, Trigger::Word*)>& write);

  // runtime.cpp
  void send(SessionKey session, wire::Bytes frame) override { connections_.send(session, std::move(frame)); }
  void close_session(SessionKey session) override;
  std::uint32_t session_open(SessionKey session) override { return connections_.dial_rails(session); }
  void dial_rail(SessionKey session, const wire::RailName& rail) override {
    connections_.dial_rail(session, rail);
  }
  PostResult post(RailId rail, const Work& work) override { return rails_.post(rail, work); }
  WorkKind choose(RailId rail, const Move& move, std::uint32_t piece) override {
    return rails_.choose(rail, move, piece);
  }
  void cancel(RailId rail, std::span<const WorkId> works) override { rails_.cancel(rail, works); }
  Status attach(RailId rail, const RemoteRegion& region) override { return rails_.attach(rail, region); }
  void detach(RailId rail, RegionId region) override { rails_.detach(rail, region); }
  void drop_rail(RailId rail) override { rails_.drop(rail); }
  void region_fenced(RegionId region) override { rails_.deregister_memory(region); }
  std::uint64_t fence_generation(std::uint32_t slot) override { return fences_->generation(slot); }
  void bump_fence(std::uint32_t slot) override { fences_->bump(slot); }
  void emit(Event event) override;
  void random(std::span<std::byte> bytes) override;

  bool rest();  // before somebody sleeps: peers and devices are asked to announce what comes
  void log(std::string text);

  const RuntimeOptions options_;
  const pid_t owner_;
  wire::Identity self_;
  Gate gate_;
  EpollReactor reactor_;
  CompletionRing ring_;
  RecordRing records_;
  std::unique_ptr<FenceTable> fences_;
  std::shared_ptr<CopyWorkers> workers_;  // of rails and engine; null with copy_threads 1
  RailTable rails_;
  Connections connections_{options_, reactor_, rails_, [this](std::string text) { log(std::move(text)); }};
  Listeners listeners_{reactor_, connections_};
  KeptMemory kept_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<WatchedSecrets> secrets_;  // null where they came from no file
  std::unique_ptr<WatchedCredentials> credentials_;  // null where there are none
  Waker waker_;
  Bell thread_bell_, driver_bell_;
  std::atomic<bool> serves_{false};  // all sessions' frames may come through memory
  std::atomic<Time> thread_serves_until_{0};
  int rounds_without_sockets_ = 0;
  Time looked_at_ = 0;  // at the sockets, for a caller who polls
  bool sockets_quiet_ = false;  // nothing was there at the last look
  bool left_ = false;  // busy() as the last round left it

  std::mutex watching_;  // of watch_records()
  mutable std::mutex streams_mutex_;
  std::shared_ptr<gpu::StreamWrites> stream_writes_;  // under it; with a GPU, as long as the agent is open
  TriggerWatch triggers_{[this] { rouse(); }};
  CommandWatch commands_;
  std::atomic<std::uint64_t> next_command_ring_{1};

  std::thread thread_;
  std::atomic<bool> stop_{false}, closed_{false}, ended_{false};
  std::recursive_mutex closing_;  // held by close(); an owner that it lets go may close the agent once more
  // Until when they sleep on the reactor: the thread, and a caller who drives. 0: awake.
  std::atomic<Time> thread_until_{0}, driver_until_{0};
  std::atomic<Time> caller_until_{0};  // who drove progress last may be back by then
  std::atomic<bool> loop_lingers_{false};  // and is an event loop
  std::atomic<bool> driven_{false};  // a caller is driving now
  std::atomic<bool> parked_{false};  // the thread waits for that to end
  std::mutex wait_mutex_;
  std::condition_variable wait_changed_;
  std::atomic<int> num_followers_{0};
};

}  // namespace kvxfer
