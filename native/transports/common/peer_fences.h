// Fence tables between processes of one host: a peer's, mapped here, says whether the right that bytes were read under
// still stood; our own goes to peers.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "kvxfer/transport.h"
#include "transports/common/message_channel.h"
#include "transports/common/peer_mapping.h"

namespace kvxfer {

// Compares the source's word once all bytes of the work's transfer are read: done, or kLeaseEnded.
// `word` is that of the work's slot, null where the peer has none.
Completion check_fence(const std::atomic<std::uint64_t>* word, const Work& work, std::string_view rail,
                       const std::string& peer_name);

class PeerFences {
 public:
  PeerFences() = default;  // of none
  // Of a descriptor that came with a hello, which says how long its memory is: the slots of the session.
  static Result<PeerFences> map(const UniqueFd& fd, std::uint64_t announced_nbytes,
                                const FenceSlotRange& slots);

  // Null: nothing is mapped for that slot, which is a peer's number.
  const std::atomic<std::uint64_t>* word(std::uint32_t slot) const noexcept {
    if (!slots_.contains(slot)) return nullptr;
    return reinterpret_cast<const std::atomic<std::uint64_t>*>(mapping_.data()) + (slot - slots_.first);
  }

 private:
  PeerMapping mapping_;
  FenceSlotRange slots_;
};

// Our own table, as it goes to peers.
class OwnFences {
 public:
  explicit OwnFences(const FenceTable& table) : table_(table) {}
  // Not ok: its memory or a descriptor is not to be had. Afterwards fd() is there.
  Status share(const FenceSlotRange& slots);
  const SharedFd& fd(const FenceSlotRange& slots) const { return fds_.at(slots.first); }

 private:
  const FenceTable& table_;
  std::map<std::uint32_t, SharedFd> fds_;  // by the first slot
};

}  // namespace kvxfer
