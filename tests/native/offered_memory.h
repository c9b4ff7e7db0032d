// Memory of one process to which kernels of another process store, for the tests of such kernels.
#pragma once

#include <cstdint>
#include <utility>

#include "check.h"
#include "emulated_driver.h"
#include "gpu/shared_memory.h"

namespace offered_memory {

using namespace kvxfer;

inline constexpr std::uint64_t kNbytes = emulated::kGranularity;

inline gpu::Address shareable(int handle_types = gpu::kPosixFdHandle) {
  const gpu::Address address = emulated::allocate_pages(kNbytes, handle_types);
  REQUIRE(address != 0);
  return address;
}
inline gpu::ExportedMemory exported(gpu::Address address) {
  auto memory = gpu::export_memory(emulated::driver(), address);
  REQUIRE_OK(memory);
  return std::move(memory).value();
}
inline Result<gpu::PeerMemory> map(const gpu::ExportedMemory& memory,
                                   gpu::PeerAccess wanted = gpu::PeerAccess::kStore) {
  return gpu::PeerMemory::map(emulated::driver(), emulated::own_context(), 0, memory, wanted);
}
template <class T>
T* at(gpu::Address address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace offered_memory
