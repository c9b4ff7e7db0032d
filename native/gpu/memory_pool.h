// Memory of one device that other processes can map by any handle that the driver offers. An engine allocates
// its cache here if its own allocator's memory cannot be shared, or only by cudaIpc.
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

// Callable from any thread. Each allocation is its own physical memory, mapped as a whole. It suits few and
// large allocations, as a caching allocator makes them.
class MemoryPool {
 public:
  static Result<std::unique_ptr<MemoryPool>> create(const Driver& driver, int device_index);
  // Waits for the device's work, and frees what is still allocated.
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // Allocates at least `nbytes` bytes, readable and writable on the device. kExhausted: the device has no
  // room for them; kUnsupported: it cannot share memory. A failed call leaves nothing allocated.
  Result<Address> allocate(std::uint64_t nbytes);
  // Waits for the device's work first, as cudaFree does. kInvalidArgument: the address is not from this pool,
  // or was freed before; nothing was done.
  Status free(Address address);

  // kFabricHandle and kPosixFdHandle: the handles by which other processes can map it; 0 before the first
  // allocation.
  int handle_types() const;
  std::uint64_t nbytes() const;  // allocated now, rounded up

 private:
  MemoryPool(const Driver& driver, int device_index, PrimaryContext context)
      : driver_(driver), device_index_(device_index), context_(std::move(context)) {}
  // Called under the mutex. Asks for all kinds of handles that the device allows; does not ask again for
  // kinds that it has refused.
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
