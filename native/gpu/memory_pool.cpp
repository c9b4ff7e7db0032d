#include "gpu/memory_pool.h"

#include <utility>

namespace kvxfer::gpu {

Result<std::unique_ptr<MemoryPool>> MemoryPool::create(const Driver& driver, int device_index) {
  Result<PrimaryContext> context = PrimaryContext::retain(driver, device_index);
  if (!context.ok()) return context.status();
  return std::unique_ptr<MemoryPool>(new MemoryPool(driver, device_index, std::move(context).value()));
}

MemoryPool::~MemoryPool() {
  const ContextScope scope(driver_, context_.get());
  if (!allocated_.empty()) driver_.context_synchronize();
  for (const auto& [address, nbytes] : allocated_) unmap(address, nbytes);
}

Result<Address> MemoryPool::allocate(std::uint64_t nbytes) {
  if (nbytes == 0) return Status(Code::kInvalidArgument, "an allocation must have at least one byte");
  const ContextScope scope(driver_, context_.get());
  const std::lock_guard lock(mutex_);
  Allocation allocation = 0;
  std::uint64_t rounded_nbytes = 0;
  if (Status status = create_pages(nbytes, allocation, rounded_nbytes); !status.ok()) return status;

  Address address = 0;
  if (const int error = driver_.address_reserve(&address, rounded_nbytes, 0, 0, 0); error != 0) {
    driver_.allocation_release(allocation);
    return driver_.status(error, "cuMemAddressReserve");
  }
  const int error = driver_.map(address, rounded_nbytes, 0, allocation, 0);
  driver_.allocation_release(allocation);  // the mapping keeps it
  if (error != 0) {
    driver_.address_free(address, rounded_nbytes);
    return driver_.status(error, "cuMemMap");
  }
  const Access access{{1, device_index_}, kWriteAccess};
  if (const int refused = driver_.set_access(address, rounded_nbytes, &access, 1); refused != 0) {
    unmap(address, rounded_nbytes);
    return driver_.status(refused, "cuMemSetAccess");
  }
  allocated_.emplace(address, rounded_nbytes);
  return address;
}

Status MemoryPool::create_pages(std::uint64_t nbytes, Allocation& allocation, std::uint64_t& rounded_nbytes) {
  std::string tried;
  // Both kinds first: the exporter then uses the one that works for the peer.
  for (const int handle_types : {kFabricHandle | kPosixFdHandle, kPosixFdHandle}) {
    if (handle_types_ != 0 && handle_types != handle_types_) continue;
    AllocationProperties properties;
    properties.handle_types = handle_types;
    properties.location.id = device_index_;
    std::size_t granularity = 0;
    int error = driver_.allocation_granularity(&granularity, &properties, kRecommendedGranularity);
    std::string_view what = "cuMemGetAllocationGranularity";
    if (error == 0 && granularity != 0) {
      if (nbytes > UINT64_MAX - (granularity - 1)) return {Code::kExhausted, "no GPU has that much memory"};
      rounded_nbytes = (nbytes + granularity - 1) / granularity * granularity;
      error = driver_.allocation_create(&allocation, rounded_nbytes, &properties, 0);
      what = "cuMemCreate";
    }
    if (error == 0 && allocation != 0) {
      handle_types_ = handle_types;
      return {};
    }
    const Status status = driver_.status(error, what);
    if (error == kOutOfMemory)
      return {Code::kExhausted, "GPU " + std::to_string(device_index_) + " has no room for " +
                                    std::to_string(nbytes) + " bytes that can be shared (" +
                                    status.message() + "): make the cache smaller, or free other memory"};
    if (!tried.empty()) tried += "; ";
    tried += handle_types & kFabricHandle ? "by fabric handle: " : "by descriptor: ";
    tried += status.message();
  }
  return {Code::kUnsupported, "GPU " + std::to_string(device_index_) +
                                  " cannot allocate memory that other processes can map (" + tried + ")"};
}

void MemoryPool::unmap(Address address, std::uint64_t nbytes) {
  driver_.unmap(address, nbytes);
  driver_.address_free(address, nbytes);
}

Status MemoryPool::free(Address address) {
  const ContextScope scope(driver_, context_.get());
  const std::lock_guard lock(mutex_);
  const auto found = allocated_.find(address);
  if (found == allocated_.end())
    return {Code::kInvalidArgument,
            "the pool of GPU " + std::to_string(device_index_) +
                " has not allocated this memory, or has freed it already: nothing was done"};
  driver_
      .context_synchronize();  // unmapping does not wait, and a kernel that still uses the memory would fault
  unmap(address, found->second);
  allocated_.erase(found);
  return {};
}

int MemoryPool::handle_types() const {
  const std::lock_guard lock(mutex_);
  return handle_types_;
}

std::uint64_t MemoryPool::nbytes() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t total = 0;
  for (const auto& [address, nbytes] : allocated_) total += nbytes;
  return total;
}

}  // namespace kvxfer::gpu
