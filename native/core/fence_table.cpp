// FenceTable of kvxfer/transport.h: the source's generation words, in memory that peers may read.
#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>

#include "core/system/memfd.h"
#include "kvxfer/transport.h"

namespace kvxfer {
namespace {

// Another process reads the words: they must be plain memory, not a lock beside it.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint64_t>) == sizeof(std::uint64_t));

}  // namespace

Result<std::unique_ptr<FenceTable>> FenceTable::create() {
  // It begins as zeros, which are words of generation 0.
  Result<UniqueFd> fd = create_memfd("kvxfer-fences", kNbytes);
  if (!fd.ok()) return fd.status();
  std::unique_ptr<FenceTable> table(new FenceTable());
  table->fd_ = std::move(fd).value();
  // Mapped writable before it is sealed; afterwards no new writable mapping can be made.
  void* const words = ::mmap(nullptr, kNbytes, PROT_READ | PROT_WRITE, MAP_SHARED, table->fd_.get(), 0);
  if (words == MAP_FAILED) return Status::from_errno("mmap of the fence table", errno);
  table->words_ = static_cast<std::atomic<std::uint64_t>*>(words);
  if (Status sealed = seal_memfd(table->fd_.get()); !sealed.ok()) return sealed;
  return table;
}

FenceTable::~FenceTable() {
  if (words_ != nullptr) ::munmap(words_, kNbytes);
}

Result<int> FenceTable::fill() const {
  // If a peer reads a missing page, that takes memory which is charged to the peer.
  if (::fallocate(fd_.get(), 0, 0, static_cast<off_t>(kNbytes)) != 0)
    return Status::from_errno("fallocate of the fence table", errno);
  return fd_.get();
}

void FenceTable::bump(std::uint32_t slot) noexcept {
  // Writer's half of a seqlock. The reader moves bytes, then loads the word. A reader that still sees the
  // old word must not see bytes that are written to the pages after this returns. So the increment comes
  // first, and the fence keeps every later store behind it.
  words_[slot].fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace kvxfer
