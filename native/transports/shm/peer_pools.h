// A peer's regions, and its pools in which they lie: mapped for our copies, or read by the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "core/system/fork_guard.h"
#include "kvxfer/budget.h"
#include "kvxfer/transport.h"
#include "transports/shm/foreign_memory.h"
#include "transports/shm/message.h"
#include "transports/shm/piece_source.h"

namespace kvxfer::shm {

inline constexpr std::size_t kMaxMemfds = 4096;  // of one agent; below the usual limit of mappings, 65,530

// A region's keys: where its base lies in a memfd that goes over the rail's socket, or that it lies in no
// memfd.
enum class Where : std::uint64_t { kForeign = 0, kPool = 1 };
struct Keys {
  Where where = Where::kForeign;
  std::uint64_t memfd_id = 0;
  std::uint64_t memfd_offset = 0;
  std::uint64_t memfd_nbytes = 0;
};
static_assert(sizeof(Keys) == 32 && sizeof(Keys) <= kMaxKeyBytes);

class PeerPools {
 public:
  struct Region {
    Keys keys;
    std::uint64_t base = 0;  // in the peer's process
    std::uint64_t end = 0;   // of its spans, from base
    std::string failure;     // why its memfd, which has come, cannot be used
    bool by_kernel = false;  // read by the kernel, whose reads cannot fault here
  };

  // The budget is charged for what is mapped, and for each descriptor that is kept; null: no budget.
  PeerPools(std::string peer_name, std::shared_ptr<Budget> budget)
      : name_(std::move(peer_name)), budget_(std::move(budget)) {}

  // Called once the peer has introduced itself.
  void set_process(std::shared_ptr<const ForeignMemory> process) { process_ = std::move(process); }
  const ForeignMemory& process() const noexcept { return *process_; }

  // Takes a pool that the peer passes. Not ok: the peer may not pass it.
  Status add(const Message& message, UniqueFd fd);
  // The peer takes a pool back. Works on it wait until their region is detached or the pool comes back.
  void remove(std::uint64_t memfd_id);

  // kUnsupported, with the reason in words.
  Status attach(const RemoteRegion& region);
  void detach(RegionId region);
  const Region* find(RegionId region) const noexcept;
  // Whether a read of the region may begin, or must wait for its pool. A read that will fail may begin.
  bool can_read(RegionId region) const noexcept;
  // What the region's pieces are read from; nothing while its pool is not mapped.
  std::optional<PieceSource> source_of(const Region& region) const noexcept;

  // Enters some more of the pools into our page tables. Not ok: the peer said something untrue about a pool.
  bool wants_populating() const noexcept { return !populating_.empty(); }
  Status populate_some();

  std::size_t num_mapped() const noexcept;
  void clear();

 private:
  // A pool, as received over the socket.
  struct Memfd {
    SharedFd fd;  // kept for a later attach, until the peer takes the pool back
    std::uint64_t nbytes = 0;
    Charge kept;
    // Set while a region lies in it and its owner cannot punch holes into it. Copies under way hold it, too.
    std::shared_ptr<MappedPool> mapped;
  };

  // Connects a region with its memfd. Either may have come last.
  Status map_for(Region& region);
  // For a region in no pool, or in a pool that must not be mapped.
  Status read_by_kernel(Region& region) const;
  void unmap(std::uint64_t memfd_id, Memfd& memfd);

  const std::string name_;
  const std::shared_ptr<Budget> budget_;
  std::shared_ptr<const ForeignMemory> process_;  // null until it has introduced itself
  std::map<std::uint64_t, Memfd> memfds_;
  std::map<RegionId, Region> regions_;
  std::set<std::uint64_t> populating_;  // memfds whose mappings are not in our page tables yet
};

}  // namespace kvxfer::shm
