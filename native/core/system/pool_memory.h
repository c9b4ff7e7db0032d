// Shareable memory that this process hands out blocks from: a sealed memfd between guard pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Where a range of addresses lies in a pool.
struct PoolSlice {
  int fd = -1;                     // the pool's; valid while keepalive is held
  std::uint64_t memfd_id = 0;      // unique in this process
  std::uint64_t offset = 0;        // of the range's first byte in the memfd
  std::uint64_t memfd_nbytes = 0;  // of the whole memfd
  std::shared_ptr<const void> keepalive;
};

class PoolMemory {
 public:
  struct Options {
    std::size_t nbytes = 0;
    std::string name;        // for people, in /proc/<pid>/maps
    bool huge_pages = true;  // reserved huge pages where enough are free, else transparent ones
    int numa_node = -1;      // its memory comes from this node alone; -1: wherever the kernel likes
  };

  // All pages are present when this returns. A lack of huge pages is not an error: page_kind() says what
  // the kernel gave. kInvalidArgument: no bytes, or no such node. kExhausted: out of memory.
  static Result<std::shared_ptr<PoolMemory>> create(const Options& options);
  ~PoolMemory();
  PoolMemory(const PoolMemory&) = delete;
  PoolMemory& operator=(const PoolMemory&) = delete;

  // The live pool of this process that contains all of [address, address + nbytes).
  static std::optional<PoolSlice> find(const std::byte* address, std::size_t nbytes);

  std::byte* data() const noexcept { return data_; }
  std::size_t nbytes() const noexcept { return nbytes_; }
  std::string_view page_kind() const noexcept { return page_kind_; }  // "hugetlb", "transparent-huge", "base"
  std::vector<std::string> seals() const;
  int fd() const noexcept { return fd_.get(); }
  std::uint64_t memfd_id() const noexcept { return memfd_id_; }

 private:
  PoolMemory() = default;
  static Result<std::shared_ptr<PoolMemory>> create_with(const Options& options, bool hugetlb);

  UniqueFd fd_;
  std::uint64_t memfd_id_ = 0;
  std::byte* reserved_ = nullptr;  // guard, memory, guard
  std::size_t reserved_nbytes_ = 0;
  std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;  // asked for
  std::size_t memfd_nbytes_ = 0;  // whole pages
  std::string_view page_kind_ = "base";
};

}  // namespace kvxfer
