// Fence tables between processes of one host. A peer's table, mapped here, tells whether the right still held
// under which bytes were read. Our own table goes to peers.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "kvxfer/transport.h"
#include "transports/common/message_channel.h"
#include "transports/common/peer_mapping.h"

namespace kvxfer {

// Compares the source's fence word, after all bytes of the work's transfer were read. Ends with done, or with
// kLeaseEnded. `word` is the word of the work's slot; null: the peer has none.
Completion check_fence(const std::atomic<std::uint64_t>* word, const Work& work, std::string_view rail,
                       const std::string& peer_name);

class PeerFences {
 public:
  PeerFences() = default;  // maps nothing
  // Maps the descriptor that came with a hello. The hello announces its length, which must be that of a fence
  // table.
  static Result<PeerFences> map(const UniqueFd& fd, std::uint64_t announced_nbytes);

  // The word of a slot, which is a number from the peer; null: nothing is mapped for it.
  const std::atomic<std::uint64_t>* word(std::uint32_t slot) const noexcept {
    if (mapping_.data() == nullptr || slot >= FenceTable::kNumSlots) return nullptr;
    return reinterpret_cast<const std::atomic<std::uint64_t>*>(mapping_.data()) + slot;
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
