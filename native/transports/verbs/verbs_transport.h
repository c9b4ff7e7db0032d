// A rail over one port of an RDMA NIC. The destination READs the source's pages, without the source's
// processor. Where both ends are set so, the source may instead WRITE the pages that the destination awaits.
//
// The rail's socket carries the addresses of queue pairs (message.h), never pages; when the socket ends, so
// does the rail. Its parts:
//   Device        the port, opened
//   Registration  memory of a region, as the device and peers know it
//   QueuePairs    connections to one peer, and the works with requests under way on each (Flight)
//   Connector     threads that connect them, which may take seconds
//   PairClass     a range of transfer priorities with queue pairs of its own
//   RequestCursor the runs of a piece, as READs or WRITEs in a Chain under one doorbell
//   WrittenPieces what comes by WRITE (transports/common/written_pieces.h)
//   GpuMemory     how the device reaches a GPU's memory
//   FenceWords    the source's fence, READ after all of a transfer has landed
//
// A rail is up once each of its queue pairs has READ a packet's worth from the peer. So a path that carries
// nothing, or no packets of that size, harms no transfer. When the engine dials anew, the rail tries another
// of the port's addresses.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvxfer/transport.h"
#include "transports/common/alarm.h"
#include "transports/common/connector.h"
#include "transports/common/fence_words.h"
#include "transports/common/written_pieces.h"
#include "transports/verbs/gpu_memory.h"
#include "transports/verbs/message.h"
#include "transports/verbs/queue_pair.h"

namespace kvxfer {

namespace verbs {

using FenceWords = kvxfer::FenceWords<Registration>;

// Queue pairs that a thread connects, and the budget charged for them until they are gone.
struct SetUp final : Connector::SetUp {
  SetUp(PeerId its_peer, std::string its_name, std::unique_ptr<QueuePairs> its_pairs, const Message& hello,
        Charge its_charge)
      : Connector::SetUp(its_peer, std::move(its_name)),
        theirs(hello),
        charge(std::move(its_charge)),
        pairs(std::move(its_pairs)) {}
  Status run() override { return pairs->connect(theirs, is_abandoned); }
  void on_abandoned() noexcept override { pairs.reset(); }

  const Message theirs;
  Charge charge;
  std::unique_ptr<QueuePairs> pairs;  // null: it was abandoned
};

// A fetch whose bytes are in; its fence word is still to be read.
struct Fetched {
  Work work;
  std::uint32_t scratch;
};

struct Peer : RailPeer<Message> {
  Peer(PeerId number, UniqueFd socket, const ConnectInfo& info, std::unique_ptr<QueuePairs> its)
      : RailPeer(number, std::move(socket), info), pairs(std::move(its)), row(pairs->address().row) {}

  Charge queues;  // budget charge for the pairs, to the session
  // Null: the connector has them, or the rail is down and nothing is under way.
  std::unique_ptr<QueuePairs> pairs;
  const std::optional<GidRow> row;  // of our address
  std::unordered_map<RegionId, std::shared_ptr<const KeyedSpans>> regions;
  KeyedSpan fences{};  // its words, those of the session
  std::string path;  // devices and addresses of both ends, for people
  std::array<std::size_t, PriorityClasses::kMost> turns{};  // among the pairs of each class
  bool has_hello = false;
  bool is_connected = false;  // our queue pairs are connected to the peer's
  bool is_ready = false;  // the peer has said that its queue pairs are connected to ours
  bool writes = false;  // pieces may come by WRITE, in both directions
  std::vector<Fetched> fetched;  // in the order in which they came
  AwaitedPieces awaited;
  AskedPieces asked;
  std::size_t num_unproved = 0;  // queue pairs whose first READ has not ended
  bool is_flying = false;  // requests are under way
  bool gone = false;  // disconnected: erased once nothing is under way
  // When what was stopped should have ended. While it is set, the peer is in watched_.
  std::optional<Alarm::Clock::time_point> due;
};

}  // namespace verbs

class VerbsTransport final : public WrittenPieces<verbs::Peer> {
 public:
  static Result<std::unique_ptr<VerbsTransport>> create(Reactor& reactor, const FenceTable& fences,
                                                        std::shared_ptr<verbs::Device> device,
                                                        std::shared_ptr<const verbs::GpuMemory> gpu = nullptr,
                                                        MemoryPlaces far = {});
  ~VerbsTransport() override;

  Capabilities capabilities() const noexcept override;
  Result<Pinned> prepare(const LocalRegion& region) override;
  Result<RegionKeys> register_memory(const LocalRegion& region, const Pinned& pinned) override;
  void deregister_memory(RegionId region) noexcept override;
  Result<PeerId> connect(UniqueFd socket, const ConnectInfo& info) override;
  std::string path_to(PeerId peer) const override;
  WorkKind choose(PeerId peer, const Move& move, std::uint32_t piece) const noexcept override;
  void cancel(std::span<const WorkId> works) noexcept override;
  Status attach(PeerId peer, const RemoteRegion& region) override;
  void detach(PeerId peer, RegionId region) noexcept override;
  std::size_t poll(std::span<Completion> completions) noexcept override;
  bool busy() const noexcept override;
  bool wants_poll() const noexcept override;
  bool arm() noexcept override;

 private:
  using Peer = verbs::Peer;
  using Clock = Alarm::Clock;
  // Something of the device or the connector can be read.
  struct Bell final : Reactor::Handler {
    Bell(VerbsTransport& owner, void (VerbsTransport::*its)()) : rail(owner), ring(its) {}
    void on_ready(std::uint32_t) override { (rail.*ring)(); }
    VerbsTransport& rail;
    void (VerbsTransport::* const ring)();
  };

  VerbsTransport(Reactor& reactor, std::shared_ptr<verbs::Device> device,
                 std::shared_ptr<const verbs::GpuMemory> gpu, MemoryPlaces far, std::unique_ptr<Alarm> alarm,
                 std::unique_ptr<Connector> connector, std::unique_ptr<verbs::FenceWords> fences);
  Status listen();
  // The agent's own fence table, as peers read it.
  Result<verbs::KeyedSpan> shared_fences();

  void greet(Peer& peer) override;
  Status on_hello(Peer& peer, const verbs::Message& message, UniqueFd fd) override;
  Status on_message(Peer& peer, const verbs::Message& message, UniqueFd fd) override;
  bool is_up_with_hello() const noexcept override { return false; }
  void on_down(Peer& peer) override;
  void remember_address(const Peer& peer) noexcept;
  void forget(Peer& peer) noexcept override;
  bool can_run(const Peer& peer, const Work& work) const noexcept override;
  bool can_go_on(const Peer& peer) const noexcept override;
  // Each awaited piece takes one message, and one more if it is given up; so each further class adds as many.
  std::size_t num_announced() const noexcept override;
  void stop_shared(WorkId work) noexcept override;
  void stop_shared(PeerId peer, Code code, std::string_view why) noexcept override;

  // ---- requests go out
  void on_connected();  // some of the connector's set-ups have ended
  Status on_connected(Peer& peer, const verbs::SetUp& ended);
  Status prove(Peer& peer);
  void post_some() noexcept;
  // Among the works of this class: the first that can run; queue.size() where none can.
  std::size_t first_that_runs(const Peer& peer, std::size_t of_class) const;
  verbs::QueuePair* next_pair(Peer& peer, std::size_t of_class) const;  // a pair with something to post
  void post_chain(Peer& peer, verbs::QueuePair& pair, std::size_t of_class, std::uint32_t& num_runs);
  std::size_t first_fetched(const Peer& peer, std::size_t of_class) const;  // fetched.size(): there is none
  void begin_confirming(Peer& peer, verbs::QueuePair& pair, std::size_t at);
  void end_fetched(Peer& peer, Code code, std::string_view why) noexcept;
  // False: the work has ended at once.
  bool begin(Peer& peer, verbs::QueuePair& pair, std::size_t at);
  Status prepare_flight(Peer& peer, verbs::Flight& flight);
  Result<const verbs::Registration*> registered(const Move& move, bool to_be_written) const;
  void await_some(Peer& peer);  // pieces that are to be written
  void await(Peer& peer, std::size_t at);
  verbs::RequestCursor::Stop add_requests(Peer& peer, verbs::Flight& flight, std::uint32_t& num_runs);

  // ---- and come back
  bool reap() noexcept;  // whether something came
  bool reap(Peer& peer);
  void land(Peer& peer) noexcept;  // works whose requests have ended
  void land(Peer& peer, verbs::Flight& flight) noexcept;
  void land_written(Peer& peer, std::uint32_t number) noexcept;
  // Makes the GPU see a piece that has landed. Returns the piece's result; `why` says what failed.
  Code flush(std::string& why) noexcept;
  void clean_up(Peer& peer) noexcept;  // may erase the peer
  void end_requests(Peer& peer) noexcept;  // may erase the peer
  void destroy_pairs(Peer& peer) noexcept;

  // ---- in time
  void watch(Peer& peer, Clock::time_point due) noexcept;
  void unwatch(Peer& peer) noexcept;
  void look_at_clock() noexcept;
  void look_at_clock(Peer& peer, Clock::time_point now) noexcept;

  // ---- what the device announces
  void on_completion_event();
  void on_device_event();
  void on_device_event(const verbs::abi::AsyncEvent& event);
  void fail_all(const std::string& why);

  Reactor& reactor_;
  const std::shared_ptr<verbs::Device> device_;
  const std::shared_ptr<const verbs::GpuMemory> gpu_;  // null: rails reach host memory alone
  const MemoryPlaces far_;
  std::unordered_map<RegionId, std::shared_ptr<const verbs::Registration>> registered_;
  std::unique_ptr<verbs::FenceWords> fences_;
  std::unique_ptr<Alarm> alarm_;
  std::unique_ptr<Connector> connector_;
  verbs::Chain chain_;
  Bell completions_{*this, &VerbsTransport::on_completion_event};
  Bell events_{*this, &VerbsTransport::on_device_event};
  Bell set_ups_{*this, &VerbsTransport::on_connected};
  // By the peer's name: addresses without an answer.
  std::map<std::string, std::vector<verbs::GidRow>> tried_;
  std::vector<Peer*> flying_;  // peers with requests under way
  std::vector<Peer*> watched_;  // peers with a time by which something should have ended
  bool flushed_ = false;  // the GPU sees all that was taken from completion queues
  bool armed_ = false;  // the next completion of a peer in flying_ is announced
  bool is_dead_ = false;  // the device is lost, and no event brings it back
  std::string lost_why_;  // why the device or its port is lost; empty while it works
};

}  // namespace kvxfer
