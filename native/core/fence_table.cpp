// FenceTable of kvxfer/transport.h: the source's generation words, in memory that peers may read.
#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>

#include "core/system/memfd.h"
#include "kvxfer/transport.h"

namespace kvxfer {
namespace {

constexpr std::size_t kNbytes = FenceTable::kEnd * sizeof(std::uint64_t);

// Another process reads the words: they must be plain memory, not a lock beside it.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint64_t>) == sizeof(std::uint64_t));

// A memfd, mapped at the place of its slots. It begins as zeros, which are words of generation 0.
Result<UniqueFd> map_range(std::atomic<std::uint64_t>* words, const FenceSlotRange& range) {
  Result<UniqueFd> fd = create_memfd("kvxfer-fences", range.nbytes());
  if (!fd.ok()) return fd.status();
  // Mapped writable before it is sealed; afterwards no new writable mapping can be made.
  if (::mmap(words + range.first, range.nbytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             fd.value().get(), 0) == MAP_FAILED)
    return Status::from_errno("mmap of the fence table", errno);
  if (Status sealed = seal_memfd(fd.value().get()); !sealed.ok()) return sealed;
  return fd;
}

}  // namespace

Result<std::unique_ptr<FenceTable>> FenceTable::create() {
  void* const place = ::mmap(nullptr, kNbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return Status::from_errno("mmap of the fence table", errno);
  std::unique_ptr<FenceTable> table(new FenceTable());
  table->words_ = static_cast<std::atomic<std::uint64_t>*>(place);
  for (const auto& [fd, range] : {std::pair(&table->old_fd_, kOldSlots), std::pair(&table->fd_, kSlots)}) {
    Result<UniqueFd> mapped = map_range(table->words_, range);
    if (!mapped.ok()) return mapped.status();
    *fd = std::move(mapped).value();
  }
  return table;
}

FenceTable::~FenceTable() {
  if (words_ != nullptr) ::munmap(words_, kNbytes);
}

Result<int> FenceTable::fill(const FenceSlotRange& range) const {
  const int fd = range.first == kSlots.first ? fd_.get() : old_fd_.get();
  // If a peer reads a missing page, that takes memory which is charged to the peer.
  if (::fallocate(fd, 0, 0, static_cast<off_t>(range.nbytes())) != 0)
    return Status::from_errno("fallocate of the fence table", errno);
  return fd;
}

void FenceTable::bump(std::uint32_t slot) noexcept {
  // Writer's half of a seqlock. The reader moves bytes, then loads the word. A reader that still sees the
  // old word must not see bytes that are written to the pages after this returns. So the increment comes
  // first, and the fence keeps every later store behind it.
  words_[slot].fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace kvxfer
