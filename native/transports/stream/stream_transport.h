// Pages over connected stream sockets. The two-sided rail between hosts (tcp); on one host it carries memory
// that shm cannot reach (unix).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/copy/copy_workers.h"
#include "kvxfer/transport.h"
#include "transports/common/completion_queue.h"
#include "transports/stream/stream_round.h"

namespace kvxfer {

class StreamTransport final : public Transport, public Task {
 public:
  struct Options {
    std::string_view name = "tcp";  // or "unix"; of static storage
    // Size of the sockets' kernel buffers; 0: the size that was measured to be best.
    std::uint32_t socket_buffer_nbytes = 0;
    Options() = default;
  };

  // `round`: null if the agent has no threads that copy.
  StreamTransport(Reactor& reactor, const Options& options, std::shared_ptr<StreamRound> round = nullptr);
  ~StreamTransport() override;
  StreamTransport(const StreamTransport&) = delete;
  StreamTransport& operator=(const StreamTransport&) = delete;

  Capabilities capabilities() const noexcept override;
  Result<RegionKeys> register_memory(const LocalRegion& region, const Pinned&) override;
  void deregister_memory(RegionId region) noexcept override;
  Result<PeerId> connect(UniqueFd socket, const ConnectInfo& info) override;
  void disconnect(PeerId peer) noexcept override;
  Status attach(PeerId peer, const RemoteRegion& region) override;
  void detach(PeerId peer, RegionId region) noexcept override;
  Code post(PeerId peer, const Work& work) noexcept override { return post_packed(peer, work, nullptr); }
  // Posts a work whose piece lies at `packed`, or is to land there, in the order in which it crosses the
  // stream (core/copy/pack.h). Its pages are not touched. The caller keeps the bytes until the work has
  // completed.
  Code post_packed(PeerId peer, const Work& work, std::byte* packed) noexcept;
  bool is_up(PeerId peer) const noexcept;
  void cancel(std::span<const WorkId> works) noexcept override;
  std::size_t poll(std::span<Completion> completions) noexcept override;
  bool busy() const noexcept override;

  // ---- for StreamRound
  // True if the rail has at least so many bytes to move, and no round has moved it since its last poll.
  bool is_worth_a_thread(std::uint64_t least_nbytes) const noexcept;
  // Moves at most a turn's bytes in each direction. Any thread may call it, beside other rails. Afterwards
  // the driving thread calls end_turn_in_round(), and the next poll moves nothing more.
  void run() noexcept override;
  void end_turn_in_round() noexcept;

 private:
  class Peer;
  // Where a work is, until its completion is told.
  struct Place {
    PeerId peer;
    WorkKind kind;
    std::uint64_t number;  // kSend: in its stream
    TransferId transfer;   // kReceive
    std::uint32_t piece;
  };

  using Peers = std::vector<std::unique_ptr<Peer>>;
  Peers::const_iterator place_of(PeerId id) const noexcept;  // the end of peers_: nowhere
  Peer* find(PeerId id) const noexcept;
  void end_turn() noexcept;
  void serve(Peer& peer, std::uint64_t& read_left, std::uint64_t& write_left);
  void watch(Peer& peer);
  bool accept(Peer& peer, const Work& work, std::byte* packed);
  void take_down(Peer& peer, std::string_view reason) noexcept;
  void make_room(std::size_t num_works, std::size_t num_peers);

  Reactor& reactor_;
  const Options options_;
  const std::shared_ptr<StreamRound> round_;
  Peers peers_;  // ids ascend
  PeerId next_id_ = 1;
  // Peers with something to read or to write, in the order of their turns. Never more than peers_, and there
  // is room for all of those.
  std::vector<Peer*> active_;
  std::size_t num_served_ = 0;  // of those, in the current turn
  bool had_turn_ = false;  // a round has moved this rail since its last poll
  CompletionQueue completions_;
  std::unordered_map<WorkId, Place> places_;
  std::vector<std::byte> scratch_;  // empty until a peer sends bytes that no work waits for
};

}  // namespace kvxfer
