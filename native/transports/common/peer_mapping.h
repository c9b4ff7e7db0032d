// A peer's memfd, mapped read-only into this process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kvxfer/status.h"

namespace kvxfer {

// May this descriptor from a peer be read? It must be a memfd of exactly the announced size that can never
// shrink, with all of its pages there: else the peer could end this process by SIGBUS, or have our reads
// take memory in its place. Whether pages can go later is is_sealed_against_holes (core/system/memfd.h).
Status check_memfd(int fd, std::uint64_t announced_nbytes);

// What reads it may be any threads, whoever drives alone populates it.
class PeerMapping {
 public:
  PeerMapping() = default;
  PeerMapping(PeerMapping&& other) noexcept;
  PeerMapping& operator=(PeerMapping&& other) noexcept;
  ~PeerMapping();

  // Of a descriptor that passed check_memfd, and stays open for as long as this is asked anything.
  static Result<PeerMapping> map(int fd, std::uint64_t nbytes);

  explicit operator bool() const noexcept { return data_ != nullptr; }
  const std::byte* data() const noexcept { return data_; }

  // Enters some more of the memory into our page tables, so that no copy waits for page faults;
  // a part at a time, because a pool is large and callers have other things to do. Not ok: the
  // memory must not be read any more, in words.
  Status populate_some();
  bool populated() const noexcept { return populated_nbytes_ >= nbytes_; }
  // May it be read? Reserved huge pages, which can run out, only once all of them are in the page tables.
  bool readable() const noexcept { return !is_hugetlb_ || populated(); }
  // To be asked after reads: not ok where one of them found a hole. How full a file is can be feigned by
  // pages behind its end, so a hole is found when the file grows by a read: one read's worth at most.
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
