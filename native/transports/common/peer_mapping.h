// A peer's memfd, mapped read-only into this process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kvxfer/status.h"

namespace kvxfer {

// Checks that this process may read a peer's descriptor. It must be a memfd of exactly the announced size
// that can never shrink, with all of its pages there. Else the peer could end this process by SIGBUS, or our
// reads would allocate memory on the peer's behalf. is_sealed_against_holes (core/system/memfd.h) tells
// whether pages can go later.
Status check_memfd(int fd, std::uint64_t announced_nbytes);

// Any thread may read through it; only the driving thread populates it.
class PeerMapping {
 public:
  PeerMapping() = default;
  PeerMapping(PeerMapping&& other) noexcept;
  PeerMapping& operator=(PeerMapping&& other) noexcept;
  ~PeerMapping();

  // Maps a descriptor that passed check_memfd. The caller keeps the descriptor open for as long as it uses
  // the mapping.
  static Result<PeerMapping> map(int fd, std::uint64_t nbytes);

  explicit operator bool() const noexcept { return data_ != nullptr; }
  const std::byte* data() const noexcept { return data_; }

  // Enters some more of the memory into our page tables, so that no copy waits for page faults. It does a
  // part at a time, because a pool is large and callers have other things to do. Not ok: the memory must not
  // be read any more, in words.
  Status populate_some();
  bool populated() const noexcept { return populated_nbytes_ >= nbytes_; }
  // Whether it may be read. Reserved huge pages can run out, so they may be read only once all of them are in
  // the page tables.
  bool readable() const noexcept { return !is_hugetlb_ || populated(); }
  // The caller asks this after reads; not ok where one of them found a hole. Pages behind the file's end can
  // feign how full it is, so a hole shows only when a read makes the file grow: one read's worth at most.
  Status check_holes() const;

 private:
  int fd_ = -1;
  std::byte* reserved_ = nullptr;
  std::size_t reserved_nbytes_ = 0;
  const std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
  std::size_t populated_nbytes_ = 0;
  std::uint64_t filled_nbytes_ = 0;  // of the file, when it was mapped
  bool is_hugetlb_ = false;
  std::atomic<bool> has_all_pages_{false};  // seen with our own page tables
};

}  // namespace kvxfer
