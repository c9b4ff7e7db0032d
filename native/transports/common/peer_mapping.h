// A peer's memfd, mapped read-only into this process.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvxfer/status.h"

namespace kvxfer {

// May this descriptor from a peer be mapped? It must be a memfd of exactly the announced size that
// can never shrink: otherwise the peer could make our reads die by SIGBUS.
Status check_memfd(int fd, std::uint64_t announced_nbytes);

class PeerMapping {
 public:
  PeerMapping() = default;
  PeerMapping(PeerMapping&& other) noexcept;
  PeerMapping& operator=(PeerMapping&& other) noexcept;
  ~PeerMapping();

  // Of a descriptor that passed check_memfd; it may be closed afterwards.
  static Result<PeerMapping> map(int fd, std::uint64_t nbytes);

  explicit operator bool() const noexcept { return data_ != nullptr; }
  const std::byte* data() const noexcept { return data_; }

  // Enters some more of the memory into our page tables, so that no copy waits for page faults;
  // a part at a time, because a pool is large and callers have other things to do. False when
  // everything is in.
  bool populate_some() noexcept;
  bool populated() const noexcept { return populated_nbytes_ >= nbytes_; }

 private:
  std::byte* reserved_ = nullptr;
  std::size_t reserved_nbytes_ = 0;
  const std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
  std::size_t populated_nbytes_ = 0;
};

}  // namespace kvxfer
