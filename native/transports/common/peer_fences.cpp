#include "transports/common/peer_fences.h"

#include <cerrno>
#include <string>
#include <utility>

namespace kvxfer {

bool holds(const std::atomic<std::uint64_t>& word, const Fence& fence) noexcept {
  // This is the reader's half of a seqlock; FenceTable::bump is the writer's. The pages were read
  // first: by plain or vector loads, by the kernel, or by a GPU whose end was acquired. The acquire fence
  // keeps all of those loads before the load of the word. The source stores the word before it lets anyone
  // write to the pages. If we had read a single byte that was written after the right ended, we would now see
  // the new word. So an old word proves that every byte read is the transfer's own. Prefetched lines do not
  // weaken this: caches are coherent, and what counts is the load, not when the line came. Our own stores
  // (non-temporal or not) do not take part; copy_fence is for readers of the destination.
  std::atomic_thread_fence(std::memory_order_acquire);
  return word.load(std::memory_order_relaxed) == fence.generation;
}

Result<PeerFences> PeerFences::map(const UniqueFd& fd, std::uint64_t announced_nbytes) {
  if (announced_nbytes != FenceTable::kNbytes)
    return Status(Code::kRailFailed, "its fence table has " + std::to_string(announced_nbytes) +
                                         " bytes, not " + std::to_string(FenceTable::kNbytes));
  // Holes need no check. A table of this size lies in no reserved huge pages. Where a kernel before 5.1 lets
  // the owner punch a hole into it, its words read as 0, and the owner's own fences report that they moved
  // on.
  if (Status usable = check_memfd(fd.get(), announced_nbytes); !usable.ok()) return usable;
  Result<PeerMapping> mapping = PeerMapping::map(fd.get(), announced_nbytes);
  if (!mapping.ok()) return mapping.status();
  PeerFences fences;
  fences.mapping_ = std::move(mapping).value();
  return fences;
}

Status OwnFences::share() {
  if (fd_ != nullptr) return {};
  const Result<int> filled = table_.fill();
  if (!filled.ok()) return filled.status();
  SharedFd copy = share_copy_of(filled.value());
  if (!*copy) return Status::from_errno("dup of the fence table's descriptor", errno);
  fd_ = std::move(copy);
  return {};
}

}  // namespace kvxfer
