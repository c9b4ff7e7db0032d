#include "core/system/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010  // Linux 5.1; glibc 2.32
#endif

namespace kvxfer {

Result<UniqueFd> create_memfd(const std::string& name, std::size_t nbytes, unsigned extra_flags) {
  // The kernel takes 249 bytes of name, for /proc/<pid>/maps alone.
  UniqueFd fd(::memfd_create(name.substr(0, 200).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | extra_flags));
  if (!fd) return Status::from_errno("memfd_create", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(nbytes)) != 0)
    return Status::from_errno("ftruncate of a memfd to " + std::to_string(nbytes) + " bytes", errno);
  return fd;
}

Status seal_memfd(int fd) {
  constexpr int kSize = F_SEAL_SHRINK | F_SEAL_GROW;
  if (::fcntl(fd, F_ADD_SEALS, kSize | F_SEAL_FUTURE_WRITE) != 0 && ::fcntl(fd, F_ADD_SEALS, kSize) != 0)
    return Status::from_errno("fcntl(F_ADD_SEALS)", errno);
  if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL) != 0) return Status::from_errno("fcntl(F_SEAL_SEAL)", errno);
  return {};
}

bool is_sealed_against_shrinking(int fd) noexcept {
  const int seals = ::fcntl(fd, F_GET_SEALS);  // fails on everything but shmem and hugetlbfs
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

bool is_sealed_against_holes(int fd) noexcept {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  // Either of the second two forbids fallocate(FALLOC_FL_PUNCH_HOLE), and with it madvise(MADV_REMOVE).
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && (seals & (F_SEAL_FUTURE_WRITE | F_SEAL_WRITE)) != 0;
}

std::vector<std::string> seals_of(int fd) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  std::vector<std::string> names;
  if (seals < 0) return names;
  if (seals & F_SEAL_GROW) names.emplace_back("grow");
  if (seals & F_SEAL_SHRINK) names.emplace_back("shrink");
  if (seals & F_SEAL_FUTURE_WRITE) names.emplace_back("future-write");
  if (seals & F_SEAL_SEAL) names.emplace_back("seal");
  return names;
}

}  // namespace kvxfer
