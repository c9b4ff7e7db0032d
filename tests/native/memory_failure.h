// Allocations that fail: replaces operator new of the executable that includes it. The test's plan says which
// allocations fail; all others work as usual.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace memory_failure {

// Called for each allocation, on any thread; true: the allocation fails. Threads of agents allocate while a
// test sets it.
using Fails = bool (*)(std::size_t nbytes) noexcept;
inline std::atomic<Fails> fails{nullptr};

inline void* allocate(std::size_t nbytes, std::size_t alignment = 0) {
  if (const Fails now = fails.load(); now != nullptr && now(nbytes)) return nullptr;
  if (nbytes == 0) nbytes = 1;
  return alignment == 0 ? std::malloc(nbytes)
                        : std::aligned_alloc(alignment, (nbytes + alignment - 1) / alignment * alignment);
}
inline void* allocate_or_throw(std::size_t nbytes, std::size_t alignment = 0) {
  if (void* const memory = allocate(nbytes, alignment)) return memory;
  throw std::bad_alloc();
}

}  // namespace memory_failure

void* operator new(std::size_t nbytes) { return memory_failure::allocate_or_throw(nbytes); }
void* operator new[](std::size_t nbytes) { return memory_failure::allocate_or_throw(nbytes); }
void* operator new(std::size_t nbytes, std::align_val_t alignment) {
  return memory_failure::allocate_or_throw(nbytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t nbytes, std::align_val_t alignment) {
  return memory_failure::allocate_or_throw(nbytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t nbytes, const std::nothrow_t&) noexcept {
  return memory_failure::allocate(nbytes);
}
void* operator new[](std::size_t nbytes, const std::nothrow_t&) noexcept {
  return memory_failure::allocate(nbytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
