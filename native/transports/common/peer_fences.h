// A peer's fence table, mapped here: whether the right that bytes were read under still stood.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "kvxfer/transport.h"
#include "transports/common/peer_mapping.h"

namespace kvxfer {

// Compares the source's word once all bytes of the work's transfer are read: done, or kLeaseEnded.
Completion check_fence(const std::atomic<std::uint64_t>* words, const Work& work, std::string_view rail,
                       const std::string& peer_name);

class PeerFences {
 public:
  static constexpr std::uint64_t kNbytes = FenceTable::kNumSlots * sizeof(std::uint64_t);

  PeerFences() = default;  // of none
  // Of a descriptor that came with a hello, which says how long the table is.
  static Result<PeerFences> map(const UniqueFd& fd, std::uint64_t announced_nbytes);

  const std::atomic<std::uint64_t>* words() const noexcept {
    return reinterpret_cast<const std::atomic<std::uint64_t>*>(mapping_.data());
  }

 private:
  PeerMapping mapping_;
};

}  // namespace kvxfer
