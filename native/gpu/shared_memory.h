// GPU memory that another process on this machine copies from: the owner exports it, and the other process
// maps it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gpu/driver.h"
#include "gpu/placement.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer::gpu {

// The kind of handle by which another process opens an allocation.
enum class HandleKind : std::uint32_t {
  kFabric = 1,   // 64 bytes, valid on every machine of an NVLink domain
  kPosixFd = 2,  // a descriptor, passed over a unix socket
  kIpc = 3,      // 64 bytes, for memory from cudaMalloc
};
inline constexpr std::size_t kHandleNbytes = 64;

std::string_view name_of(HandleKind kind) noexcept;

// One allocation of a device, as its owner knows it.
struct ExportedMemory {
  HandleKind kind = HandleKind::kIpc;
  Address base = 0;  // in the owner's addresses
  std::uint64_t nbytes = 0;
  std::array<std::byte, kHandleNbytes> handle{};  // kFabric, kIpc
  UniqueFd fd;                                    // kPosixFd
};

// Exports the allocation that an address lies in, by the first kind above that works. kUnsupported if the
// address is not a device's memory, or the memory cannot be shared; the message lists what was tried.
Result<ExportedMemory> export_memory(const Driver& driver, Address address);

// How kernels of this process may access another process's memory.
enum class PeerAccess : std::uint8_t {
  kRead,   // stores fault, if the driver supports read-only access
  kStore,  // both
};

// Another process's allocation, mapped for this process's kernels on one device.
class PeerMemory {
 public:
  static Result<PeerMemory> map(const Driver& driver, Context context, int device_index,
                                const ExportedMemory& memory, PeerAccess wanted = PeerAccess::kRead);
  PeerMemory(PeerMemory&& other) noexcept { *this = std::move(other); }
  PeerMemory& operator=(PeerMemory&& other) noexcept;
  ~PeerMemory();

  Address address() const noexcept { return address_; }  // of the allocation's first byte, here

 private:
  PeerMemory() = default;

  const Driver* driver_ = nullptr;
  Context context_ = nullptr;
  HandleKind kind_ = HandleKind::kIpc;
  Address address_ = 0;
  std::uint64_t nbytes_ = 0;
};

}  // namespace kvxfer::gpu
