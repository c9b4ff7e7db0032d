#include "gpu/shared_memory.h"

#include <cstring>
#include <utility>

namespace kvxfer::gpu {
namespace {

void try_next(std::string& tried, HandleKind kind, const Status& status) {
  if (!tried.empty()) tried += "; ";
  tried += name_of(kind);
  tried += ": ";
  tried += status.message();
}

// Exports memory that was allocated with cuMemCreate, by a kind of handle that the allocation was created
// for.
bool export_allocation(const Driver& driver, Allocation allocation, ExportedMemory& out, std::string& tried) {
  AllocationProperties properties;
  if (const int error = driver.allocation_properties(&properties, allocation); error != 0) {
    try_next(tried, HandleKind::kPosixFd, driver.status(error, "cuMemGetAllocationPropertiesFromHandle"));
    return false;
  }
  if (properties.handle_types & kFabricHandle) {
    const int error = driver.allocation_export(out.handle.data(), allocation, kFabricHandle, 0);
    if (error == 0) {
      out.kind = HandleKind::kFabric;
      return true;
    }
    try_next(tried, HandleKind::kFabric, driver.status(error, "cuMemExportToShareableHandle"));
  }
  if (properties.handle_types & kPosixFdHandle) {
    int fd = -1;
    const int error = driver.allocation_export(&fd, allocation, kPosixFdHandle, 0);
    if (error == 0) {
      out.kind = HandleKind::kPosixFd;
      out.fd.reset(fd);
      return true;
    }
    try_next(tried, HandleKind::kPosixFd, driver.status(error, "cuMemExportToShareableHandle"));
  }
  if (tried.empty()) tried = "it was allocated without a kind of handle that other processes can open";
  return false;
}

bool export_by_ipc(const Driver& driver, ExportedMemory& out, std::string& tried) {
  IpcHandle handle;
  if (const int error = driver.ipc_export(&handle, out.base); error != 0) {
    try_next(tried, HandleKind::kIpc, driver.status(error, "cuIpcGetMemHandle"));
    return false;
  }
  out.kind = HandleKind::kIpc;
  std::memcpy(out.handle.data(), handle.bytes, sizeof handle.bytes);
  return true;
}

}  // namespace

std::string_view name_of(HandleKind kind) noexcept {
  switch (kind) {
    case HandleKind::kFabric: return "fabric handle";
    case HandleKind::kPosixFd: return "descriptor";
    case HandleKind::kIpc: return "IPC handle";
  }
  return "unknown handle";
}

Result<ExportedMemory> export_memory(const Driver& driver, Address address) {
  ExportedMemory out;
  std::size_t nbytes = 0;
  if (const int error = driver.address_range(&out.base, &nbytes, address); error != 0)
    return Status(Code::kUnsupported, driver.status(error, "cuMemGetAddressRange").message() +
                                          ": the address is not GPU memory, or the memory was freed");
  out.nbytes = nbytes;
  std::string tried;
  Allocation allocation = 0;
  bool exported = false;
  if (driver.allocation_retain(&allocation, reinterpret_cast<void*>(out.base)) == 0) {
    exported = export_allocation(driver, allocation, out, tried);
    driver.allocation_release(allocation);
  }
  // Tried also if the driver returned an allocation: it may do so for cudaMalloc's memory too.
  if (exported || export_by_ipc(driver, out, tried)) return out;
  return Status(Code::kUnsupported,
                "other processes cannot open this GPU memory (" + tried +
                    "): allocate the cache by cudaMalloc, or in kvxfer.gpu.shareable_memory()");
}

Result<PeerMemory> PeerMemory::map(const Driver& driver, Context context, int device_index,
                                   const ExportedMemory& memory, PeerAccess wanted) {
  PeerMemory out;
  out.driver_ = &driver;
  out.context_ = context;
  out.kind_ = memory.kind;
  const ContextScope scope(driver, context);
  if (memory.kind == HandleKind::kIpc) {
    IpcHandle handle;
    std::memcpy(handle.bytes, memory.handle.data(), sizeof handle.bytes);
    if (const int error = driver.ipc_open(&out.address_, handle, kLazyPeerAccess); error != 0)
      return driver.status(error, "cuIpcOpenMemHandle");
    // The driver knows how long the allocation is, while its owner may claim any length. A kernel that read
    // beyond the end would end the context.
    Address base = 0;
    std::size_t nbytes = 0;
    if (const int error = driver.address_range(&base, &nbytes, out.address_); error != 0)
      return driver.status(error, "cuMemGetAddressRange of another process's allocation");
    if (nbytes < out.address_ - base || memory.nbytes > nbytes - (out.address_ - base))
      return Status(Code::kUnsupported, "the owner of the allocation says that it has " +
                                            std::to_string(memory.nbytes) + " bytes, but it has " +
                                            std::to_string(nbytes - (out.address_ - base)));
    return out;
  }

  const bool by_fd = memory.kind == HandleKind::kPosixFd;
  auto handle = memory.handle;
  void* given = by_fd ? reinterpret_cast<void*>(static_cast<std::intptr_t>(memory.fd.get())) : handle.data();
  Allocation allocation = 0;
  if (const int error = driver.allocation_import(&allocation, given, by_fd ? kPosixFdHandle : kFabricHandle);
      error != 0)
    return driver.status(error, "cuMemImportFromShareableHandle");
  Address address = 0;
  int error = driver.address_reserve(&address, memory.nbytes, 0, 0, 0);
  if (error != 0) {
    driver.allocation_release(allocation);
    return driver.status(error, "cuMemAddressReserve");
  }
  error = driver.map(address, memory.nbytes, 0, allocation, 0);
  driver.allocation_release(allocation);  // the mapping keeps it
  if (error != 0) {
    driver.address_free(address, memory.nbytes);
    return driver.status(error, "cuMemMap");
  }
  out.address_ = address;
  out.nbytes_ = memory.nbytes;
  // Read-only first, if the driver can distinguish that: only the owner stores there, unless it has offered
  // stores.
  for (const int flags : {kReadAccess, kWriteAccess}) {
    if (wanted == PeerAccess::kStore && flags == kReadAccess) continue;
    const Access access{{1, device_index}, flags};
    error = driver.set_access(address, memory.nbytes, &access, 1);
    if (error == 0) return out;
  }
  return driver.status(error, "cuMemSetAccess");
}

PeerMemory& PeerMemory::operator=(PeerMemory&& other) noexcept {
  std::swap(driver_, other.driver_);
  std::swap(context_, other.context_);
  std::swap(kind_, other.kind_);
  std::swap(address_, other.address_);
  std::swap(nbytes_, other.nbytes_);
  return *this;
}

PeerMemory::~PeerMemory() {
  if (address_ == 0) return;
  const ContextScope scope(*driver_, context_);
  if (kind_ == HandleKind::kIpc) {
    driver_->ipc_close(address_);
    return;
  }
  driver_->unmap(address_, nbytes_);
  driver_->address_free(address_, nbytes_);
}

}  // namespace kvxfer::gpu
