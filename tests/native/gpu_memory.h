// Memory that the tests of GPU copies copy from and to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#include "check.h"
#include "emulated_driver.h"
#include "gpu/placement.h"

namespace gpu_memory {

using namespace kvxfer;

// Bytes whose address has no more alignment than is asked for.
class Memory {
 public:
  explicit Memory(std::uint64_t nbytes, std::uint64_t first_byte = 0)
      : first_byte_(first_byte), nbytes_(nbytes), bytes_(new (kAlignment) std::byte[first_byte + nbytes]) {}
  ~Memory() { operator delete[](bytes_, kAlignment); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() { return bytes_ + first_byte_; }
  std::uint64_t size() const { return nbytes_; }

 private:
  static constexpr std::align_val_t kAlignment{256};
  const std::uint64_t first_byte_, nbytes_;
  std::byte* const bytes_;
};

inline gpu::Placement placement_of(Memory& memory) {
  return gpu::Placement(reinterpret_cast<gpu::Address>(memory.data()));
}

// Memory of the device.
inline std::byte* allocate(std::size_t nbytes) {
  gpu::Address address = 0;
  REQUIRE_EQ(emulated::driver().memory_allocate(&address, nbytes), 0);
  return reinterpret_cast<std::byte*>(address);
}
inline void release(std::byte* memory) { emulated::release(reinterpret_cast<gpu::Address>(memory)); }

// The same, whatever is captured meanwhile.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t nbytes) : nbytes_(nbytes) {
    const gpu::ContextScope scope(emulated::driver(), emulated::own_context());
    REQUIRE_EQ(emulated::driver().memory_allocate(&address_, nbytes), 0);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    const gpu::ContextScope scope(emulated::driver(), emulated::own_context());
    emulated::driver().memory_free(address_);
  }
  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  gpu::Address address() const { return address_; }
  std::size_t size() const { return nbytes_; }

 private:
  gpu::Address address_ = 0;
  std::size_t nbytes_;
};

}  // namespace gpu_memory
