#include "transports/common/peer_mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "core/system/memfd.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif

namespace kvxfer {
namespace {

constexpr std::size_t kHugePageNbytes = 2 * 1024 * 1024;
constexpr std::uint64_t kMaxMemfdNbytes = std::uint64_t{1} << 44;  // 16 TiB: of a 128 TiB address space
// 256 base pages at about 1 us each in a virtual machine: together as long as a piece takes. Huge pages cost
// less.
constexpr std::size_t kPopulateNbytes = 1024 * 1024;
// As many reserved huge pages as can be entered in that time.
constexpr std::size_t kPopulateHugetlbNbytes = 64 * kHugePageNbytes;
constexpr decltype(statfs::f_type) kHugetlbMagic = 0x958458f6;

std::uint64_t filled_nbytes(const struct stat& file) noexcept {
  constexpr std::uint64_t kStatBlockNbytes = 512;
  return static_cast<std::uint64_t>(file.st_blocks) * kStatBlockNbytes;
}

}  // namespace

Status check_memfd(int fd, std::uint64_t announced_nbytes) {
  if (announced_nbytes == 0 || announced_nbytes > kMaxMemfdNbytes)
    return {Code::kRailFailed,
            "it announced a memfd of " + std::to_string(announced_nbytes) + " bytes; 1 to 2^44 are allowed"};
  struct stat file{};
  if (::fstat(fd, &file) != 0) return Status::from_errno("fstat of its memfd", errno);
  if (!is_sealed_against_shrinking(fd))
    return {Code::kRailFailed,
            "its descriptor is not a memfd sealed against shrinking (F_SEAL_SHRINK), so reading it "
            "could end this process"};
  if (static_cast<std::uint64_t>(file.st_size) != announced_nbytes)
    return {Code::kRailFailed, "its memfd has " + std::to_string(file.st_size) + " bytes, not the " +
                                   std::to_string(announced_nbytes) + " that it announced"};
  if (filled_nbytes(file) < announced_nbytes)
    return {Code::kRailFailed, "its memfd is not filled: " + std::to_string(filled_nbytes(file)) + " of " +
                                   std::to_string(announced_nbytes) +
                                   " bytes are there, and reading the others would take memory here"};
  return {};
}

Result<PeerMapping> PeerMapping::map(int fd, std::uint64_t nbytes) {
  struct stat file{};
  struct statfs system{};
  if (::fstat(fd, &file) != 0 || ::fstatfs(fd, &system) != 0)
    return Status::from_errno("fstat of its memfd", errno);
  PeerMapping mapping;
  mapping.fd_ = fd;
  mapping.nbytes_ = nbytes;
  mapping.filled_nbytes_ = filled_nbytes(file);
  mapping.is_hugetlb_ = system.f_type == kHugetlbMagic;
  // The mapping begins on a huge page, so that huge pages of the file can be mapped whole.
  mapping.reserved_nbytes_ = nbytes + kHugePageNbytes;
  void* reserved = ::mmap(nullptr, mapping.reserved_nbytes_, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED)
    return Status::from_errno("mmap of " + std::to_string(nbytes) + " bytes of addresses", errno);
  mapping.reserved_ = static_cast<std::byte*>(reserved);
  std::byte* const data = mapping.reserved_ + (-reinterpret_cast<std::uintptr_t>(reserved) % kHugePageNbytes);
  if (::mmap(data, nbytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
    return Status::from_errno("mmap of its memfd of " + std::to_string(nbytes) + " bytes", errno);
  mapping.data_ = data;
  static_cast<void>(::madvise(data, nbytes, MADV_HUGEPAGE));  // the kernel may refuse
  static_cast<void>(::madvise(data, nbytes, MADV_DONTFORK));  // a child would keep the peer's memory
  return mapping;
}

Status PeerMapping::populate_some() {
  if (populated()) return {};
  const std::size_t nbytes =
      std::min(is_hugetlb_ ? kPopulateHugetlbNbytes : kPopulateNbytes, nbytes_ - populated_nbytes_);
  if (::madvise(const_cast<std::byte*>(data_) + populated_nbytes_, nbytes, MADV_POPULATE_READ) == 0) {
    populated_nbytes_ += nbytes;
  } else if (errno != EINTR && errno != EAGAIN) {
    if (is_hugetlb_)
      return Status::from_errno(
          "its memfd of reserved huge pages could not be read in advance "
          "(MADV_POPULATE_READ, Linux 5.14), and a missing page would end this process",
          errno);
    // An older kernel, or no memory for page tables: then page faults enter the pages later.
    populated_nbytes_ = nbytes_;
    return {};
  }
  Status whole = check_holes();
  has_all_pages_ = whole.ok() && populated();
  return whole;
}

Status PeerMapping::check_holes() const {
  if (has_all_pages_) return {};
  struct stat file{};
  if (::fstat(fd_, &file) != 0) return Status::from_errno("fstat of its memfd", errno);
  if (filled_nbytes(file) <= filled_nbytes_) return {};
  return {Code::kRailFailed, "its memfd has holes: a read has filled " +
                                 std::to_string(filled_nbytes(file) - filled_nbytes_) + " bytes of it"};
}

PeerMapping::PeerMapping(PeerMapping&& other) noexcept { *this = std::move(other); }

PeerMapping& PeerMapping::operator=(PeerMapping&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(reserved_, other.reserved_);
  std::swap(reserved_nbytes_, other.reserved_nbytes_);
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  std::swap(populated_nbytes_, other.populated_nbytes_);
  std::swap(filled_nbytes_, other.filled_nbytes_);
  std::swap(is_hugetlb_, other.is_hugetlb_);
  has_all_pages_ = other.has_all_pages_.exchange(has_all_pages_);
  return *this;
}

PeerMapping::~PeerMapping() {
  if (reserved_ != nullptr) ::munmap(reserved_, reserved_nbytes_);
}

}  // namespace kvxfer
