// Loads and stores by state space. Global memory is the process's memory, and generic addresses are the
// process's addresses. Shared memory has a window of 32 bits; parameters and local memory have their own
// windows.
#pragma once

#include <array>
#include <atomic>
#include <cstring>

#include "cta.h"

namespace ptx {

inline constexpr u64 kParamBase = 256, kLocalBase = 1 << 20;

// The private memory of a kernel's thread.
struct Frame {
  const std::byte* params;
  u64 params_nbytes;
  std::byte* local;
  u64 local_nbytes;
};

inline void check_is_aligned(const Place& at, u64 address, u64 alignment) {
  if (address % alignment != 0)
    trap(at, "the address 0x%llx is no multiple of %llu", static_cast<unsigned long long>(address),
         static_cast<unsigned long long>(alignment));
}

// Each space finds where bytes lie, and records each access. A vector is aligned as a whole.
struct Global {
  static std::byte* place(const Place& at, const Frame&, u64 address, u64 nbytes) {
    check_is_aligned(at, address, nbytes);
    if (address < 4096)
      trap(at, "0x%llx is nobody's: a null pointer, or an address of another state space",
           static_cast<unsigned long long>(address));
    if (cta().touches(address, nbytes))
      trap(at, "0x%llx is shared memory, and not global", static_cast<unsigned long long>(address));
    return reinterpret_cast<std::byte*>(address);
  }
  static const std::byte* to_read(const Place& at, const Frame& frame, u64 address, u64 nbytes) {
    return place(at, frame, address, nbytes);
  }
  static std::byte* to_write(const Place& at, const Frame& frame, u64 address, u64 nbytes) {
    return place(at, frame, address, nbytes);
  }
};
struct Shared {
  static const std::byte* to_read(const Place& at, const Frame&, u64 address, u64 nbytes) {
    check_is_aligned(at, address, nbytes);
    cta().check_is_inside(at, address, nbytes);
    cta().read(at, static_cast<u32>(address), static_cast<u32>(nbytes));
    return cta().at(static_cast<u32>(address));
  }
  static std::byte* to_write(const Place& at, const Frame&, u64 address, u64 nbytes) {
    check_is_aligned(at, address, nbytes);
    cta().check_is_inside(at, address, nbytes);
    cta().write(at, static_cast<u32>(address), static_cast<u32>(nbytes));
    return cta().at(static_cast<u32>(address));
  }
};
struct Generic {
  static const std::byte* to_read(const Place& at, const Frame& frame, u64 address, u64 nbytes) {
    if (cta().has(address, nbytes)) return Shared::to_read(at, frame, cta().shared_of(address), nbytes);
    return Global::to_read(at, frame, address, nbytes);
  }
  static std::byte* to_write(const Place& at, const Frame& frame, u64 address, u64 nbytes) {
    if (cta().has(address, nbytes)) return Shared::to_write(at, frame, cta().shared_of(address), nbytes);
    return Global::to_write(at, frame, address, nbytes);
  }
};
struct Param {
  static const std::byte* to_read(const Place& at, const Frame& frame, u64 address, u64 nbytes) {
    check_is_aligned(at, address, nbytes);
    if (address < kParamBase || address + nbytes > kParamBase + frame.params_nbytes)
      trap(at, "%llu bytes at %lld of the kernel's parameters, which have %llu",
           static_cast<unsigned long long>(nbytes), static_cast<long long>(address - kParamBase),
           static_cast<unsigned long long>(frame.params_nbytes));
    return frame.params + (address - kParamBase);
  }
};
struct Local {
  static std::byte* to_write(const Place& at, const Frame& frame, u64 address, u64 nbytes) {
    check_is_aligned(at, address, nbytes);
    if (address < kLocalBase || address + nbytes > kLocalBase + frame.local_nbytes)
      trap(at, "%llu bytes at %lld of the thread's local memory, which has %llu",
           static_cast<unsigned long long>(nbytes), static_cast<long long>(address - kLocalBase),
           static_cast<unsigned long long>(frame.local_nbytes));
    return frame.local + (address - kLocalBase);
  }
  static const std::byte* to_read(const Place& at, const Frame& frame, u64 address, u64 nbytes) {
    return to_write(at, frame, address, nbytes);
  }
};

template <class Space, class T, std::size_t kCount>
std::array<T, kCount> load(const Place& at, const Frame& frame, u64 address) {
  std::array<T, kCount> values;
  __builtin_memcpy(&values, Space::to_read(at, frame, address, sizeof values), sizeof values);
  return values;
}
template <class Space, class T, std::size_t kCount>
void store(const Place& at, const Frame& frame, u64 address, std::array<T, kCount> values) {
  __builtin_memcpy(Space::to_write(at, frame, address, sizeof values), &values, sizeof values);
}

// ---- conversions of addresses between spaces ----

inline u64 cvta_to_global(const Place& at, u64 generic) {
  if (cta().touches(generic, 1))
    trap(at, "0x%llx is shared memory, and not global", static_cast<unsigned long long>(generic));
  return generic;
}
inline u64 cvta_to_shared(const Place& at, u64 generic) {
  // The end of shared memory is a valid address too.
  if (!cta().has(generic, 0))
    trap(at, "0x%llx is not in the CTA's shared memory", static_cast<unsigned long long>(generic));
  return cta().shared_of(generic);
}
inline u64 cvta_shared(const Place& at, u64 address) {
  cta().check_is_inside(at, address, 0);
  return cta().generic_of(static_cast<u32>(address));
}
inline u64 cvta_global(const Place&, u64 address) { return address; }

// ---- order ----

// Strong operations are C++ atomics. Every scope is the whole process, so a scope that is too narrow is not
// detected. A release before this thread has waited for its bulk stores would release bytes that have not
// arrived.
inline void check_stores_are_there(const Place& at) {
  for (const auto& group : store_groups)
    if (group->num_stores != 0)
      trap(at,
           "it releases while bulk stores of this thread may not have been written: "
           "cp.async.bulk.wait_group 0 (without .read) is missing");
}

// After a fence, relaxed stores release too.
inline std::memory_order store_order() {
  return cuda_threads::fences.behind_one ? std::memory_order_release : std::memory_order_relaxed;
}
inline void fence() { cuda_threads::fence(); }
inline void fence_of_global_memory() {}

template <class Space, class T>
T load_relaxed(const Place& at, const Frame& frame, u64 address) {
  auto* word = reinterpret_cast<const T*>(Space::to_read(at, frame, address, sizeof(T)));
  return std::atomic_ref(*const_cast<T*>(word)).load(std::memory_order_relaxed);
}
template <class Space, class T>
T load_acquire(const Place& at, const Frame& frame, u64 address) {
  auto* word = reinterpret_cast<const T*>(Space::to_read(at, frame, address, sizeof(T)));
  return std::atomic_ref(*const_cast<T*>(word)).load(std::memory_order_acquire);
}
template <class Space, class T>
void store_relaxed(const Place& at, const Frame& frame, u64 address, T value) {
  std::atomic_ref(*reinterpret_cast<T*>(Space::to_write(at, frame, address, sizeof(T))))
      .store(value, store_order());
}
template <class Space, class T>
void store_release(const Place& at, const Frame& frame, u64 address, T value) {
  check_stores_are_there(at);
  std::atomic_ref(*reinterpret_cast<T*>(Space::to_write(at, frame, address, sizeof(T))))
      .store(value, std::memory_order_release);
}

template <class Space, class Change>
u32 change_relaxed(const Place& at, const Frame& frame, u64 address, Change&& change) {
  Space::to_read(at, frame, address, sizeof(u32));
  return cuda_threads::change_atomically(
      reinterpret_cast<u32*>(Space::to_write(at, frame, address, sizeof(u32))), change);
}
template <class Space, class Change>
u32 change_release(const Place& at, const Frame& frame, u64 address, Change&& change) {
  check_stores_are_there(at);
  std::atomic_ref word(*reinterpret_cast<u32*>(Space::to_write(at, frame, address, sizeof(u32))));
  u32 seen = word.load(std::memory_order_relaxed);
  while (!word.compare_exchange_weak(seen, change(seen), std::memory_order_release,
                                     std::memory_order_relaxed)) {}
  return seen;
}

struct Add {
  u32 by;
  u32 operator()(u32 seen) const { return seen + by; }
};
struct Inc {
  u32 last;
  u32 operator()(u32 seen) const { return seen >= last ? 0 : seen + 1; }
};
struct Max {
  u32 least;
  u32 operator()(u32 seen) const { return std::max(seen, least); }
};
struct Min {
  u32 most;
  u32 operator()(u32 seen) const { return std::min(seen, most); }
};
struct Exch {
  u32 value;
  u32 operator()(u32) const { return value; }
};
struct Cas {
  u32 expected, value;
  u32 operator()(u32 seen) const { return seen == expected ? value : seen; }
};

}  // namespace ptx
