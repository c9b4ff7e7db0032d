// mbarriers, and bulk copies through engines that act at any time and in any order.
#pragma once

#include "emulated/bulk_engine.h"
#include "memory.h"
#include "warp.h"

namespace ptx {

// ---- mbarriers ----

// 64 bits: arrivals per phase (20), pending arrivals (20), bytes that are expected and have not arrived, plus
// 2^20 (21), phases (3).
class Mbarrier {
 public:
  static constexpr s64 kMostArrivals = (1 << 20) - 1, kMostBytes = (1 << 20) - 1;

  Mbarrier(const Place& at, u32 address) : at_(at), address_(address) {
    check_is_aligned(at, address, sizeof(u64));
    cta().check_is_barrier(at, address);
    word_ = reinterpret_cast<u64*>(cta().at(address));
  }
  static void init(const Place& at, u32 address, u32 arrivals) {
    check_is_aligned(at, address, sizeof(u64));
    if (arrivals == 0 || arrivals > kMostArrivals) trap(at, "an mbarrier of %u arrivals", arrivals);
    cta().make_barrier(at, address);
    std::atomic_ref(*reinterpret_cast<u64*>(cta().at(address)))
        .store(packed({arrivals, arrivals, 0, 0}), std::memory_order_relaxed);
  }

  void expect(u32 nbytes, u32 arrivals) const {
    change([&](State& state) {
      state.bytes += nbytes;
      check_range(state);
      if (arrivals > state.pending)
        trap(at_, "%u arrivals at 0x%x, where %u are pending", arrivals, address_, state.pending);
      state.pending -= arrivals;
    });
  }
  void complete(u32 nbytes) const {
    change([&](State& state) {
      state.bytes -= nbytes;
      check_range(state);
    });
  }
  bool has_ended(u32 parity) const { return (load().phase & 1) != parity; }
  std::string text() const {
    const State state = load();
    return std::to_string(state.pending) + " arrivals and " + std::to_string(state.bytes) +
           " bytes are pending";
  }

 private:
  struct State {
    u32 expected, pending;
    s64 bytes;
    u32 phase;
  };
  static u64 packed(const State& state) {
    return u64{state.expected} | u64{state.pending} << 20 | static_cast<u64>(state.bytes + (1 << 20)) << 40 |
           u64{state.phase} << 61;
  }
  static State unpacked(u64 word) {
    return {static_cast<u32>(word & 0xfffff), static_cast<u32>(word >> 20 & 0xfffff),
            static_cast<s64>(word >> 40 & 0x1fffff) - (1 << 20), static_cast<u32>(word >> 61)};
  }
  State load() const { return unpacked(std::atomic_ref(*word_).load(std::memory_order_acquire)); }
  void check_range(const State& state) const {
    if (state.bytes > kMostBytes || state.bytes < -kMostBytes)
      trap(at_, "the tx-count of the mbarrier at 0x%x becomes %lld, beyond 2^20 - 1", address_,
           static_cast<long long>(state.bytes));
  }
  template <class Change>
  void change(Change&& how) const {
    const std::atomic_ref word(*word_);
    u64 seen = word.load(std::memory_order_relaxed), next;
    do {
      State state = unpacked(seen);
      how(state);
      if (state.pending == 0 && state.bytes == 0) {
        state.pending = state.expected;
        state.phase = (state.phase + 1) % 8;
      }
      next = packed(state);
    } while (!word.compare_exchange_weak(seen, next, std::memory_order_release, std::memory_order_relaxed));
  }

  const Place& at_;
  const u32 address_;
  u64* word_;
};

inline void mbarrier_init(const Place& at, u32 address, u32 arrivals) {
  Mbarrier::init(at, address, arrivals);
}
inline void mbarrier_inval(const Place& at, u32 address) { cta().end_barrier(at, address); }
inline void mbarrier_arrive(const Place& at, u32 address) { Mbarrier(at, address).expect(0, 1); }
inline void mbarrier_arrive_expect_tx(const Place& at, u32 address, u32 nbytes) {
  Mbarrier(at, address).expect(nbytes, 1);
}
inline void mbarrier_expect_tx(const Place& at, u32 address, u32 nbytes) {
  Mbarrier(at, address).expect(nbytes, 0);
}

// Kernels call it in a loop, so it waits until the phase ends; a phase that does not end, ends the program.
// PTX permits it to return false at any time, and sometimes it does.
inline bool mbarrier_try_wait_parity(const Place& at, u32 address, u32 parity) {
  if (parity > 1) trap(at, "a parity of %u", parity);
  const Mbarrier barrier(at, address);
  thread_local u32 calls = 0;
  if (++calls % 7 == 0) return barrier.has_ended(parity);
  const Waiting waiting(at);
  wait_until([&] { return barrier.has_ended(parity); },
             [&] { trap(at, "the phase of parity %u does not end: %s", parity, barrier.text().c_str()); });
  return true;
}
inline bool mbarrier_test_wait_parity(const Place& at, u32 address, u32 parity) {
  if (parity > 1) trap(at, "a parity of %u", parity);
  return Mbarrier(at, address).has_ended(parity);
}

// ---- bulk copies ----

// The result of createpolicy, as far as a copy can check it.
inline constexpr u64 kPolicy = 0x14f0000000000000;

inline u64 createpolicy(const Place& at, u32 fraction) {
  if (!(value(fraction) > 0 && value(fraction) <= 1)) trap(at, "a fraction of %g", value(fraction));
  return kPolicy;
}
inline void check_policy(const Place& at, u64 policy) {
  if (policy != kPolicy)
    trap(at, "0x%llx is no cache policy: createpolicy makes one", static_cast<unsigned long long>(policy));
}

inline std::byte* global_of_bulk(const Place& at, u64 address, u32 nbytes) {
  check_is_aligned(at, address, kGranule);
  if (nbytes % kGranule != 0) trap(at, "%u bytes are no multiple of %u", nbytes, kGranule);
  static_cast<void>(Global::place(at, {}, address, kGranule));
  return reinterpret_cast<std::byte*>(address);
}

// One engine for each direction.
inline cuda_threads::StepEngine& load_engine() {
  static cuda_threads::StepEngine engine;
  return engine;
}
inline cuda_threads::StepEngine& store_engine() {
  static cuda_threads::StepEngine engine;
  return engine;
}

inline void bulk_load(const Place& at, u32 to, u64 from, u32 nbytes, u32 barrier) {
  const std::byte* global = global_of_bulk(at, from, nbytes);
  check_is_aligned(at, to, kGranule);
  Cta& here = cta();
  here.check_is_published(at, barrier);
  here.begin_load(at, to, nbytes);
  load_engine().submit([&here, to, global, nbytes, counts = Mbarrier(at, barrier)] {
    std::memcpy(here.at(to), global, nbytes);
    here.end_load(to, nbytes);
    counts.complete(nbytes);
    return true;
  });
}
inline void bulk_load_hinted(const Place& at, u32 to, u64 from, u32 nbytes, u32 barrier, u64 policy) {
  check_policy(at, policy);
  bulk_load(at, to, from, nbytes, barrier);
}

inline void bulk_store(const Place& at, u64 to, u32 from, u32 nbytes) {
  std::byte* global = global_of_bulk(at, to, nbytes);
  check_is_aligned(at, from, kGranule);
  Cta& here = cta();
  here.begin_store(at, from, nbytes);
  const std::shared_ptr<StoreGroup> group = store_groups.back();
  ++group->num_stores;
  group->unread.fetch_add(1, std::memory_order_relaxed);
  group->unwritten.fetch_add(1, std::memory_order_relaxed);
  // It reads in one step and writes in a later one, when the CTA may have ended.
  store_engine().submit(
      [&here, from, global, nbytes, group, was_read = false, bytes = std::vector<std::byte>()]() mutable {
        if (!was_read) {
          bytes.assign(here.at(from), here.at(from) + nbytes);
          here.end_reading(from, nbytes);
          group->unread.fetch_sub(1, std::memory_order_release);
          was_read = true;
          return false;
        }
        std::memcpy(global, bytes.data(), nbytes);
        group->unwritten.fetch_sub(1, std::memory_order_release);
        return true;
      });
}
inline void bulk_store_hinted(const Place& at, u64 to, u32 from, u32 nbytes, u64 policy) {
  check_policy(at, policy);
  bulk_store(at, to, from, nbytes);
}

inline void bulk_commit_group() { store_groups.push_back(std::make_shared<StoreGroup>()); }

// Waits until all of the thread's closed groups except the last `but` have been read or written.
inline void bulk_wait_group_read(const Place& at, u32 but) {
  for (std::size_t k = 0; k + but + 1 < store_groups.size(); ++k) {
    StoreGroup& group = *store_groups[k];
    wait_until([&] { return group.unread.load(std::memory_order_acquire) == 0; },
               [&] { trap(at, "stores are not read"); });
    group.read_was_awaited = true;
  }
}
inline void bulk_wait_group(const Place& at, u32 but) {
  for (; store_groups.size() > std::size_t{but} + 1; store_groups.pop_front())
    wait_until([&] { return store_groups[0]->unwritten.load(std::memory_order_acquire) == 0; },
               [&] { trap(at, "stores are not written"); });
}

}  // namespace ptx
