// Fence tables between processes of one host. A peer's table, mapped here, tells whether the right still held
// under which bytes were read. Our own table goes to peers.
#pragma once

#include <atomic>
#include <cstdint>

#include "kvxfer/transport.h"
#include "transports/common/message_channel.h"
#include "transports/common/peer_mapping.h"

namespace kvxfer {

// Whether the source's word says that the right still holds. To be asked after all bytes of a fetch were read.
bool holds(const std::atomic<std::uint64_t>& word, const Fence& fence) noexcept;

class PeerFences {
 public:
  PeerFences() = default;  // maps nothing
  // Maps the descriptor that came with a hello. The hello announces its length, which must be that of a fence
  // table.
  static Result<PeerFences> map(const UniqueFd& fd, std::uint64_t announced_nbytes);

  // False, too, where nothing is mapped for the slot, which is a number from the peer.
  bool say_it_holds(const Fence& fence) const noexcept {
    return mapping_.data() != nullptr && fence.slot < FenceTable::kNumSlots &&
           holds(reinterpret_cast<const std::atomic<std::uint64_t>*>(mapping_.data())[fence.slot], fence);
  }

 private:
  PeerMapping mapping_;
};

// Our own table, as peers receive it.
class OwnFences {
 public:
  explicit OwnFences(const FenceTable& table) : table_(table) {}
  // Prepares fd(). Not ok: its memory or a descriptor could not be had.
  Status share();
  const SharedFd& fd() const noexcept { return fd_; }

 private:
  const FenceTable& table_;
  SharedFd fd_;
};

}  // namespace kvxfer
