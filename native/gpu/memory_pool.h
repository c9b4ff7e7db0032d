// Memory of one device that other processes can map, by whatever handle the driver offers: what an engine's
// cache is allocated from where its own allocator's memory cannot be shared, or only by cudaIpc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "gpu/driver.h"
#include "kvxfer/status.h"

namespace kvxfer::gpu {

// Callable from any thread. Each allocation is physical memory of its own, mapped as a whole: for few and
// large ones, as an allocator that caches asks for.
class MemoryPool {
 public:
  static Result<std::unique_ptr<MemoryPool>> create(const Driver& driver, int device_index);
  // Gives back what is left, after the device's work has ended.
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // At least so many bytes, readable and writable on the device. kExhausted: it has no room for them;
  // kUnsupported: it cannot share memory. Nothing stays behind of one that fails.
  Result<Address> allocate(std::uint64_t nbytes);
  // Waits for the work of the device first, as cudaFree does. kInvalidArgument: not of this pool, or freed
  // before; nothing was done.
  Status free(Address address);

  // kFabricHandle and kPosixFdHandle, by which others may map it; 0 before the first allocation.
  int handle_types() const;
  std::uint64_t nbytes() const;  // allocated now, rounded up

 private:
  MemoryPool(const Driver& driver, int device_index, PrimaryContext context)
      : driver_(driver), device_index_(device_index), context_(std::move(context)) {}
  // Under the mutex. By the most that the device allows; what was refused is not asked for again.
  Status create_pages(std::uint64_t nbytes, Allocation& allocation, std::uint64_t& rounded_nbytes);
  void unmap(Address address, std::uint64_t nbytes);

  const Driver& driver_;
  const int device_index_;
  PrimaryContext context_;
  mutable std::mutex mutex_;
  int handle_types_ = 0;
  std::map<Address, std::uint64_t> allocated_;  // rounded bytes of each
};

}  // namespace kvxfer::gpu
