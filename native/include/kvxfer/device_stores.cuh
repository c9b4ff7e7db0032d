// Functions with which a kernel itself stores pages into memory that a peer has offered
// (kvxfer.gpu.offer_stores), or anywhere else. store_page() stores through registers; PageStores stores in
// bulk where the GPU can.
#pragma once

#include "kvxfer/bulk_ring.h"
#include "kvxfer/device_bulk.cuh"
#include "kvxfer/device_memory.cuh"
#include "kvxfer/device_threads.cuh"

namespace kvxfer {

// How the bytes of a page are read. Each byte is read once, so loads from the device's memory do not stay in
// the caches.
struct ReadStreamed {
  template <class Vector>
  __device__ static Vector read(const Vector* at) {
    return __ldcs(at);
  }
};
struct ReadShared {
  template <class Vector>
  __device__ static Vector read(const Vector* at) {
    return *at;
  }
};

template <class Reads>
__device__ inline void store_page_by(void* to, const void* from, unsigned long long nbytes, unsigned lane,
                                     unsigned num_lanes) {
  const unsigned long long both =
      reinterpret_cast<unsigned long long>(to) | reinterpret_cast<unsigned long long>(from);
  unsigned long long stored = 0;
  if (both % sizeof(uint4) == 0) {
    // Each thread has four loads in flight: it waits for its loads, but not for its stores over NVLink.
    constexpr unsigned kAtOnce = 4;
    const unsigned long long num_vectors = nbytes / sizeof(uint4);
    const uint4* in = static_cast<const uint4*>(from);
    uint4* out = static_cast<uint4*>(to);
    unsigned long long at = lane;
    for (; at + (kAtOnce - 1) * num_lanes < num_vectors; at += kAtOnce * num_lanes) {
      uint4 vectors[kAtOnce];
#pragma unroll
      for (unsigned k = 0; k < kAtOnce; ++k) vectors[k] = Reads::read(in + at + k * num_lanes);
#pragma unroll
      for (unsigned k = 0; k < kAtOnce; ++k) __stcs(out + at + k * num_lanes, vectors[k]);
    }
    for (; at < num_vectors; at += num_lanes) __stcs(out + at, Reads::read(in + at));
    stored = num_vectors * sizeof(uint4);
  } else if (both % sizeof(unsigned) == 0) {
    const unsigned long long num_words = nbytes / sizeof(unsigned);
    const unsigned* in = static_cast<const unsigned*>(from);
    unsigned* out = static_cast<unsigned*>(to);
    for (unsigned long long at = lane; at < num_words; at += num_lanes)
      __stcs(out + at, Reads::read(in + at));
    stored = num_words * sizeof(unsigned);
  }
  const unsigned char* in = static_cast<const unsigned char*>(from);
  unsigned char* out = static_cast<unsigned char*>(to);
  for (stored += lane; stored < nbytes; stored += num_lanes) out[stored] = in[stored];
}

// Stores `nbytes` bytes of the device's memory into a peer's page, or anywhere else. `num_lanes` threads (a
// warp or a CTA) call it with the same ranges; each is number `lane` of them, and stores its part. Call
// arrive() afterwards to report the end to the waiter. A store has 16 bytes if both addresses are multiples
// of 16, else 4 bytes if both are multiples of 4, else 1. The two ranges must not overlap.
__device__ inline void store_page(void* to, const void* from, unsigned long long nbytes, unsigned lane,
                                  unsigned num_lanes) {
  store_page_by<ReadStreamed>(to, from, nbytes, lane, num_lanes);
}

// Stores pages one after the other, and reports when all of them are stored. The pages lie in shared memory,
// where threads have just computed them, or in the device's memory:
//
//   __shared__ kvxfer::StoreRing<> ring;        // needed for pages in the device's memory alone
//   kvxfer::PageStores<> stores(&ring);
//   for (...) stores.store(to, from, nbytes);   // by every thread
//   stores.arrive(their_word);
//
// On sm_90 and later, pages that begin at multiples of 16 bytes at both ends go in bulk (cp.async.bulk): one
// thread begins the copies and goes on, and no page passes through registers. Pages in the device's memory go
// through the ring. The threads store everything else as in store_page(): pages on other boundaries, the last
// bytes of a page whose length is not a multiple of 16, pages in the device's memory if there is no ring, and
// all pages on earlier architectures. Source and result are the same on every architecture.
//
// Each of `threads` calls every function, with the same arguments and outside of divergent branches. If not
// all threads of the CTA store, `threads` are whole warps with their own barrier (`Threads{threadIdx.x, 128,
// 1}`: the first four warps, by barrier 1), and the other threads do not take part. A ring belongs to one
// PageStores, from its construction to the kernel's end.
template <unsigned num_stages = kStoreStages, bool kInBulk = bulk::kAreHere>
class PageStores {
 public:
  using Ring = StoreRing<num_stages>;

  __device__ explicit PageStores(Ring* ring = nullptr, const Threads& threads = this_cta())
      : ring_(ring), threads_(threads) {
    if constexpr (kInBulk) {
      policy_ = bulk::streamed_policy();
      if (ring == nullptr || !is_leader()) return;
      for (bulk::Barrier& barrier : ring->ring.loaded) bulk::init_barrier(&barrier);
      bulk::publish_shared_writes();
    }
  }
  PageStores(const PageStores&) = delete;
  PageStores& operator=(const PageStores&) = delete;

  // Begins to store a page: what the threads wrote at `from` before the call, in either memory. Do not write
  // there until wait_until_read(), finish() or arrive() has returned. The two ranges must not overlap.
  __device__ void store(void* to, const void* from, unsigned long long nbytes) {
    const bool from_shared = is_shared(from);
    // Each thread's fence shows what it wrote to the leader's copies; the barrier shows it to the leader.
    if constexpr (kInBulk) {
      if (from_shared)
        bulk::publish_shared_writes();
      else
        bulk::publish_global_writes();
    }
    sync(threads_);
    unsigned long long begun = 0;
    if constexpr (kInBulk) {
      const unsigned long long both =
          reinterpret_cast<unsigned long long>(to) | reinterpret_cast<unsigned long long>(from);
      if (both % kAlignment == 0 && (from_shared || ring_ != nullptr))
        begun = nbytes / kAlignment * kAlignment;
      if (is_leader()) {
        if (begun != 0 && !from_shared)
          store_through_ring(to, from, begun);
        else
          store_from_shared(to, from, static_cast<unsigned>(begun));
      }
    }
    char* rest_to = static_cast<char*>(to) + begun;
    const char* rest = static_cast<const char*>(from) + begun;
    if (from_shared)
      store_page_by<ReadShared>(rest_to, rest, nbytes - begun, threads_.index, threads_.count);
    else
      store_page_by<ReadStreamed>(rest_to, rest, nbytes - begun, threads_.index, threads_.count);
  }

  // Waits until all pages but those of the last `kButLast` calls of store() have been read. Their sources may
  // then be written to again. With two pages of shared memory in turn, the threads compute one while the
  // other is stored: wait_until_read<1>().
  template <int kButLast = 0>
  __device__ void wait_until_read() {
    if constexpr (kInBulk) {
      if (is_leader()) {
        if (num_loading_ == 0) {
          bulk::wait_until_read<kButLast>();
        } else {
          // These groups come after those of earlier pages, so this may wait for more than it has to. The
          // next store() loads all stages but one without waiting for them.
          store_what_is_loaded();
          bulk::wait_until_read<kButLast == 0 ? 0 : 1>();
        }
      }
    }
    sync(threads_);
  }

  // Waits until all pages are stored; the kernel then reports it itself, for example with fire(). Call this
  // or arrive() before the kernel ends.
  __device__ void finish() {
    wait_until_stored();
    sync(threads_);
  }

  // Waits until all pages are stored, and adds one to a word of the host's or of a peer's. A waiter that has
  // seen all arrivals there also sees the pages. More pages may be stored afterwards.
  __device__ void arrive(unsigned* word) {
    wait_until_stored();
    kvxfer::arrive(word, threads_);
  }

 private:
  static constexpr unsigned kAlignment = 16;  // of bulk copies: addresses and lengths

  __device__ bool is_leader() const { return threads_.index == 0; }

  // Closes a group even if it is empty: wait_until_read() counts the groups.
  __device__ void store_from_shared(void* to, const void* from, unsigned nbytes) {
    if (nbytes != 0) bulk::store(to, from, nbytes, policy_);
    bulk::end_group();
  }

  // All stages but one are loaded while that one is stored.
  __device__ void store_through_ring(void* to, const void* from, unsigned long long nbytes) {
    for (unsigned long long at = 0; at < nbytes; at += kStoreStageNbytes) {
      if (num_loading_ == num_stages - 1) {
        store_oldest();
        bulk::wait_until_read<1>();  // the group before, whose stage is loaded next
      }
      const unsigned part =
          nbytes - at < kStoreStageNbytes ? static_cast<unsigned>(nbytes - at) : kStoreStageNbytes;
      bulk::Barrier* loaded = &ring_->ring.loaded[load_stage_];
      ring_->places[load_stage_] = {static_cast<char*>(to) + at, part};
      bulk::arrive_and_expect(loaded, part);
      bulk::load(ring_->ring.stages[load_stage_], static_cast<const char*>(from) + at, part, loaded, policy_);
      load_stage_ = (load_stage_ + 1) % num_stages;
      ++num_loading_;
    }
  }

  __device__ void store_oldest() {
    const typename Ring::Place place = ring_->places[store_stage_];
    bulk::wait_for_phase(&ring_->ring.loaded[store_stage_], store_parity_);
    store_from_shared(place.to, ring_->ring.stages[store_stage_], place.nbytes);
    store_stage_ = (store_stage_ + 1) % num_stages;
    if (store_stage_ == 0) store_parity_ ^= 1;  // round the ring: its barriers' next phase
    --num_loading_;
  }
  __device__ void store_what_is_loaded() {
    while (num_loading_ != 0) store_oldest();
  }

  __device__ void wait_until_stored() {
    if constexpr (kInBulk) {
      if (!is_leader()) return;
      store_what_is_loaded();
      bulk::wait_until_stored();
    }
  }

  Ring* ring_;
  Threads threads_;
  unsigned long long policy_ = 0;
  // Used by the leader alone.
  unsigned load_stage_ = 0, store_stage_ = 0, store_parity_ = 0;
  unsigned num_loading_ = 0;  // not stored yet
};

}  // namespace kvxfer
