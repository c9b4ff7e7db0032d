// Replaces CUDA: runs kernels compiled as C++, with a thread of this process for each CUDA thread. Several
// CTAs run at once, as on a device, so that TSan sees their races. It has the parts of CUDA that our kernels
// use; other uses do not compile. __shared__ has no counterpart in C++ and does not compile either: kernels
// get their CTA's memory from shared_memory() (kvxfer/device_memory.cuh).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_threads {

inline constexpr unsigned kWarp = 32;

// Additional state of a CTA and of a warp, for users that need more (tests/native/ptx).
struct NotesOfCtas {
  std::shared_ptr<void> (*make)(unsigned num_threads, std::byte* shared, std::size_t shared_nbytes) = nullptr;
  void (*end_thread)() = nullptr;  // each thread calls it at its end
};
inline NotesOfCtas notes_of_ctas;
inline std::shared_ptr<void> (*notes_of_warps)() = nullptr;

struct Warp {
  explicit Warp(unsigned num_lanes) : barrier(num_lanes) {
    if (notes_of_warps != nullptr) notes = notes_of_warps();
  }
  std::barrier<> barrier;
  // The value that every lane gives to the others, after the number of the exchange. A lane may be at the
  // next exchange while others still read this one's values, so there are two buffers.
  std::atomic<std::uint64_t> given[2][kWarp] = {};
  std::shared_ptr<void> notes;
};

[[noreturn]] inline void end_program(const char* what);

struct Cta {
  Cta(unsigned num_threads, std::size_t nbytes)
      : barrier(num_threads), shared_nbytes(nbytes), shared(allocated()), seen_in_bulk(allocated()) {
    std::memset(shared.get(), 0xa5, shared_nbytes);  // a kernel finds arbitrary bytes there
    std::memset(seen_in_bulk.get(), 0x5a, shared_nbytes);
    for (unsigned first = 0; first < num_threads; first += kWarp)
      warps.push_back(std::make_unique<Warp>(std::min(kWarp, num_threads - first)));
    if (notes_of_ctas.make != nullptr) notes = notes_of_ctas.make(num_threads, shared.get(), shared_nbytes);
  }

  static constexpr std::size_t kSharedAlignment = 1024;
  struct Free {
    void operator()(std::byte* bytes) const { operator delete[](bytes, std::align_val_t{kSharedAlignment}); }
  };

  using Bytes = std::unique_ptr<std::byte[], Free>;
  Bytes allocated() const { return Bytes(new (std::align_val_t{kSharedAlignment}) std::byte[shared_nbytes]); }

  // barrier.sync
  void sync_at(unsigned index, unsigned num_threads) {
    if (index >= kBarriers) end_program("a CTA has 16 barriers");
    if (num_threads == 0 || num_threads % kWarp != 0) end_program("a barrier is for whole warps");
    Named* named = &barriers[index];
    {
      std::lock_guard lock(barriers_mutex);
      if (named->barrier == nullptr) {
        named->barrier = std::make_unique<std::barrier<>>(num_threads);
        named->num_threads = num_threads;
      }
      if (named->num_threads != num_threads) end_program("threads do not agree how many come to a barrier");
    }
    named->barrier->arrive_and_wait();
  }

  static constexpr unsigned kBarriers = 16;
  struct Named {
    std::unique_ptr<std::barrier<>> barrier;
    unsigned num_threads = 0;
  };

  std::barrier<> barrier;
  std::vector<std::unique_ptr<Warp>> warps;
  const std::size_t shared_nbytes;
  Bytes shared;
  Bytes seen_in_bulk;  // shared memory as bulk copies see it (device_bulk.cuh), which lags behind
  int seen_lock = 0;
  std::mutex barriers_mutex;
  std::array<Named, kBarriers> barriers;
  std::shared_ptr<void> notes;
};

inline thread_local Cta* this_cta = nullptr;
inline thread_local Warp* this_warp = nullptr;

inline void end_program(const char* what) {
  std::fprintf(stderr, "thread %u of CTA %u: %s\n", threadIdx.x, blockIdx.x, what);
  std::abort();
}

// Errors for which a device ends a kernel.
template <class T>
inline void check_aligned(const T* at, std::size_t alignment = sizeof(T)) {
  if (reinterpret_cast<std::uintptr_t>(at) % alignment != 0) end_program("an address is not aligned");
}

inline bool is_shared(const void* at) {
  if (this_cta == nullptr) return false;
  const auto offset =
      reinterpret_cast<std::uintptr_t>(at) - reinterpret_cast<std::uintptr_t>(this_cta->shared.get());
  return offset < this_cta->shared_nbytes;  // also false if it has wrapped
}
// For functions that accept addresses of the device's memory alone.
inline void check_global(const void* at) {
  if (is_shared(at)) end_program("an address is in shared memory");
}

inline void check_shared(const void* at) {
  if (!is_shared(at)) end_program("an address is not in the CTA's shared memory");
}

// Calls thread() as every thread of one CTA. Barriers do not wait for threads that have returned.
template <class Thread>
void run_cta(unsigned index, unsigned num_ctas, unsigned num_threads, std::size_t shared_nbytes,
             Thread&& thread) {
  Cta cta(num_threads, shared_nbytes);
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < num_threads; ++t)
    threads.emplace_back([&, t] {
      threadIdx.x = t;
      threadIdx.y = threadIdx.z = blockIdx.y = blockIdx.z = 0;
      blockIdx.x = index;
      blockDim.x = num_threads;
      gridDim.x = num_ctas;
      this_cta = &cta;
      this_warp = cta.warps[t / kWarp].get();
      thread();
      if (notes_of_ctas.end_thread != nullptr) notes_of_ctas.end_thread();
      this_warp->barrier.arrive_and_drop();
      cta.barrier.arrive_and_drop();
    });  // joined before `cta` goes
}

// Runs kernel<<<num_ctas, num_threads, shared_nbytes>>>(arguments), and waits for its end.
template <class Kernel, class... Arguments>
void launch(unsigned num_ctas, unsigned num_threads, std::size_t shared_nbytes, Kernel&& kernel,
            const Arguments&... arguments) {
  constexpr unsigned kAtOnce = 3;
  std::atomic<unsigned> next = 0;
  std::vector<std::jthread> processors;
  for (unsigned p = 0; p < std::min(kAtOnce, num_ctas); ++p)
    processors.emplace_back([&] {
      for (unsigned index; (index = next.fetch_add(1)) < num_ctas;)
        run_cta(index, num_ctas, num_threads, shared_nbytes, [&] { kernel(arguments...); });
    });
}

// TSan understands atomics but not fences. So after a fence a thread's atomics release, and a fence acquires
// what the thread's last atomic has read. A device is stricter with stores between a fence and an atomic.
struct Fences {
  bool behind_one = false;
  unsigned* last_atomic = nullptr;
};
inline thread_local Fences fences;

inline void fence() {
  fences.behind_one = true;
  if (fences.last_atomic != nullptr)
    static_cast<void>(std::atomic_ref(*fences.last_atomic).load(std::memory_order_acquire));
}

// Calls change(value) until no other thread has interfered, and returns the old value.
template <class Change>
inline unsigned change_atomically(unsigned* at, Change&& change) {
  const auto order = fences.behind_one ? std::memory_order_release : std::memory_order_relaxed;
  fences.last_atomic = at;
  std::atomic_ref atomic(*at);
  unsigned seen = atomic.load(std::memory_order_relaxed);
  while (!atomic.compare_exchange_weak(seen, change(seen), order, std::memory_order_relaxed)) {}
  return seen;
}

inline thread_local std::uint32_t num_exchanges = 0;

// Gives every lane the values of all lanes. As on a device, it orders nothing else; __syncwarp() does.
template <class T>
inline std::array<T, kWarp> exchange(unsigned mask, T value) {
  static_assert(sizeof(T) <= sizeof(std::uint32_t));
  if (mask != 0xffffffff || blockDim.x % kWarp != 0) end_program("only whole warps are emulated");
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  auto& given = this_warp->given[++num_exchanges % 2];
  given[threadIdx.x % kWarp].store(std::uint64_t{num_exchanges} << 32 | bits, std::memory_order_relaxed);
  std::array<T, kWarp> values;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    std::uint64_t seen;
    while ((seen = given[lane].load(std::memory_order_relaxed)) >> 32 != num_exchanges)
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    bits = static_cast<std::uint32_t>(seen);
    std::memcpy(&values[lane], &bits, sizeof(T));
  }
  return values;
}

}  // namespace cuda_threads

inline void __syncthreads() { cuda_threads::this_cta->barrier.arrive_and_wait(); }
inline void __syncwarp(unsigned mask = 0xffffffff) {
  if (mask != 0xffffffff) cuda_threads::end_program("only whole warps are emulated");
  cuda_threads::this_warp->barrier.arrive_and_wait();
}

inline void __threadfence_block() { cuda_threads::fence(); }
inline void __threadfence() { cuda_threads::fence(); }
inline void __threadfence_system() { cuda_threads::fence(); }

inline unsigned atomicAdd(unsigned* at, unsigned value) {
  return cuda_threads::change_atomically(at, [&](unsigned seen) { return seen + value; });
}
inline unsigned atomicInc(unsigned* at, unsigned last) {
  return cuda_threads::change_atomically(at, [&](unsigned seen) { return seen >= last ? 0 : seen + 1; });
}
inline unsigned atomicCAS(unsigned* at, unsigned expected, unsigned value) {
  return cuda_threads::change_atomically(at, [&](unsigned seen) { return seen == expected ? value : seen; });
}
inline unsigned atomicMax(unsigned* at, unsigned value) {
  return cuda_threads::change_atomically(at, [&](unsigned seen) { return std::max(seen, value); });
}

template <class T>
inline T __shfl_sync(unsigned mask, T value, unsigned lane) {
  return cuda_threads::exchange(mask, value)[lane % cuda_threads::kWarp];
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, unsigned lanes) {
  return __shfl_sync(mask, value, threadIdx.x ^ lanes);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by) {
  const unsigned lane = threadIdx.x % cuda_threads::kWarp;
  return __shfl_sync(mask, value, lane + by < cuda_threads::kWarp ? lane + by : lane);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  const auto values = cuda_threads::exchange(mask, value);
  return std::accumulate(values.begin(), values.end(), 0u);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
  const auto votes = cuda_threads::exchange(mask, vote);
  unsigned all = 0;
  for (unsigned lane = 0; lane < cuda_threads::kWarp; ++lane) all |= unsigned{votes[lane]} << lane;
  return all;
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }

template <class T>
inline T __ldcs(const T* at) {
  cuda_threads::check_aligned(at);
  cuda_threads::check_global(at);
  return *at;
}
template <class T>
inline void __stcs(T* at, T value) {
  cuda_threads::check_aligned(at);
  cuda_threads::check_global(at);
  *at = value;
}

using std::max;
using std::min;
