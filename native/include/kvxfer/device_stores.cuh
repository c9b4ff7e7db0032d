// Pages that a kernel stores by itself, into memory that a peer has offered (kvxfer.gpu.offer_stores) or
// anywhere else: store_page() by registers, PageStores in bulk where the GPU can.
#pragma once

#include "kvxfer/bulk_ring.h"
#include "kvxfer/device_bulk.cuh"
#include "kvxfer/device_memory.cuh"
#include "kvxfer/device_threads.cuh"

namespace kvxfer {

// How the bytes of a page are read, which is once: past the caches where there are any.
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
    // Four on their way in each thread: a store over NVLink is not waited for, a load is.
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

// Stores bytes of the device's memory into a peer's page, or anywhere else. Called by `num_lanes` threads, a
// warp or a CTA, of which this is number `lane`: each stores its part, and arrive() behind it tells whoever
// waits. 16 bytes at a time where both addresses are multiples of 16, else 4 or 1. The two do not overlap.
__device__ inline void store_page(void* to, const void* from, unsigned long long nbytes, unsigned lane,
                                  unsigned num_lanes) {
  store_page_by<ReadStreamed>(to, from, nbytes, lane, num_lanes);
}

// Stores pages one after the other, and tells when all are there. From shared memory, where threads have just
// computed them, or from the device's:
//
//   __shared__ kvxfer::StoreRing<> ring;        // for pages in the device's memory alone
//   kvxfer::PageStores<> stores(&ring);
//   for (...) stores.store(to, from, nbytes);   // by every thread
//   stores.arrive(their_word);
//
// On sm_90 and later, pages that begin at multiples of 16 bytes at both ends go in bulk (cp.async.bulk): one
// thread begins the copies and goes on, and no page passes through registers. Those in the device's memory go
// through the ring. Threads store as those of store_page() do whatever is left: pages on other boundaries,
// the last bytes of one whose length is no multiple of 16, those in the device's memory where there is no
// ring, and on earlier architectures all. It is the same source everywhere, and the same bytes.
//
// Every function is called by each of `threads`, outside of branches that not all of them take, and with the
// same arguments. Where not all threads of the CTA store, `threads` are whole warps with a barrier of their
// own (`Threads{threadIdx.x, 128, 1}`: the first four, by barrier 1), and the others go their own way. The
// ring is one object's from its making to the kernel's end.
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

  // Begins to store. What the threads wrote at `from` before, in whichever memory, is what goes; it stays as
  // it is until wait_until_read(), finish() or arrive() has returned. The two do not overlap.
  __device__ void store(void* to, const void* from, unsigned long long nbytes) {
    const bool from_shared = is_shared(from);
    // What all threads wrote, to the leader's copies by each thread's fence and to the leader by the barrier.
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

  // Until all pages but the last `kButLast`, a call of store() each, have been read: where they lay may be
  // written to again. With two pages of shared memory in turn, one is computed while the other is stored:
  // wait_until_read<1>().
  template <int kButLast = 0>
  __device__ void wait_until_read() {
    if constexpr (kInBulk) {
      if (is_leader()) {
        if (num_loading_ == 0) {
          bulk::wait_until_read<kButLast>();
        } else {
          // Their groups come behind those of pages before: what is waited for is rather too much. All stages
          // but one are loaded next without a look.
          store_what_is_loaded();
          bulk::wait_until_read<kButLast == 0 ? 0 : 1>();
        }
      }
    }
    sync(threads_);
  }

  // Until all pages are stored: for who tells of it by himself, as by fire(). Either this or arrive() comes
  // before the kernel's end.
  __device__ void finish() {
    wait_until_stored();
    sync(threads_);
  }

  // Until all pages are stored, and adds one to a word of the host's or of a peer's: whoever waits there for
  // all that arrive sees the pages. More may be stored behind it.
  __device__ void arrive(unsigned* word) {
    wait_until_stored();
    kvxfer::arrive(word, threads_);
  }

 private:
  static constexpr unsigned kAlignment = 16;  // of bulk copies: addresses and lengths

  __device__ bool is_leader() const { return threads_.index == 0; }

  // A group even where it is empty: wait_until_read() counts them.
  __device__ void store_from_shared(void* to, const void* from, unsigned nbytes) {
    if (nbytes != 0) bulk::store(to, from, nbytes, policy_);
    bulk::end_group();
  }

  // All stages but one are loaded while that one is stored.
  __device__ void store_through_ring(void* to, const void* from, unsigned long long nbytes) {
    for (unsigned long long at = 0; at < nbytes; at += kStoreStageNbytes) {
      if (num_loading_ == num_stages - 1) {
        store_oldest();
        bulk::wait_until_read<1>();  // the one before, whose stage is loaded next
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
  // The leader's.
  unsigned load_stage_ = 0, store_stage_ = 0, store_parity_ = 0;
  unsigned num_loading_ = 0;  // not stored yet
};

}  // namespace kvxfer
