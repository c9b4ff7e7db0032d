// Records about a CTA that runs translated kernels: which bytes of its shared memory were written, and how;
// what the async proxy does there; and where threads wait.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "arithmetic.h"
#include "place.h"

namespace ptx {

// Where a CTA's memory begins in the window of shared addresses; the system owns what lies below.
inline constexpr u32 kSharedBase = 1024;
inline constexpr u32 kGranule = 16;  // bulk copies are multiples of this

// A group of a thread's bulk stores, until the thread has waited for it to be written.
struct StoreGroup {
  std::atomic<u32> unread = 0, unwritten = 0;
  u32 num_stores = 0;  // this and the rest: used by the thread alone
  bool read_was_awaited = false;
};

inline u32 lane() { return threadIdx.x % cuda_threads::kWarp; }

// All records use memory_order_relaxed, so that TSan does not take an access to them for synchronization.
class Cta {
 public:
  Cta(u32 num_threads, std::byte* shared, std::size_t nbytes)
      : num_threads(num_threads),
        shared_(shared),
        nbytes_(static_cast<u32>(nbytes)),
        granules_(new Granule[(nbytes + kGranule - 1) / kGranule]()),
        threads_(new Thread[num_threads]()) {}
  ~Cta() {
    for (u32 k = 0; k < (nbytes_ + kGranule - 1) / kGranule; ++k)
      if (unpacked(granules_[k].state.load(std::memory_order_relaxed)).loads != 0)
        trap({"CTA", 0, "its end"}, "a bulk copy to 0x%x of its shared memory is under way",
             kSharedBase + k * kGranule);
  }

  // ---- addresses ----

  bool has(u64 generic, u64 nbytes) const {
    const u64 first = reinterpret_cast<u64>(shared_);
    return generic >= first && generic + nbytes <= first + nbytes_;
  }
  bool touches(u64 generic, u64 nbytes) const {
    const u64 first = reinterpret_cast<u64>(shared_);
    return generic < first + nbytes_ && generic + nbytes > first;
  }
  u32 shared_of(u64 generic) const {
    return static_cast<u32>(generic - reinterpret_cast<u64>(shared_)) + kSharedBase;
  }
  u64 generic_of(u32 address) const { return reinterpret_cast<u64>(shared_) + (address - kSharedBase); }
  std::byte* at(u32 address) const { return shared_ + (address - kSharedBase); }

  void check_is_inside(const Place& place, u64 address, u64 nbytes) const {
    if (address < kSharedBase || address + nbytes > u64{kSharedBase} + nbytes_)
      trap(place, "%llu bytes at 0x%llx of shared memory, of which the CTA has %u from 0x%x on",
           static_cast<unsigned long long>(nbytes), static_cast<unsigned long long>(address), nbytes_,
           kSharedBase);
  }

  // ---- the generic proxy ----

  void read(const Place& place, u32 address, u32 nbytes) const {
    check_is_inside(place, address, nbytes);
    for_each_granule(address, nbytes, [&](u32 first, u32 mask) {
      const State state = state_of(first);
      if (state.barrier & mask)
        trap(place, "an mbarrier lies at 0x%x, which only its own instructions read", first);
      check_no_load(place, state, first);
      if (~state.written & mask)
        trap(place, "0x%x of shared memory was never written",
             first + std::countr_zero(~state.written & mask));
    });
  }
  void write(const Place& place, u32 address, u32 nbytes) {
    check_is_inside(place, address, nbytes);
    const u64 when = u64{++clock_} << 16 | threadIdx.x;
    for_each_granule(address, nbytes, [&](u32 first, u32 mask) {
      const State state = state_of(first);
      if (state.barrier & mask)
        trap(place, "an mbarrier lies at 0x%x, which only its own instructions write", first);
      check_no_load(place, state, first);
      check_no_store(place, state, first);
      granule(first).state.fetch_or(mask, std::memory_order_relaxed);
      granule(first).written_at.store(when, std::memory_order_relaxed);
    });
  }

  // ---- the async proxy ----

  // From here on the async proxy may see what this thread wrote before, and what it has synchronized with.
  void fence_proxies() { threads_[threadIdx.x].fenced_at.store(++clock_, std::memory_order_relaxed); }

  void begin_load(const Place& place, u32 address, u32 nbytes) {
    check_is_inside(place, address, nbytes);
    for (u32 k = address; k < address + nbytes; k += kGranule) {
      const State state = unpacked(granule(k).state.fetch_add(kOneLoad, std::memory_order_relaxed));
      if (state.barrier != 0) trap(place, "an mbarrier lies at 0x%x", k);
      if (state.loads != 0) trap(place, "another bulk copy to 0x%x is under way", k);
      check_no_store(place, state, k);
      check_is_fenced(place, k, "written");
    }
  }
  void end_load(u32 address, u32 nbytes) {
    for (u32 k = address; k < address + nbytes; k += kGranule) {
      granule(k).written_at.store(0, std::memory_order_relaxed);
      // All of it becomes written, with no load under way: begin_load() has checked that there is no other
      // load, and no store.
      granule(k).state.store(kAllBytes, std::memory_order_relaxed);
    }
  }
  void begin_store(const Place& place, u32 address, u32 nbytes) {
    check_is_inside(place, address, nbytes);
    for (u32 k = address; k < address + nbytes; k += kGranule) {
      const State state = unpacked(granule(k).state.fetch_add(kOneStore, std::memory_order_relaxed));
      if (state.barrier != 0) trap(place, "an mbarrier lies at 0x%x", k);
      check_no_load(place, state, k);
      if (state.written != kAllBytes) trap(place, "0x%x of shared memory was never written", k);
      check_is_fenced(place, k, "written");
    }
  }
  void end_reading(u32 address, u32 nbytes) {
    for (u32 k = address; k < address + nbytes; k += kGranule)
      granule(k).state.fetch_sub(kOneStore, std::memory_order_relaxed);
  }

  // ---- mbarriers ----

  void make_barrier(const Place& place, u32 address) {
    check_is_inside(place, address, sizeof(u64));
    if (is_barrier(address)) trap(place, "there is an mbarrier at 0x%x already", address);
    write(place, address, sizeof(u64));
    granule(address).state.fetch_or(barrier_mask(address), std::memory_order_relaxed);
  }
  // The old contents are lost.
  void end_barrier(const Place& place, u32 address) {
    check_is_barrier(place, address);
    const u64 mask = barrier_mask(address);
    granule(address).state.fetch_and(~(mask | mask >> 16), std::memory_order_relaxed);
  }
  void check_is_barrier(const Place& place, u32 address) const {
    check_is_inside(place, address, sizeof(u64));
    if (!is_barrier(address)) trap(place, "there is no mbarrier at 0x%x: nobody initialized one", address);
  }
  // A copy will count there.
  void check_is_published(const Place& place, u32 address) const {
    check_is_barrier(place, address);
    check_is_fenced(place, address, "initialized");
  }

  // ---- threads ----

  struct Thread {
    std::atomic<u32> fenced_at = 0;
    std::atomic<const Place*> waits_at = nullptr;
    std::atomic<bool> has_ended = false;
  };
  Thread& thread(u32 index) const { return threads_[index]; }

  void end_thread() {
    threads_[threadIdx.x].has_ended.store(true, std::memory_order_relaxed);
    num_ended.fetch_add(1, std::memory_order_relaxed);
  }
  // Returns which of the given threads are missing, and what they do instead.
  template <class IsAwaited>
  std::string absent(const Place& place, IsAwaited&& is_awaited) const {
    std::string all;
    for (u32 t = 0; t < num_threads; ++t) {
      if (!is_awaited(t)) continue;
      const Place* where = threads_[t].waits_at.load(std::memory_order_relaxed);
      if (where == &place) continue;
      all += all.empty() ? "" : ", ";
      all += "thread " + std::to_string(t) + " ";
      if (threads_[t].has_ended.load(std::memory_order_relaxed))
        all += "has ended";
      else if (where == nullptr)
        all += "waits nowhere";
      else
        all += "waits at line " + std::to_string(where->line);
      if (all.size() > 200) return all + ", and others";
    }
    return all;
  }

  const u32 num_threads;
  std::atomic<u32> num_ended = 0;
  // For each barrier: how often all threads have met (32 bits), and how many wait now.
  std::array<std::atomic<u64>, 16> met{};

 private:
  // 16 bytes: which of them were written (16 bits), and which belong to an mbarrier (16); how many bulk
  // copies to them (16) and from them (16) are under way.
  struct State { u32 written, barrier, loads, stores; };
  static constexpr u32 kAllBytes = 0xffff;
  static constexpr u64 kOneLoad = u64{1} << 32, kOneStore = u64{1} << 48;
  struct Granule {
    std::atomic<u64> state = 0;
    std::atomic<u64> written_at = 0;  // the generic proxy's last write: when (48 bits), by which thread (16)
  };

  static State unpacked(u64 state) {
    return {static_cast<u32>(state & 0xffff), static_cast<u32>(state >> 16 & 0xffff),
            static_cast<u32>(state >> 32 & 0xffff), static_cast<u32>(state >> 48)};
  }
  Granule& granule(u32 address) const { return granules_[(address - kSharedBase) / kGranule]; }
  State state_of(u32 address) const {
    return unpacked(granule(address).state.load(std::memory_order_relaxed));
  }

  // Calls take(first address, mask of bytes) for each granule that contains some of the bytes.
  template <class Take>
  static void for_each_granule(u32 address, u32 nbytes, Take&& take) {
    for (u32 first = address - address % kGranule; first < address + nbytes; first += kGranule) {
      const u32 begin = std::max(address, first) - first,
                end = std::min(address + nbytes, first + kGranule) - first;
      take(first, kAllBytes >> (kGranule - (end - begin)) << begin);
    }
  }
  static u64 barrier_mask(u32 address) { return u64{0xff} << (16 + address % kGranule); }
  bool is_barrier(u32 address) const { return state_of(address).barrier >> address % kGranule & 1; }

  void check_no_load(const Place& place, const State& state, u32 address) const {
    if (state.loads != 0)
      trap(place, "a bulk copy to 0x%x is under way, whose barrier was not waited for", address);
  }
  void check_no_store(const Place& place, const State& state, u32 address) const {
    if (state.stores != 0)
      trap(place, "a bulk copy from 0x%x is under way, and nobody waited until it was read", address);
  }
  // Checks that a fence lies between a write of the generic proxy and the async proxy: by the writing thread
  // or by this one.
  void check_is_fenced(const Place& place, u32 address, const char* what) const {
    const u64 written = granule(address).written_at.load(std::memory_order_relaxed);
    if (written == 0) return;
    const u32 when = static_cast<u32>(written >> 16), writer = written & 0xffff;
    if (threads_[writer].fenced_at.load(std::memory_order_relaxed) > when) return;
    if (threads_[threadIdx.x].fenced_at.load(std::memory_order_relaxed) > when) return;
    trap(place,
         "thread %u has %s 0x%x through the generic proxy, and neither it nor this thread executed "
         "fence.proxy.async since",
         writer, what, address);
  }

  std::byte* const shared_;
  const u32 nbytes_;
  const std::unique_ptr<Granule[]> granules_;
  const std::unique_ptr<Thread[]> threads_;
  std::atomic<u32> clock_ = 0;
};

inline Cta& cta() { return *static_cast<Cta*>(cuda_threads::this_cta->notes.get()); }

// This thread's groups of bulk stores; the last one is still open.
inline thread_local std::deque<std::shared_ptr<StoreGroup>> store_groups = {std::make_shared<StoreGroup>()};

inline void end_thread() {
  for (const auto& group : store_groups)
    if (group->num_stores != 0 && !group->read_was_awaited) {
      std::fprintf(
          stderr,
          "thread %u of CTA %u: it ends while its bulk stores may not have been read from shared memory: "
          "cp.async.bulk.wait_group is missing\n",
          threadIdx.x, blockIdx.x);
      std::abort();
    }
  cta().end_thread();
}

// If a program has a translated kernel, every CTA has its records from the beginning.
inline const bool ctas_have_notes = [] {
  cuda_threads::notes_of_ctas = {
      [](unsigned num_threads, std::byte* shared, std::size_t nbytes) -> std::shared_ptr<void> {
        return std::make_shared<Cta>(num_threads, shared, nbytes);
      },
      end_thread};
  return true;
}();

}  // namespace ptx
