// Replaces native/include/kvxfer/device_bulk.cuh. Two engines do the copies, one in each direction, at any
// time and in any order: what a kernel does not wait for has not happened yet, or happens too late. They see
// shared memory as it was at a thread's last proxy fence.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "bulk_engine.h"
#include "cuda_threads.h"
#include "kvxfer/bulk_ring.h"

namespace cuda_threads {

// An mbarrier with one arrival per phase, in 64 bits: expected bytes that have not arrived (32), phases that
// have ended (31), whether the arrival has happened (1).
class Mbarrier {
 public:
  explicit Mbarrier(unsigned long long* bits) : bits_(*bits) { check_aligned(bits); }

  void arrive_and_expect(unsigned nbytes) {
    change([&](unsigned long long bits) {
      if (bits & 1) end_program("a phase of an mbarrier has two arrivals");
      return (bits + (std::uint64_t{nbytes} << 32)) | 1;
    });
  }
  void complete(unsigned nbytes) {
    change([&](unsigned long long bits) { return bits - (std::uint64_t{nbytes} << 32); });
  }
  bool has_ended(unsigned parity) const { return (bits_.load(std::memory_order_acquire) >> 1 & 1) != parity; }

 private:
  template <class Change>
  void change(Change&& how) {
    unsigned long long bits = bits_.load(std::memory_order_relaxed), next;
    do {
      next = how(bits);
      if (next >> 32 == 0 && next & 1) next += 1;  // carries the arrival's bit into the phases
    } while (!bits_.compare_exchange_weak(bits, next, std::memory_order_release, std::memory_order_relaxed));
  }

  std::atomic_ref<unsigned long long> bits_;
};

// Engines see a copy of shared memory, which fences update as a whole, since it is not known which thread
// wrote where. TSan should see the accesses of threads and engines to the memory itself, but neither these
// copies nor the order that their lock makes. So they use compiler builtins, which are not instrumented here.
__attribute__((no_sanitize("thread"), noinline)) inline void copy_seen(int* lock, volatile unsigned char* to,
                                                                       const volatile unsigned char* from,
                                                                       std::size_t nbytes) {
  while (__atomic_exchange_n(lock, 1, __ATOMIC_ACQUIRE) != 0) std::this_thread::yield();
  for (std::size_t k = 0; k < nbytes; ++k) to[k] = from[k];
  __atomic_store_n(lock, 0, __ATOMIC_RELEASE);
}
inline volatile unsigned char* bytes_at(void* at) { return static_cast<volatile unsigned char*>(at); }

inline void publish(Cta& cta, std::byte* first, std::size_t nbytes) {
  copy_seen(&cta.seen_lock, bytes_at(cta.seen_in_bulk.get() + (first - cta.shared.get())), bytes_at(first),
            nbytes);
}
inline void read_published(Cta& cta, std::byte* to, const std::byte* first, std::size_t nbytes) {
  copy_seen(&cta.seen_lock, bytes_at(to), bytes_at(cta.seen_in_bulk.get() + (first - cta.shared.get())),
            nbytes);
}

// A group of a thread's stores: how many of them have not been read, or not been written, yet.
struct StoreGroup { std::atomic<unsigned> unread = 0, unwritten = 0; };

struct BulkCopy {
  std::byte* to;
  const std::byte* from;
  unsigned nbytes;
  Cta* cta;  // the owner of the shared memory
  unsigned long long* barrier;  // for a load
  std::shared_ptr<StoreGroup> group;  // for a store
  std::vector<std::byte> read;  // bytes of a store that is not written yet

  // Does one step, and returns whether it was the last.
  bool advance() {
    if (group == nullptr) {
      std::memcpy(to, from, nbytes);
      publish(*cta, to, nbytes);
      Mbarrier(barrier).complete(nbytes);
      return true;
    }
    if (read.empty()) {
      read.assign(from, from + nbytes);
      std::vector<std::byte> published(nbytes);
      read_published(*cta, published.data(), from, nbytes);
      // Written but not published, or overwritten too early: a device may read either value; here the engine
      // reads neither.
      for (unsigned k = 0; k < nbytes; ++k)
        if (published[k] != read[k]) read[k] = ~read[k];
      group->unread.fetch_sub(1, std::memory_order_release);
      return false;
    }
    std::memcpy(to, read.data(), nbytes);
    group->unwritten.fetch_sub(1, std::memory_order_release);
    return true;
  }
};

inline void submit(StepEngine& engine, BulkCopy copy) {
  if ((reinterpret_cast<std::uintptr_t>(copy.to) | reinterpret_cast<std::uintptr_t>(copy.from) |
       copy.nbytes) %
          16 !=
      0)
    end_program("a bulk copy is not aligned");
  engine.submit([copy = std::move(copy)]() mutable { return copy.advance(); });
}

inline StepEngine& load_engine() {
  static StepEngine engine;
  return engine;
}
inline StepEngine& store_engine() {
  static StepEngine engine;
  return engine;
}

// This thread's groups; the last one is still open.
inline thread_local std::deque<std::shared_ptr<StoreGroup>> store_groups = {std::make_shared<StoreGroup>()};

template <class Condition>
inline void wait_until(const char* what, Condition&& holds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) end_program(what);
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace cuda_threads

namespace kvxfer::bulk {

inline constexpr bool kAreHere = true;

inline void init_barrier(Barrier* barrier) { barrier->bits = 0; }
inline void publish_shared_writes() {
  cuda_threads::Cta& cta = *cuda_threads::this_cta;
  cuda_threads::publish(cta, cta.shared.get(), cta.shared_nbytes);
}
inline void publish_global_writes() {}  // engines see them at once
inline void arrive_and_expect(Barrier* barrier, unsigned nbytes) {
  cuda_threads::Mbarrier(&barrier->bits).arrive_and_expect(nbytes);
}
inline void wait_for_phase(const Barrier* barrier, unsigned parity) {
  cuda_threads::Mbarrier mbarrier(&const_cast<Barrier*>(barrier)->bits);
  cuda_threads::wait_until("a phase does not end", [&] { return mbarrier.has_ended(parity); });
}

inline unsigned long long streamed_policy() { return 0; }

inline void load(void* to_shared, const void* from, unsigned nbytes, Barrier* barrier, unsigned long long) {
  cuda_threads::check_global(from);
  cuda_threads::check_shared(to_shared);
  cuda_threads::submit(cuda_threads::load_engine(), {static_cast<std::byte*>(to_shared),
                                                     static_cast<const std::byte*>(from),
                                                     nbytes,
                                                     cuda_threads::this_cta,
                                                     &barrier->bits,
                                                     nullptr,
                                                     {}});
}
inline void store(void* to, const void* from_shared, unsigned nbytes, unsigned long long) {
  cuda_threads::check_global(to);
  cuda_threads::check_shared(from_shared);
  const auto& group = cuda_threads::store_groups.back();
  group->unread.fetch_add(1, std::memory_order_relaxed);
  group->unwritten.fetch_add(1, std::memory_order_relaxed);
  cuda_threads::submit(cuda_threads::store_engine(), {static_cast<std::byte*>(to),
                                                      static_cast<const std::byte*>(from_shared),
                                                      nbytes,
                                                      cuda_threads::this_cta,
                                                      nullptr,
                                                      group,
                                                      {}});
}
inline void end_group() {
  cuda_threads::store_groups.push_back(std::make_shared<cuda_threads::StoreGroup>());
}

template <int kButLast>
inline void wait_until_read() {
  const auto& groups = cuda_threads::store_groups;
  for (std::size_t k = 0; k + kButLast + 1 < groups.size(); ++k)
    cuda_threads::wait_until("stores are not read",
                             [&] { return groups[k]->unread.load(std::memory_order_acquire) == 0; });
}
inline void wait_until_stored() {
  auto& groups = cuda_threads::store_groups;
  for (; groups.size() > 1; groups.pop_front())
    cuda_threads::wait_until("stores are not written",
                             [&] { return groups[0]->unwritten.load(std::memory_order_acquire) == 0; });
}

}  // namespace kvxfer::bulk
