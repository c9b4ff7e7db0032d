// Lets a transport of streams carry pages of a GPU. To send, it gathers pages into pinned memory and sends
// from there; to receive, it receives into pinned memory and scatters. Kernels do the copies, or copy engines
// where the streams are calibrated so; comments about kernels here hold for both. A decorator: works of host
// memory pass through. In a transfer only an end on a GPU needs it.
//
// A piece is in one step at a time, and several pieces are under way: while one piece is on the wire, the
// next one is gathered and the previous one scattered.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/system/nvtx.h"
#include "kvxfer/transport.h"
#include "transports/common/completion_queue.h"
#include "transports/stream/staging.h"
#include "transports/stream/stream_transport.h"

namespace kvxfer {

class StagedTransport final : public Transport {
 public:
  StagedTransport(std::unique_ptr<StreamTransport> inner, std::shared_ptr<Staging> staging);
  ~StagedTransport() override;  // waits for the kernels of its works

  Capabilities capabilities() const noexcept override;
  // For a GPU's first region: kExhausted or kSystem if staging is impossible.
  Result<RegionKeys> register_memory(const LocalRegion& region, const Pinned& pinned) override;
  void deregister_memory(RegionId region) noexcept override { inner_->deregister_memory(region); }
  Result<PeerId> connect(UniqueFd socket, const ConnectInfo& info) override;
  void disconnect(PeerId peer) noexcept override;
  Status attach(PeerId peer, const RemoteRegion& region) override { return inner_->attach(peer, region); }
  void detach(PeerId peer, RegionId region) noexcept override { inner_->detach(peer, region); }
  Code post(PeerId peer, const Work& work) noexcept override;
  // A launched kernel cannot be stopped; its work ends when the kernel does.
  void cancel(std::span<const WorkId> works) noexcept override;
  std::size_t poll(std::span<Completion> completions) noexcept override;
  bool busy() const noexcept override;

 private:
  enum class Stage : std::uint8_t {
    kQueued,  // waits for a slot, or for room in the stream, to be gathered
    kGathering,  // a kernel reads its pages
    kGathered,  // waits for room in the inner transport
    kSending,  // the inner transport has it
    kReceiving,  // the inner transport has it
    kReceived,  // waits for room in the stream
    kScattering,  // a kernel writes its pages
    kStopped,  // cancelled while it waited here
  };
  struct Staged {
    PeerId peer = 0;
    Work work;
    std::uint64_t nbytes = 0;  // of the piece
    SlotHolder holder;  // the lane's share that it counts against
    Stage stage = Stage::kQueued;
    Slot slot;  // no bytes: no slot yet
    gpu::CopyStream::Ticket ticket = 0;
    nvtx::Range range;  // of the stage: gather, wire or scatter
    bool cancelled = false;  // no further step begins
    bool gone = false;  // its peer was disconnected
    bool lost = false;  // lost with the device
  };
  using Entry = std::unordered_map<WorkId, Staged>::iterator;
  enum Way : std::size_t { kOut = 0, kIn = 1 };

  Staging::Lane& lane(Way way) const noexcept {
    return way == kOut ? staging_->sends() : staging_->receives();
  }
  static Way way_of(const Staged& staged) noexcept {
    return staged.work.kind == WorkKind::kSend ? kOut : kIn;
  }
  bool take_slot(Staged& staged);
  void give_back(Staged& staged) noexcept;

  Code stage(PeerId peer, const Work& work);
  std::size_t next_to_gather() const noexcept;
  Status submit(Staged& staged);
  Status submit_packed(Staged& staged);
  void gather();
  void send();
  void scatter();
  void land();
  void land(Way way, std::vector<WorkId>& flying);
  void check_device();
  void note_failure();
  bool pass(Completion& completion);
  void end_unsent(Entry entry);
  void complete(Entry entry, Code code, std::string_view detail = {}) noexcept;
  void fail(Entry entry, Code code, std::string_view why) noexcept;
  void make_room();
  std::byte* place(const Staged& staged) const noexcept {
    return lane(way_of(staged)).base + staged.slot.offset;
  }
  std::string words(std::string_view what) const;

  const std::unique_ptr<StreamTransport> inner_;
  const std::shared_ptr<Staging> staging_;
  std::unordered_map<WorkId, Staged> staged_;
  // Each list is in order, and has room for all works, so staged works move on even without free memory.
  std::vector<WorkId> to_gather_, gathering_, to_send_, to_scatter_, scattering_;
  std::map<PeerId, SlotHolder> holders_;  // of connected peers
  CompletionQueue ready_;  // completions for poll's caller; of works alone
  std::uint32_t idle_polls_ = 0;  // polls in a row in which no kernel ended
  bool lost_ = false;  // the device; all works that needed it have ended
};

}  // namespace kvxfer
