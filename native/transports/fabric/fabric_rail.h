// A rail through a library that moves memory between processes (fabric.h). The destination reads the source's
// pages, with one read for each run of bytes. Where reads would cost the source's processor time, the source
// sends the pages instead, with one message for each piece. Where both ends are set so, the source writes
// them.
//
// The rail's socket carries the addresses of endpoints (message.h), never pages; when the socket ends, so
// does the rail. Each peer has an endpoint of its own, so ending one fences that peer alone. Its parts:
//   Fabric, Endpoint  the library: transports/ucx, transports/libfabric
//   Registration      a region's memory, as the library and peers know it
//   Connector         threads that open, connect and close endpoints, which takes milliseconds each time
//   Leaving           memory that peers may still ask this process to read
//   FenceWords        the source's fence, read after all of a transfer has landed
//
// A rail is up once it has read the peer's fence words, or has received a message from the peer.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvxfer/transport.h"
#include "transports/common/alarm.h"
#include "transports/common/connector.h"
#include "transports/common/fence_words.h"
#include "transports/common/written_pieces.h"
#include "transports/fabric/message.h"
#include "transports/fabric/registration.h"

namespace kvxfer {

class FabricRail;

namespace fabric {

struct Peer final : RailPeer<Message>, Receiver {
  // Something has come at the peer's endpoint.
  struct Bell final : Reactor::Handler {
    Bell(FabricRail& owner, Peer& whose) : rail(owner), peer(whose) {}
    void on_ready(std::uint32_t) override;
    FabricRail& rail;
    Peer& peer;
  };

  Peer(PeerId number, UniqueFd socket, const ConnectInfo& info, FabricRail& rail)
      : RailPeer(number, std::move(socket), info), bell(rail, *this) {}

  Flight* begin_receive(const PieceHeader& header) noexcept override;

  Charge charge;  // of the endpoint, to its session
  std::unique_ptr<Endpoint> endpoint;  // null: a thread has it, or it is closed
  bool is_being_set_up = false;  // a thread has it
  Bell bell;
  bool is_watched = false;  // the reactor watches the endpoint's descriptor
  bool is_awake = false;  // is in awake_
  std::vector<std::unique_ptr<Flight>> flights;  // go with the endpoint; their memory is used again
  Flight* current = nullptr;  // has more to post
  std::vector<Flight*> fetched;  // their bytes are in, and their fence words still to be read
  bool lacks_room = false;  // the endpoint said "again", and nothing has come since
  Alarm::Clock::time_point quiet_since{};  // when something last came or began, as far as the clock was read
  std::optional<Alarm::Clock::time_point> look_at;  // polled again then, since no descriptor reports it
  Way preferred = Way::kRead, theirs = Way::kRead;  // by this end, and by the peer
  Way way = Way::kRead;  // agreed, once both ends are connected
  bool sends() const noexcept { return way == Way::kSend; }
  bool writes() const noexcept { return way == Way::kWrite; }

  // ---- pieces that are written
  AwaitedPieces awaited;
  AskedPieces asked;
  struct Written {
    std::uint32_t number;
    bool is_whole;
  };
  std::vector<Written> written;  // that the peer is to be told; room for all

  std::unordered_map<RegionId, std::shared_ptr<const RemoteMemory>> regions;
  std::shared_ptr<const RemoteMemory> fences;
  std::set<RegionId> gone_regions;  // it has said so; its control frames may come later
  std::vector<std::pair<RegionId, std::weak_ptr<const RemoteMemory>>> leaving;  // of those, still read

  std::vector<std::byte> heard;  // of its introduction
  std::size_t whole_nbytes = 0;
  std::optional<Introduction> introduction;
  std::string path;
  bool is_introduced = false;  // it knows our endpoint's address
  bool is_connected = false;  // our endpoint is connected to the peer's
  bool is_ready = false;  // the peer has said that its endpoint is connected to ours
  bool proof_has_come = false;  // came before we awaited it
  bool gone = false;  // disconnected: erased once its endpoint is closed
  std::optional<Alarm::Clock::time_point> due;  // when what was cancelled should have ended
};

}  // namespace fabric

class FabricRail final : public WrittenPieces<fabric::Peer>, private MemoryLender {
 public:
  static Result<std::unique_ptr<FabricRail>> create(Reactor& reactor, const FenceTable& fences,
                                                    std::shared_ptr<fabric::Fabric> fabric);
  ~FabricRail() override;

  Capabilities capabilities() const noexcept override;
  Result<Pinned> prepare(const LocalRegion& region) override;
  Result<RegionKeys> register_memory(const LocalRegion& region, const Pinned& pinned) override;
  void deregister_memory(RegionId region) noexcept override;
  MemoryLender* lender() noexcept override { return fabric_->serves_peers() ? this : nullptr; }
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
  using Peer = fabric::Peer;
  using Endpoint = fabric::Endpoint;
  using Flight = fabric::Flight;
  using Registration = fabric::Registration;
  using Clock = Alarm::Clock;
  using FenceWords = kvxfer::FenceWords<Registration>;
  friend struct fabric::Peer;
  friend struct fabric::Peer::Bell;
  struct Budget;
  class Batch;
  struct Job;
  struct SetUps final : Reactor::Handler {
    explicit SetUps(FabricRail& owner) : rail(owner) {}
    void on_ready(std::uint32_t) override { rail.on_set_up(); }
    FabricRail& rail;
  };

  // A cancelled work ends with its last read, long before this. If the peer or the network is dead, only
  // closing the endpoint ends it.
  static constexpr std::chrono::milliseconds kStopBound{200};
  // The pause between two polls of an endpoint without a descriptor: a quarter of the time since something
  // came, within these bounds.
  static constexpr std::chrono::microseconds kShortestPause{20}, kLongestPause{5000};
  static constexpr std::chrono::microseconds kLongestPauseAtWork{1000};  // with reads under way
  static constexpr std::chrono::microseconds kNoPause{50};  // no pause for this long with those
  // A piece that is sent or written ends with the help of the other agent, which may have to take in earlier
  // pieces first: 64 of 512 KiB, which 100 Mb/s carry in 3 s.
  static constexpr std::chrono::milliseconds kSendStopBound{3000};
  // Works that are begun for one peer at a time. The requests under way have a bound of their own.
  static constexpr std::size_t kMostFlights = 256;
  // Pieces that a peer may await at a time, if they are written.
  static constexpr std::size_t kMostAwaited = 64;

  FabricRail(Reactor& reactor, std::shared_ptr<fabric::Fabric> fabric, std::unique_ptr<Alarm> alarm,
             std::unique_ptr<Connector> connector, std::unique_ptr<FenceWords> fences);

  void greet(Peer& peer) override;
  Status on_hello(Peer& peer, const fabric::Message& message, UniqueFd fd) override;
  Status on_message(Peer& peer, const fabric::Message& message, UniqueFd fd) override;
  bool is_up_with_hello() const noexcept override { return false; }
  void on_down(Peer& peer) override { end_requests(peer); }
  void forget(Peer& peer) noexcept override;
  bool can_run(const Peer& peer, const Work& work) const noexcept override;
  bool takes_works(const Peer& peer) const noexcept override;
  bool can_go_on(const Peer& peer) const noexcept override;
  void stop_shared(WorkId work) noexcept override;
  void stop_shared(PeerId peer, Code code, std::string_view why) noexcept override;
  static std::chrono::milliseconds stop_bound(const Flight& flight) noexcept;
  // A peer gets a message for each region that goes.
  std::size_t num_announced() const noexcept override { return 64 + WorkQueue::kMost + leaving_.size(); }

  // ---- an endpoint's life: opened, connected and closed on a thread each time
  Status begin_set_up(Peer& peer, std::unique_ptr<Job>& job);
  void on_set_up();
  Status on_set_up(Peer& peer, Job& ended);
  Status hear(Peer& peer, const fabric::Message& part);
  Status meet(Peer& peer);  // once both ends' addresses are known
  Status prove(Peer& peer);
  void take_endpoint(Peer& peer, std::unique_ptr<Endpoint> endpoint);
  void unwatch_endpoint(Peer& peer) noexcept;
  void end_requests(Peer& peer) noexcept;
  void closed(Peer& peer) noexcept;  // nothing of it is under way any more; may erase the peer
  void wake(Peer& peer) noexcept;

  // ---- reads and sends
  Flight& spare_flight(Peer& peer);
  bool has_room(const Peer& peer) const noexcept;  // for another read, and for the works that need one
  void post_some() noexcept;
  void post_some(Peer& peer, Budget& budget);
  bool begin(Peer& peer, std::size_t at);  // false: the work has ended at once
  Status prepare_flight(Peer& peer, Flight& flight);
  Status prepare_piece(Peer& peer, Flight& flight);
  void progress() noexcept;
  bool progress(Peer& peer) noexcept;
  void land(Peer& peer) noexcept;
  void land(Peer& peer, Flight& flight) noexcept;
  void confirm(Peer& peer, Flight& flight) noexcept;  // reads its fence word
  Result<const Registration*> registered(const Move& move) const;
  Flight* begin_receive(Peer& peer, const fabric::PieceHeader& header) noexcept;
  void tell_dropped(Peer& peer, const Work& work, bool cannot) noexcept;
  void dropped(Peer& peer, const fabric::Message& message);

  // ---- writes
  void await_some(Peer& peer);
  void await(Peer& peer, std::size_t at);
  Status on_piece(Peer& peer, const fabric::Message& message);
  bool stop_awaited(Peer& peer, WorkId work) noexcept;  // false: the peer awaits no such piece
  void tell_what_was_written(Peer& peer) noexcept;

  // ---- regions that go
  bool held_by_peers(RegionId region) const noexcept override;
  std::vector<std::string> give_up_holders(RegionId region) override;
  void forget_holder(PeerId peer, RegionId region) noexcept;
  void tell_what_is_let_go(Peer& peer) noexcept;

  // ---- in time
  void watch(Peer& peer, Clock::time_point due) noexcept;
  bool arm(Peer& peer) noexcept;  // false: it is to be polled at once
  void ring_by(Clock::time_point at) noexcept;
  void look_at_clock() noexcept;

  Reactor& reactor_;
  const std::shared_ptr<fabric::Fabric> fabric_;
  std::unordered_map<RegionId, std::shared_ptr<const Registration>> registered_;
  // Deregistered memory, kept until each of these peers has said that it no longer reads it, or can no longer
  // read it.
  struct Leaving {
    std::shared_ptr<const Registration> registration;
    std::set<PeerId> held_by;
  };
  std::map<RegionId, Leaving> leaving_;
  std::unique_ptr<FenceWords> fences_;
  std::unique_ptr<Alarm> alarm_;
  std::optional<Clock::time_point> rings_at_;
  std::unique_ptr<Connector> connector_;
  SetUps set_ups_{*this};
  std::vector<Peer*> awake_;
};

}  // namespace kvxfer
