#include "core/system/pool_memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <map>
#include <mutex>
#include <string_view>

#include "core/everlasting.h"
#include "core/system/memfd.h"

#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB (21u << 26)
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace kvxfer {
namespace {

constexpr std::size_t kHugePageNbytes = 2 * 1024 * 1024;

std::size_t base_page_nbytes() noexcept {
  static const auto nbytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return nbytes;
}

std::size_t round_up(std::size_t value, std::size_t unit) noexcept {
  return (value + unit - 1) / unit * unit;
}

// Live pools by address.
struct Registry {
  std::mutex mutex;
  std::map<const std::byte*, std::weak_ptr<PoolMemory>> pools;
  std::uint64_t next_id = 1;
};
Registry& registry() {
  static Everlasting<Registry> the_registry;
  return the_registry.get();
}

// mbind(2) without libnuma. The policy belongs to the memfd, so it holds for peers' mappings too.
Status bind_to_node(std::byte* data, std::size_t nbytes, int node) {
#if defined(SYS_mbind)
  constexpr int kBind = 2;  // MPOL_BIND: from this node or not at all
  constexpr int kMaxNodes = 1024;
  constexpr int kBitsPerWord = 8 * sizeof(unsigned long);
  unsigned long mask[kMaxNodes / kBitsPerWord] = {};
  if (node >= kMaxNodes)
    return {Code::kInvalidArgument,
            "numa_node " + std::to_string(node) + " is beyond " + std::to_string(kMaxNodes)};
  mask[node / kBitsPerWord] |= 1ul << (node % kBitsPerWord);
  if (::syscall(SYS_mbind, data, nbytes, kBind, mask, kMaxNodes + 1ul, 0u) == 0) return {};
  if (errno == EINVAL)
    return {Code::kInvalidArgument, "there is no NUMA node " + std::to_string(node) +
                                        " with memory that this process may use; numa_node=-1 takes any"};
  const Status failed = Status::from_errno("mbind to NUMA node " + std::to_string(node), errno);
  return {failed.code(), failed.message() + "; numa_node=-1 needs no NUMA node"};
#else
  static_cast<void>(data), static_cast<void>(nbytes);
  return {Code::kUnsupported,
          "this machine has no mbind: numa_node " + std::to_string(node) + " cannot be used"};
#endif
}

// The machine's administrator wants no huge pages, in any memory.
bool huge_pages_are_off() {
  std::FILE* setting = std::fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
  if (setting == nullptr) return true;
  char text[128] = {};
  const std::size_t nbytes = std::fread(text, 1, sizeof text - 1, setting);
  std::fclose(setting);
  return std::string_view(text, nbytes).find("[never]") != std::string_view::npos;
}

// Shared memory gets huge pages by itself only if shmem_enabled says so, which is set on hardly any machine.
// Asked explicitly, the kernel gives what it has. One small page in each huge page is touched first (the
// kernel makes none of nothing); the rest then never exists as small pages that must be copied.
void lay_in_huge_pages(std::byte* data, std::size_t nbytes) {
  // Works if shmem_enabled permits it on request.
  static_cast<void>(::madvise(data, nbytes, MADV_HUGEPAGE));
  if (huge_pages_are_off()) return;
  const std::size_t whole = nbytes / kHugePageNbytes * kHugePageNbytes;
  for (std::size_t at = 0; at < whole; at += kHugePageNbytes)
    if (::madvise(data + at, base_page_nbytes(), MADV_POPULATE_WRITE) != 0) return;  // prefault() says why
  static_cast<void>(::madvise(data, whole, MADV_COLLAPSE));
}

Status prefault(std::byte* data, std::size_t nbytes) {
  while (::madvise(data, nbytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno == EINVAL) {  // an older kernel: touch every page
      for (std::size_t at = 0; at < nbytes; at += base_page_nbytes()) {
        volatile std::byte* page = data + at;
        *page = std::byte{0};
      }
      return {};
    }
    const int error = errno;
    const std::string what = "no memory for a pool of " + std::to_string(nbytes) + " bytes";
    // EFAULT: the page fault would have raised SIGBUS, which is how hugetlb pages and memory
    // limits run out.
    if (error == ENOMEM || error == EFAULT) return {Code::kExhausted, what};
    return Status::from_errno(what + ": madvise(MADV_POPULATE_WRITE)", error);
  }
  return {};
}

// How many bytes of [data, data + nbytes) are mapped by huge pages, by the kernel's account. The kernel counts pages
// while that is read, so it is read as far as this memory only.
std::size_t transparent_huge_nbytes(const std::byte* data, std::size_t nbytes) {
  if (nbytes < kHugePageNbytes) return 0;
  const auto first = reinterpret_cast<std::uintptr_t>(data), last = first + nbytes;
  std::FILE* smaps = std::fopen("/proc/self/smaps", "re");
  if (smaps == nullptr) return 0;
  bool inside = false;
  std::size_t total = 0;
  char line[512];
  while (std::fgets(line, sizeof line, smaps) != nullptr) {
    std::uintptr_t from = 0, to = 0;
    std::size_t kib = 0;
    // An area begins with its addresses; its counters follow, one a line.
    if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &from, &to) == 2) {
      if (from >= last) break;
      inside = to > first;
    } else if (inside && (std::sscanf(line, "ShmemPmdMapped: %zu kB", &kib) == 1 ||
                          std::sscanf(line, "FilePmdMapped: %zu kB", &kib) == 1)) {
      total += kib * 1024;
    }
  }
  std::fclose(smaps);
  return total;
}

}  // namespace

Result<std::shared_ptr<PoolMemory>> PoolMemory::create(const Options& options) {
  if (options.nbytes == 0) return Status(Code::kInvalidArgument, "a pool needs at least 1 byte");
  if (options.nbytes > SIZE_MAX / 4)
    return Status(Code::kInvalidArgument, "a pool's nbytes is beyond the address space");
  if (options.huge_pages && options.nbytes >= kHugePageNbytes) {
    // Too few are reserved, none of 2 MiB on this machine, or none on the node: the other kind will do.
    Result<std::shared_ptr<PoolMemory>> pool = create_with(options, true);
    if (pool.ok()) return pool;
  }
  return create_with(options, false);
}

Result<std::shared_ptr<PoolMemory>> PoolMemory::create_with(const Options& options, bool hugetlb) {
  const std::size_t page_nbytes = hugetlb ? kHugePageNbytes : base_page_nbytes();
  std::shared_ptr<PoolMemory> pool(new PoolMemory());
  pool->nbytes_ = options.nbytes;
  pool->memfd_nbytes_ = round_up(options.nbytes, page_nbytes);

  Result<UniqueFd> fd =
      create_memfd("kvxfer-" + options.name, pool->memfd_nbytes_, hugetlb ? MFD_HUGETLB | MFD_HUGE_2MB : 0u);
  if (!fd.ok()) return fd.status();
  pool->fd_ = std::move(fd.value());

  // Reserve first and map into the middle: what is left on both sides is the guard. One huge page of
  // slack, so that the memory can begin at a huge page's boundary.
  const std::size_t guard_nbytes = base_page_nbytes();
  pool->reserved_nbytes_ = pool->memfd_nbytes_ + kHugePageNbytes + 2 * guard_nbytes;
  void* reserved =
      ::mmap(nullptr, pool->reserved_nbytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return Status::from_errno("mmap of a pool's addresses", errno);
  pool->reserved_ = static_cast<std::byte*>(reserved);
  const auto first_usable = reinterpret_cast<std::uintptr_t>(reserved) + guard_nbytes;
  pool->data_ = pool->reserved_ +
                (round_up(first_usable, kHugePageNbytes) - reinterpret_cast<std::uintptr_t>(reserved));

  if (::mmap(pool->data_, pool->memfd_nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             pool->fd_.get(), 0) == MAP_FAILED)
    return Status::from_errno("mmap of a pool of " + std::to_string(pool->memfd_nbytes_) + " bytes", errno);

  if (options.numa_node >= 0)
    if (Status bound = bind_to_node(pool->data_, pool->memfd_nbytes_, options.numa_node); !bound.ok())
      return bound;
  if (options.huge_pages && !hugetlb) lay_in_huge_pages(pool->data_, pool->memfd_nbytes_);
  if (Status faulted = prefault(pool->data_, pool->memfd_nbytes_); !faulted.ok()) return faulted;
  if (Status sealed = seal_memfd(pool->fd_.get()); !sealed.ok()) return sealed;

  if (hugetlb)
    pool->page_kind_ = "hugetlb";
  else if (transparent_huge_nbytes(pool->data_, pool->memfd_nbytes_) > pool->memfd_nbytes_ / 2)
    pool->page_kind_ = "transparent-huge";  // most of it: fragmented memory gives what it has

  Registry& live = registry();
  const std::lock_guard lock(live.mutex);
  pool->memfd_id_ = live.next_id++;
  live.pools[pool->data_] = pool;
  return pool;
}

PoolMemory::~PoolMemory() {
  if (memfd_id_ != 0) {
    Registry& live = registry();
    const std::lock_guard lock(live.mutex);
    live.pools.erase(data_);
  }
  if (reserved_ != nullptr) ::munmap(reserved_, reserved_nbytes_);
}

std::optional<PoolSlice> PoolMemory::find(const std::byte* address, std::size_t nbytes) {
  Registry& live = registry();
  // Outlives the lock: it may be the last owner, and its end takes the lock.
  std::shared_ptr<PoolMemory> pool;
  {
    const std::lock_guard lock(live.mutex);
    auto after = live.pools.upper_bound(address);
    if (after == live.pools.begin()) return std::nullopt;
    pool = std::prev(after)->second.lock();
  }
  if (pool == nullptr) return std::nullopt;
  const auto offset = static_cast<std::size_t>(address - pool->data_);
  if (offset > pool->nbytes_ || nbytes > pool->nbytes_ - offset) return std::nullopt;
  return PoolSlice{pool->fd(), pool->memfd_id_, offset, pool->memfd_nbytes_, pool};
}

std::vector<std::string> PoolMemory::seals() const { return seals_of(fd_.get()); }

}  // namespace kvxfer
